"""What the runtime needs from a device: counted memory, copies on channels, events. Everything else is the plan's.

Invariants every back end keeps:
* copies on one channel complete in the order they were issued; different channels run at once;
* `copy_async` reads its source and writes its target only after every event in `after` is done;
* nothing here waits on the host except `Event.wait`, `host_waits` and `synchronize`.

A device may also play its own speed (`emulated.py`): then it is told which plan is in force, when a block is visited
and when host work ends. Real devices ignore that.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from lazytrain_ds.errors import DeviceMemoryError, format_bytes
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.schema import ChannelName
from lazytrain_ds.planning.timeline import TaskKind
from lazytrain_ds.runtime.swap import Throttle

OnCopy = Callable[[TaskKind, int, ChannelName, float, float, int], None]
"""`on_copy(kind, block, channel, start, end, bytes)`, from any thread; times are time.perf_counter()."""

OnWait = Callable[[float, float], None]
"""`on_wait(end, seconds)`: compute stood still for `seconds` until `end` (perf_counter)."""

OnVisit = Callable[[str, int, float, float], None]
"""`on_visit(phase, block, start, end)`: compute used a block; times are time.perf_counter()."""

Relieve = Callable[[], bool]
"""Give back device memory that somebody else will need less urgently, or wait until some has been given back; False
when there is none to give."""

__all__ = ["Device", "DoneEvent", "Event", "HostEvent", "Ledger", "OutOfDeviceMemoryError"]


class OutOfDeviceMemoryError(DeviceMemoryError, torch.OutOfMemoryError):
    """Ours, and torch's too: a script that catches CUDA's out-of-memory error catches it as well."""


class Event(ABC):
    """A point in the work of a channel or of a host thread. `at`: when it happened (perf_counter), where known."""

    at: float | None = None

    @abstractmethod
    def done(self) -> bool:
        """Whether everything before this point has happened."""

    @abstractmethod
    def wait(self) -> None:
        """Block the calling host thread until `done()`. Raises what the work behind it raised."""


class DoneEvent(Event):
    """An event that has happened."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class HostEvent(Event):
    """Set by a host thread (an optimizer worker, an NVMe read); carries the error of the work, if any."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self.error: BaseException | None = None

    def set(self, error: BaseException | None = None, at: float | None = None) -> None:
        """Mark as done; `error` is raised in whoever waits. `at`: when it was done, if not just now."""
        self.error = error
        self.at = time.perf_counter() if at is None else at
        self._flag.set()

    def done(self) -> bool:
        return self._flag.is_set()

    def wait(self) -> None:
        self._flag.wait()
        if self.error is not None:
            raise self.error


class Ledger:
    """Counts bytes by purpose against a cap. Thread-safe."""

    def __init__(self, cap_bytes: int | None = None) -> None:
        self.cap_bytes = cap_bytes
        self._lock = threading.Lock()
        self._by_purpose: dict[str, int] = {}
        self._live_bytes = 0
        self._peak_bytes = 0

    def charge(self, byte_count: int, purpose: str) -> None:
        """Count `byte_count` more; OutOfDeviceMemoryError (and nothing counted) if that exceeds the cap."""
        with self._lock:
            if self.cap_bytes is not None and self._live_bytes + byte_count > self.cap_bytes:
                free = self.cap_bytes - self._live_bytes
                held = ", ".join(f"{name} {format_bytes(n)}" for name, n in sorted(self._by_purpose.items()) if n)
                raise OutOfDeviceMemoryError(
                    f"device memory cap reached: {purpose} needs {format_bytes(byte_count)}, "
                    f"{format_bytes(free)} of {format_bytes(self.cap_bytes)} are free (held: {held or 'nothing'}). "
                    "Raise lazytrain.device_memory, use a smaller micro-batch, or let the planner choose again."
                )
            self._by_purpose[purpose] = self._by_purpose.get(purpose, 0) + byte_count
            self._live_bytes += byte_count
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def discharge(self, byte_count: int, purpose: str) -> None:
        """Give back what `charge` counted."""
        with self._lock:
            self._by_purpose[purpose] = self._by_purpose.get(purpose, 0) - byte_count
            self._live_bytes -= byte_count

    def touch(self, byte_count: int, purpose: str) -> None:
        """Count bytes that are in use for a moment: they matter to the peak and to the cap."""
        self.charge(byte_count, purpose)
        self.discharge(byte_count, purpose)

    @property
    def live_bytes(self) -> int:
        """Bytes counted now."""
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest `live_bytes` since `reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Start a new peak from the current level."""
        with self._lock:
            self._peak_bytes = self._live_bytes

    def by_purpose(self) -> dict[str, int]:
        """Live bytes per purpose."""
        with self._lock:
            return {name: count for name, count in self._by_purpose.items() if count}


