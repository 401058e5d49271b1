"""A made-up machine with round figures."""

from __future__ import annotations

from lazytrain_ds.hardware.spec import HardwareSpec
from lazytrain_ds.planning.instance import Channel


def machine(**changes: object) -> HardwareSpec:
    settings: dict[str, object] = dict(
        name="test", kind="cuda", device_memory_bytes=10**9, flops_bf16=1e12, flops_fp32=5e11,
        device_bytes_per_second=1e11, h2d=Channel("h2d", 1e10), d2h=Channel("d2h", 1e10),
        nvme_read=Channel("nvme_read", 2e9), nvme_write=Channel("nvme_write", 1e9), host_memory_bytes=10**10,
        host_bytes_per_second=2e10, launch_seconds=0.0,
    )  # fmt: skip
    return HardwareSpec(**{**settings, **changes})
