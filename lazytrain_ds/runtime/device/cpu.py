"""The CPU as its own device: copies happen at once, in the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil
import torch

from lazytrain_ds.planning.schema import ChannelName
from lazytrain_ds.runtime.device.base import Device, DoneEvent, Event


class CpuDevice(Device):
    """`copy_async` waits for its dependencies and copies before it returns."""

    name = "cpu"

    def __init__(self, cap_bytes: int | None = None) -> None:
        super().__init__(torch.device("cpu"), cap_bytes, pin_memory=False)

    def available_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, channel: ChannelName, after: Sequence[Event] = ()
    ) -> Event:
        for event in after:
            event.wait()
        target.copy_(source)
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
