"""Devices: where blocks compute and what copies cost. `make_device` chooses by the block's `device` key."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import UnsupportedError
from lazytrain_ds.hardware.emulation import Emulation
from lazytrain_ds.hardware.spec import HardwareSpec
from lazytrain_ds.runtime.device.base import Device, DoneEvent, Event, HostEvent
from lazytrain_ds.runtime.device.cpu import CpuDevice
from lazytrain_ds.runtime.device.cuda import CudaDevice
from lazytrain_ds.runtime.device.emulated import EmulatedDevice

__all__ = ["Device", "DoneEvent", "Event", "HostEvent", "make_device"]


def make_device(config: LazyTrainConfig, hardware: HardwareSpec, pin_memory: bool = True) -> Device:
    """The device of this process, capped as the config says. `pin_memory`: the user's, from the ZeRO config."""
    if config.device != "auto":
        return EmulatedDevice(Emulation.parse(config.device["emulate"]))
    device = torch.device(get_accelerator().current_device_name())
    if device.type == "cpu":
        return CpuDevice(hardware.device_memory_bytes)
    if device.type == "cuda":
        return CudaDevice(device, hardware.device_memory_bytes, pin_memory)
    raise UnsupportedError(f"lazytrain runs on CUDA devices and on CPUs, this process computes on {device.type!r}")
