"""Moves activations between device, host and NVMe: buffers, keys, what is in motion, and who waits."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lazytrain_ds.errors import DeviceMemoryError
from lazytrain_ds.planning.schema import ChannelName, TierName
from lazytrain_ds.planning.timeline import TaskKind
from lazytrain_ds.runtime.activations.buffers import HostBuffers
from lazytrain_ds.runtime.activations.counters import ActivationCounters
from lazytrain_ds.runtime.activations.storages import OffloadedStorage
from lazytrain_ds.runtime.device.base import Device, Event
from lazytrain_ds.runtime.swap.memory import aligned_empty

__all__ = ["DEFAULT_STAGING_BYTES", "Mover", "OnStall", "OnTask", "Store", "StoreTicket"]

DEFAULT_STAGING_BYTES = 1 << 30
"""Host memory for tensors on their way to and from NVMe, unless the caller says otherwise."""

OnTask = Callable[[TaskKind, int, ChannelName, float, float, int], None]
"""(kind, block, channel, start, end, bytes); times are time.perf_counter()."""


def _aligned(byte_count: int) -> torch.Tensor:
    """Memory that the store can move without a copy of its own."""
    return aligned_empty(byte_count, torch.uint8)


OnStall = Callable[[ChannelName, float], None]
"""(channel, seconds) that compute waited."""


class StoreTicket(Protocol):
    """A transfer under way in a store."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...


class _Ended(Event):
    """The end of a store's transfer."""

    def __init__(self, ticket: StoreTicket) -> None:
        self._ticket = ticket

    @property
    def at(self) -> float | None:  # type: ignore[override]
        return getattr(self._ticket, "end_seconds", None)

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> None:
        self._ticket.wait()


class Store(Protocol):
    """What is needed of the NVMe store. Transfers of one key keep their order."""

    def write(self, key: str, tensor: torch.Tensor) -> StoreTicket: ...
    def read(self, key: str, out: torch.Tensor) -> StoreTicket: ...


