"""The machine this process runs on, as the planner sees it, with the user's caps."""

from __future__ import annotations

import os

import psutil

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.hardware.spec import HardwareSpec
from lazytrain_ds.planning.instance import Channel

__all__ = ["local_hardware"]


def local_hardware(config: LazyTrainConfig) -> HardwareSpec:
    """Memory that is available now, rates of a modest machine. On a CPU device and host share one memory: halves."""
    available = psutil.virtual_memory().available
    device = available // 2 if config.device_memory == "auto" else int(config.device_memory)
    host = available // 2 if config.host_memory == "auto" else int(config.host_memory)
    nvme = 0
    if config.nvme_path != "auto":
        nvme = 10**12 if config.nvme_space == "auto" else int(config.nvme_space)
    return HardwareSpec(
        name="this machine",
        kind="cpu",
        device_memory_bytes=device,
        flops_bf16=5e10,
        flops_fp32=5e10,
        device_bytes_per_second=2e10,
        h2d=Channel("h2d", 8e9),
        d2h=Channel("d2h", 8e9),
        nvme_read=Channel("nvme_read", 1e9),
        nvme_write=Channel("nvme_write", 1e9),
        host_memory_bytes=host,
        host_bytes_per_second=2e10,
        nvme_bytes=nvme,
        cores=os.cpu_count() or 1,
    )
