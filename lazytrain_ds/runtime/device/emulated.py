"""A CPU that behaves like a device behind a link: every byte that would cross takes its wall time on its own channel.

A channel is one thread. A copy starts when it was issued, its dependencies are done and the channel is free, and ends
latency + bytes / rate later, on an ideal clock: a thread that wakes up late does not delay what follows. The bytes are
really copied. What LazyTrain holds "on the device", and what a block in use needs for itself by its profile, is counted
and capped.

Compute is the real one, or timed (`hardware.emulation`): then a block's visit takes what the plan in force expects, and
what is computed is still real (`timing.py`). NVMe transfers and host work are timed where the section gives a rate.

Debug mode: slots given back are filled with NaN and channels wait a random time before each copy, so that a copy or a
read that does not wait for what it must shows as a wrong number.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from lazytrain_ds.hardware.emulation import Emulation
from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.program import BACKWARD, FORWARD, RERUN, Program
from lazytrain_ds.planning.schema import ChannelName
from lazytrain_ds.planning.timeline import TaskKind
from lazytrain_ds.runtime.device.base import Device, DoneEvent, Event, HostEvent
from lazytrain_ds.runtime.device.timing import ComputeClock, HostClock, Past, RateLimit, happened_at, late, sleep_until

__all__ = ["EmulatedDevice", "Emulation"]

FIXED = "fixed (context, inputs, what lies outside blocks)"
TRANSIENT = "a block in use"
KINDS = {"forward": FORWARD, "rerun": RERUN, "backward": BACKWARD}


class _Channel:
    """One direction of the link."""

    def __init__(self, name: ChannelName, rate: float, latency: float, jitter: random.Random | None, report: Any):
        self.name, self.rate, self.latency = name, rate, latency
        self._jitter = jitter
        self._report = report
        self._free_at = 0.0
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"lazytrain-{name}", daemon=True)
        self._thread.start()

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Event],
        task: tuple[TaskKind, int] | None = None,
        issued: float | None = None,
    ) -> HostEvent:
        """`issued`: when, if not just now."""
        done = HostEvent()
        moment = time.perf_counter() if issued is None else issued
        self._jobs.put((target, source, tuple(after), task, done, moment))
        return done

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            target, source, after, task, done, started = job
            try:
                for event in after:
                    event.wait()
                    started = max(started, happened_at(event))
                if self._jitter is not None:
                    time.sleep(self._jitter.random() * 2e-3)
                    started = max(started, time.perf_counter())
                started = max(started, self._free_at)
                byte_count = source.numel() * source.element_size()
                self._free_at = started + self.latency + byte_count / self.rate
                target.copy_(source)
                sleep_until(self._free_at)
                if task is not None:
                    self._report(task, self.name, started, self._free_at, byte_count)
                done.set(at=self._free_at)
            except BaseException as error:
                done.set(error)
            del job, target, source, after, done

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


class EmulatedDevice(Device):
    """See the module. `throttle` is for the NVMe store: it makes the disk as slow as the section says (or is None)."""

    name = "emulated"

    def __init__(self, emulation: Emulation) -> None:
        super().__init__(torch.device("cpu"), emulation.memory_bytes, pin_memory=False)
        self.emulation = emulation
        self.debug = emulation.debug
        self._channels: dict[str, _Channel] = {}
        for number, (name, rate) in enumerate((("h2d", emulation.h2d), ("d2h", emulation.d2h))):
            jitter = random.Random(emulation.seed * 2 + number) if emulation.debug else None
            self._channels[name] = _Channel(name, rate, emulation.latency_seconds, jitter, self._copied)  # type: ignore[arg-type]
        self._clock = ComputeClock() if emulation.timed else None
        self._host = HostClock() if emulation.host is not None else None
        rates = {"read": emulation.nvme_read, "write": emulation.nvme_write}
        behind = self._clock.behind if self._clock is not None else lambda: 0.0
        self.throttle = RateLimit(rates, behind) if any(rates.values()) else None
        self._fixed_bytes = 0
        self._visits: dict[tuple[int, int], tuple[float, int]] = {}
        self._update_seconds: list[float] = []
        self._states_on_nvme: list[bool] = []
        self._addition_seconds = 0.0
        self._gradients_in = 0.0

    def _copied(
        self, task: tuple[TaskKind, int], channel: ChannelName, start: float, end: float, byte_count: int
    ) -> None:
        if self.on_copy is not None:
            self.on_copy(*task, channel, start, end, byte_count)

    @property
    def added_seconds(self) -> tuple[float, float]:
        """What this machine added to timed compute so far: see `ComputeClock`."""
        return (0.0, 0.0) if self._clock is None else (self._clock.overrun_seconds, self._clock.late_seconds)

    def played_seconds(self) -> float:
        """Where timed compute stands without that (with real compute: `time.perf_counter()`)."""
        return time.perf_counter() if self._clock is None else self._clock.played_seconds()

    def available_bytes(self) -> int:
        return self.emulation.memory_bytes - self.ledger.live_bytes

    # -- order -------------------------------------------------------------------------------------------------
    def copy_async(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        channel: ChannelName,
        after: Sequence[Event] = (),
        task: tuple[TaskKind, int] | None = None,
    ) -> Event:
        issued = None if self._clock is None else self._clock.now()
        return self._channels[channel].copy(target, source, after, task, issued)

    def record(self) -> Event:
        # Real compute runs in the caller's thread: what was issued has happened.
        return DoneEvent() if self._clock is None else self._clock.record()

    def record_entry(self) -> Event:
        return DoneEvent() if self._clock is None else Past(self._clock.now())

    def compute_waits(self, event: Event) -> float:
        if self._clock is not None:
            return self._clock.wait_for(event)
        return self.host_waits(event)

    def host_waits(self, event: Event) -> float:
        return super().host_waits(event) if self._clock is None else self._clock.wait_for(event)

    def synchronize(self) -> None:
        for channel in self._channels.values():
            empty = torch.empty(0)
            channel.copy(empty, empty, ()).wait()

    # -- the plan in force, and its times ----------------------------------------------------------------------
    def use_plan(self, instance: Instance, plan: Plan) -> None:
        """Count the instance's fixed bytes; from now on visits need and, if timed, take what the plan expects."""
        self._count_fixed(instance.fixed_device_bytes)
        costs = Costs(instance, plan.micro_batch)
        program = Program(costs, plan)
        self._visits = {}
        for position, (kind, block) in enumerate(program.visits):
            extra = program.start_extra[position]
            if kind == FORWARD:  # the ledger counts a block's input from the end of its forward on
                extra += costs.blocks[block].boundary_bytes
            seconds = program.compute_seconds[position] + program.recompute_seconds[position]
            self._visits[kind, block] = (seconds, extra)
        self._update_seconds = [costs.group(index, block.optimizer)[0] for index, block in enumerate(plan.blocks)]
        self._states_on_nvme = [block.optimizer.tier == "nvme" for block in plan.blocks]
        self._addition_seconds = instance.host_accumulate_seconds_per_parameter

    def _count_fixed(self, byte_count: int) -> None:
        if byte_count > self._fixed_bytes:
            self.ledger.charge(byte_count - self._fixed_bytes, FIXED)
        else:
            self.ledger.discharge(self._fixed_bytes - byte_count, FIXED)
        self._fixed_bytes = byte_count

    def visit_begins(self, phase: str, block: int) -> int:
        seconds, extra = self._visits.get((KINDS[phase], block), (0.0, 0))
        if extra:
            self.charge(extra, TRANSIENT)
            self.ledger.discharge(extra, TRANSIENT)
        if self._clock is not None:
            self._clock.visit_begins(seconds)
        return extra

    def visit_ends(self) -> tuple[float, float] | None:
        return None if self._clock is None else self._clock.visit_ends()

    def updates_begin(self) -> None:
        if self._host is not None and self._clock is not None:
            self._gradients_in = self._clock.now()
            self._host.possible(self._gradients_in)

    def update_possible(self, at: float) -> None:
        if self._host is not None:
            self._host.possible(at)

    def update_ends(self, block: int, share: float, started: float) -> tuple[float, float]:
        if self._host is None or not self._update_seconds:
            return super().update_ends(block, share, started)
        seconds = share * self._update_seconds[block]
        if not self._states_on_nvme[block]:
            # Queued since `updates_begin`: a worker that this machine wakes up late has not begun late.
            seconds, started = max(seconds, late(started)), self._host.free_at
        end = self._host.ends(started, seconds)
        return end - seconds, end

    def updates_end(self, began: float, written: float = 0.0) -> float:
        if self._host is None or self._clock is None:
            return super().updates_end(began, written)
        return self._clock.wait_for(Past(max(self._host.free_at, written)), since=self._gradients_in)

    def addition_ends(self, numel: int, started: float) -> None:
        if self._host is not None:
            self._host.possible(started)
            self._host.ends(started, numel * self._addition_seconds)

    # -- ends --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        self._count_fixed(0)
        for channel in self._channels.values():
            channel.close()