class Mover:
    """Shared by all blocks of one engine."""

    def __init__(
        self,
        device: Device,
        counters: ActivationCounters,
        store: Store | None = None,
        *,
        pin_memory: bool = False,
        host_cap_bytes: int | None = None,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        allocate_staging: Callable[[int], torch.Tensor] | None = None,
        on_task: OnTask | None = None,
        on_stall: OnStall | None = None,
    ) -> None:
        self.device, self.counters, self.store = device, counters, store
        self.on_task, self._on_stall = on_task, on_stall
        self._pin_memory = pin_memory
        self.host = HostBuffers(self._empty_host, "offloaded activations", host_cap_bytes)
        self.staging = HostBuffers(
            allocate_staging or (self._empty_host if pin_memory else _aligned), "activations on their way to NVMe",
            staging_bytes,
        )  # fmt: skip
        self._moving: deque[weakref.ref[OffloadedStorage]] = deque()
        # deque.append is atomic: storages die on autograd's threads, buffers come back on ours.
        self._buried: deque[tuple[Any, ...]] = deque()
        self._free_keys: deque[str] = deque()
        self._new_keys = (f"activation-{index}" for index in itertools.count())
        self._lock = threading.Lock()
        device.add_reliever(1, self._wait_for_departure)

    def _empty_host(self, byte_count: int) -> torch.Tensor:
        if self._pin_memory:
            return self.device.empty_host(byte_count, torch.uint8)
        return torch.empty(byte_count, dtype=torch.uint8)

    # -- memory ------------------------------------------------------------------------------------------------
    def try_allocate(self, byte_count: int, must: bool) -> torch.Tensor | None:
        """Device memory for what comes back; None where an optional fetch finds none."""
        try:
            return self.device.allocate(byte_count, torch.uint8, "activations (back)", must)
        except DeviceMemoryError:
            if must:
                raise
            return None

    def _wait_for_departure(self) -> bool:
        for reference in list(self._moving):
            storage = reference()
            if storage is not None and storage.state == "leaving":
                storage.advance(block=True)
                return True
        return False

    def take_host(self, byte_count: int, tier: TierName, must: bool = True) -> torch.Tensor | None:
        """A host buffer: a home for tier `host`, staging for `nvme`. Waits for staging in use before it gives up."""
        pool = self.host if tier == "host" else self.staging
        self._exhume()
        buffer = pool.try_take(byte_count)
        while buffer is None:
            if not must:
                return None
            if not self._free_something(pool):
                if pool is self.staging and not pool.in_use_bytes:
                    # One tensor larger than the whole bound: it has to pass somehow, and it passes alone.
                    pool.cap_bytes = pool.padded(byte_count)
                else:
                    raise pool.refusal(byte_count)
            buffer = pool.try_take(byte_count)
        return buffer

    def _free_something(self, pool: HostBuffers) -> bool:
        """Wait until a buffer of `pool` comes back; False when nothing under way will bring one."""
        before = pool.in_use_bytes
        for reference in list(self._moving):
            storage = reference()
            if storage is not None and (pool is self.host) == (storage.tier == "host"):
                while not storage.advance(block=True):
                    pass
            if pool.in_use_bytes < before:
                return True
        while self._buried and pool.in_use_bytes >= before:
            self._exhume(block=True)
        return pool.in_use_bytes < before

    def give_host(self, buffer: torch.Tensor, tier: TierName) -> None:
        """Return a buffer from `take_host`."""
        (self.host if tier == "host" else self.staging).give(buffer)

    def take_key(self) -> str:
        """A name in the store that no living storage uses; names are reused, so files are too."""
        try:
            return self._free_keys.popleft()
        except IndexError:
            with self._lock:
                return next(self._new_keys)

    # -- motion ------------------------------------------------------------------------------------------------
    def track(self, storage: OffloadedStorage) -> None:
        """`storage` has a transfer under way."""
        self._moving.append(weakref.ref(storage))

    @property
    def moving(self) -> bool:
        """Whether `advance` has anything to look at."""
        return bool(self._moving or self._buried)

    def advance(self) -> None:
        """Note finished transfers and start what follows them. Never waits."""
        for _ in range(len(self._moving)):
            reference = self._moving.popleft()
            storage = reference()
            if storage is not None and not storage.advance():
                self._moving.append(reference)
        self._exhume()

    def settle(self) -> None:
        """Wait for everything on its way out (tests and the end of a run)."""
        for reference in list(self._moving):
            storage = reference()
            while storage is not None and not storage.advance(block=True):
                pass
        self._moving.clear()
        self._exhume(block=True)

    def bury(
        self,
        pending: Event | StoreTicket | None,
        host: torch.Tensor | None,
        source: torch.Tensor | None,
        back: torch.Tensor | None,
        tier: TierName,
        key: str | None,
    ) -> None:
        """A storage died: its buffers return once `pending` is over. Any thread."""
        self._buried.append((pending, host, source, back, tier, key))
        if pending is None or pending.done():
            self._exhume()

    def _exhume(self, block: bool = False) -> None:
        for _ in range(len(self._buried)):
            try:
                entry = self._buried.popleft()
            except IndexError:
                return
            pending, host, _, _, tier, key = entry
            if pending is not None:
                if not block and not pending.done():
                    self._buried.append(entry)
                    continue
                try:
                    pending.wait()
                except Exception:  # nobody needs the data any more; a store reports its own unobserved failures
                    key = None
            if host is not None:
                self.give_host(host, tier)
            if key is not None:
                self._free_keys.append(key)

    # -- waiting -----------------------------------------------------------------------------------------------
    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        channel: ChannelName,
        kind: TaskKind,
        block: int,
        made: bool = False,
    ) -> Event:
        """Copy behind the compute that made `source`; a device that times its copies is told what this one is for.

        `made`: in the block under way. Else what made it is over: a block's input, or what comes back.
        """
        after = (self.device.record() if made else self.device.record_entry(),)
        if self.device.on_copy is None:
            return self.device.copy_async(target, source, channel, after)
        return self.device.copy_async(target, source, channel, after, task=(kind, block))

    def wait_event(self, event: Event) -> None:
        """Block until a copy to the host is over: memory was short, or its data is wanted back already."""
        self._stalled("d2h", self.device.host_waits(event))

    def wait_ticket(self, ticket: StoreTicket, channel: ChannelName) -> None:
        """Block until a store's transfer is over; waiting for a read is a stall of compute."""
        seconds = self.device.host_waits(_Ended(ticket))
        if channel == "nvme_read":
            self._stalled(channel, seconds)

    def compute_waits(self, event: Event) -> None:
        """Later compute starts after `event`; what it waits counts as stall."""
        self.device.waits(event, lambda end, seconds: self._stalled("h2d", seconds))

    def _stalled(self, channel: ChannelName, seconds: float) -> None:
        self.counters.stalled(channel, seconds)
        if self._on_stall is not None and seconds > 0:
            self._on_stall(channel, seconds)

    def prefetched(self, byte_count: int) -> None:
        """A copy back was issued."""
        self.counters.prefetched_bytes += byte_count

    def report(self, kind: TaskKind, block: int, channel: ChannelName, started: float, byte_count: int) -> None:
        """Tell the monitor about something that just ended, unless the device does that itself."""
        if self.on_task is not None and not (channel in ("h2d", "d2h") and self.device.on_copy is not None):
            self.on_task(kind, block, channel, started, time.perf_counter(), byte_count)

    @property
    def bytes_in_use(self) -> dict[str, int]:
        """Host bytes held for activations: homes and staging; 0 after a step."""
        return {"host": self.host.in_use_bytes, "staging": self.staging.in_use_bytes}
