"""The CPU as its own device: copies happen at once, in the caller's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import psutil
import torch

from lazytrain_ds.planning.schema import ChannelName
from lazytrain_ds.planning.timeline import TaskKind
from lazytrain_ds.runtime.device.base import Device, DoneEvent, Event


class _LateCopy(Event):
    """A copy whose dependencies were not done when it was issued: made by whoever waits for it, or sees them done."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> None:
        self._work: tuple[torch.Tensor, torch.Tensor, Sequence[Event]] | None = (target, source, after)
        self._lock = threading.Lock()

    def done(self) -> bool:
        work = self._work
        if work is not None and all(event.done() for event in work[2]):
            self.wait()
        return self._work is None

    def wait(self) -> None:
        with self._lock:
            if self._work is not None:
                target, source, after = self._work
                for event in after:
                    event.wait()
                target.copy_(source)
                self._work = None


class CpuDevice(Device):
    """`copy_async` copies before it returns, or, where a dependency is not done, when it is waited for."""

    name = "cpu"

    def __init__(self, cap_bytes: int | None = None) -> None:
        super().__init__(torch.device("cpu"), cap_bytes, pin_memory=False)

    def available_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def copy_async(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        channel: ChannelName,
        after: Sequence[Event] = (),
        task: tuple[TaskKind, int] | None = None,
    ) -> Event:
        if not all(event.done() for event in after):
            return _LateCopy(target, source, after)
        for event in after:
            event.wait()  # raises the error of failed work
        started = time.perf_counter()
        target.copy_(source)
        if self.on_copy is not None and task is not None:
            self.on_copy(*task, channel, started, time.perf_counter(), source.numel() * source.element_size())
        return DoneEvent()

    def record(self) -> Event:
        return DoneEvent()

    def compute_waits(self, event: Event) -> float:
        if event.done():
            event.wait()  # raises the error of failed work
            return 0.0
        started = time.perf_counter()
        event.wait()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        return None