class Device(ABC):
    """A compute device with its channels and a ledger of the bytes that LazyTrain holds on it."""

    name: str

    def __init__(self, torch_device: torch.device, cap_bytes: int | None = None, pin_memory: bool = False) -> None:
        self.torch_device = torch_device
        self.ledger = Ledger(cap_bytes)
        self.pin_memory = pin_memory
        self.on_copy: OnCopy | None = None
        self.on_visit: OnVisit | None = None
        self.throttle: Throttle | None = None
        self.debug = False
        self._relievers: list[tuple[int, Relieve]] = []

    # -- memory ------------------------------------------------------------------------------------------------
    def add_reliever(self, order: int, relieve: Relieve) -> None:
        """At the cap `relieve` is asked, those of a lower `order` first, until there is room.

        The first step has not been slowed down by anything yet: its forward runs ahead of the copies that make room in
        a plan's steady state, and has to wait for them.
        """
        self._relievers.append((order, relieve))
        self._relievers.sort(key=lambda entry: entry[0])

    def charge(self, byte_count: int, purpose: str, must: bool = True) -> None:
        """Count `byte_count` more; at the cap ask the relievers, then (at once if not `must`) DeviceMemoryError."""
        while True:
            try:
                self.ledger.charge(byte_count, purpose)
                return
            except DeviceMemoryError:
                if not must or not any(relieve() for _, relieve in self._relievers):
                    raise

    def allocate(self, numel: int, dtype: torch.dtype, purpose: str, must: bool = True) -> torch.Tensor:
        """A counted, uninitialised 1-D tensor on the device; above the cap as `charge`."""
        byte_count = numel * dtype.itemsize
        self.charge(byte_count, purpose, must)
        try:
            return self._empty(numel, dtype)
        except BaseException:
            self.ledger.discharge(byte_count, purpose)
            raise

    def free(self, tensor: torch.Tensor, purpose: str) -> None:
        """Uncount a tensor from `allocate`; the caller drops its reference."""
        self.ledger.discharge(tensor.numel() * tensor.element_size(), purpose)

    def allocated_bytes(self) -> int:
        """Bytes of device memory in use now: by the whole process if that can be told, else what the ledger counts."""
        return self.ledger.live_bytes

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D host tensor, page-locked if the user's config allows and the machine can."""
        return torch.empty(numel, dtype=dtype)

    @abstractmethod
    def available_bytes(self) -> int:
        """Bytes of device memory that can really be had now, or the emulated capacity."""

    # -- order -------------------------------------------------------------------------------------------------
    @abstractmethod
    def copy_async(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        channel: ChannelName,
        after: Sequence[Event] = (),
        task: tuple[TaskKind, int] | None = None,
    ) -> Event:
        """Copy on `channel` ("h2d" or "d2h") once `after` is done; both tensors stay alive until the event is.

        `task`: what for and for which block; devices that can time a copy report it to `on_copy`.
        """

    @abstractmethod
    def record(self) -> Event:
        """An event behind all compute issued so far by this thread."""

    def record_entry(self) -> Event:
        """An event behind the compute issued before the block under way: what made the block's input is over."""
        return self.record()

    @abstractmethod
    def compute_waits(self, event: Event) -> float:
        """Later compute starts only after `event`. Returns the seconds the host was blocked (0 with real streams)."""

    def waits(self, event: Event, report: OnWait) -> None:
        """`compute_waits`, and `report(end, seconds)`, now or later, if compute had to wait."""
        seconds = self.compute_waits(event)
        if seconds:
            report(time.perf_counter() if event.at is None else event.at, seconds)

    def host_waits(self, event: Event) -> float:
        """Neither the host nor later compute goes on before `event`. Returns the seconds that took."""
        if event.done():
            event.wait()  # raises the error of failed work
            return 0.0
        started = time.perf_counter()
        event.wait()
        return time.perf_counter() - started

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all channels and all compute. Never called inside a step."""

    # -- a device that plays its own speed ---------------------------------------------------------------------
    def use_plan(self, instance: Instance, plan: Plan) -> None:  # noqa: B027 - hooks, not duties, from here on
        """This plan is in force from now on."""

    def visit_begins(self, phase: str, block: int) -> int:
        """Compute starts to use a block (`forward`, `rerun`, `backward`), whose parameters are there.

        Returns the bytes it needs for itself until it ends, as far as the ledger does not count them (0: unknown).
        """
        return 0

    def visit_ends(self) -> tuple[float, float] | None:
        """The visit's compute has been issued. (start, end) where that is known now; None where nothing is.

        A device that only knows later says so in `times_later` and calls `on_visit` from `report_times`.
        """
        return None

    times_later = False

    def report_times(self) -> None:  # noqa: B027
        """Report what ran on the device and has ended since the last call: copies, visits, waits. Never waits."""

    def updates_begin(self) -> None:  # noqa: B027
        """All gradients are in and the norm is known: updates are possible from now on."""

    def update_ends(self, block: int, share: float, started: float) -> tuple[float, float]:
        """`share` of a block's optimizer update, begun at `started`, has been computed. Returns its start and end."""
        return started, time.perf_counter()

    def update_possible(self, at: float) -> None:  # noqa: B027
        """The next update had to wait for something (a staging buffer) until `at`."""

    def updates_end(self, began: float, written: float = 0.0) -> float:
        """Compute has waited, since `began`, for all updates of a serial step. Returns for how many seconds.

        `written`: when the last of their writes to NVMe ended, 0 if there was none.
        """
        return time.perf_counter() - began

    def addition_ends(self, numel: int, started: float) -> None:  # noqa: B027
        """Gradients of `numel` elements, from `started` on, have been added in host memory."""

    # -- ends --------------------------------------------------------------------------------------------------
    def retire(self, tensor: torch.Tensor) -> Event | None:
        """A slot was given back. With `debug` it is filled with NaN, so that a late reader shows.

        Returns the event after which it may be written again, if that is not just the compute that read it.
        """
        if not self.debug or not tensor.is_floating_point():
            return None
        tensor.fill_(float("nan"))
        return self.record()

    def close(self) -> None:  # noqa: B027
        """Stop threads; the device is not used afterwards."""
