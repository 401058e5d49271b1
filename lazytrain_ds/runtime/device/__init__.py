"""Devices: where blocks compute and what copies cost. `make_device` chooses by the block's `device` key."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import UnsupportedError
from lazytrain_ds.hardware.spec import HardwareSpec
from lazytrain_ds.runtime.device.base import Device, DoneEvent, Event, HostEvent
from lazytrain_ds.runtime.device.cpu import CpuDevice

__all__ = ["Device", "DoneEvent", "Event", "HostEvent", "make_device"]


def make_device(config: LazyTrainConfig, hardware: HardwareSpec) -> Device:
    """The device of this process, capped as the config says."""
    name = torch.device(get_accelerator().current_device_name()).type
    if name == "cpu":
        return CpuDevice(hardware.device_memory_bytes)
    raise UnsupportedError(f"lazytrain runs on CPUs so far, this process computes on {name!r}; remove the block")
