"""The machine this process runs on, as the planner sees it: measured rates, memory available now, the user's caps."""

from __future__ import annotations

import os
import time
from importlib import metadata

import torch

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.hardware.emulation import Emulation
from lazytrain_ds.hardware.probe import probe
from lazytrain_ds.hardware.spec import HardwareSpec
from lazytrain_ds.optim.kernels import adamw_segments_step_
from lazytrain_ds.optim.layout import StateLayout

__all__ = ["about_this_run", "host_threads", "local_hardware", "update_seconds"]

CPU_SHARE = 2  # device and host are the same memory on a CPU: without caps each gets this fraction of what is there


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout
        return None


def about_this_run(model: torch.nn.Module, hardware: HardwareSpec) -> dict[str, str]:
    """What a reader of a run's report wants to know besides the plan."""
    packages = ("lazytrain-ds", "deepspeed", "torch")
    versions = {package: version for package in packages if (version := _version(package))}
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"started": started, "model": type(model).__name__, "hardware": hardware.name, **versions}


def host_threads(device_type: str) -> int:
    """Threads of an optimizer update: torch's where the CPU is also the device, else the cores this process may use."""
    return torch.get_num_threads() if device_type == "cpu" else len(os.sched_getaffinity(0))


def update_seconds(step_device: str, precision: str, budget_seconds: float) -> float | None:
    """Seconds per parameter of our own update kernel, as `hardware.probe` wants it (None: not on this device)."""
    if step_device != "host":
        return None
    numel = 1 << 22
    layout = StateLayout.whole(numel, precision)
    master, gradient = torch.zeros(numel), torch.full((numel,), 1e-3)
    state, out = layout.new_state(), torch.empty(numel, dtype=torch.bfloat16)
    threads = host_threads("cuda" if torch.cuda.is_available() else "cpu")
    times: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        adamw_segments_step_(
            master, gradient, state, layout, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01,
            step=len(times) + 1, out=out, num_threads=threads,
        )  # fmt: skip
        times.append(time.perf_counter() - started)
    return min(times) / numel


def local_hardware(config: LazyTrainConfig) -> HardwareSpec:
    """Probe (seconds the first time, then from the cache of this machine) and apply the block's caps."""
    nvme_path = None if config.nvme_path == "auto" else config.nvme_path
    cache_dir = None if config.profile.cache_dir == "auto" else config.profile.cache_dir
    refresh = config.profile.refresh is True
    spec = probe(nvme_path=nvme_path, cache_dir=cache_dir, refresh=refresh, optimizer=update_seconds)
    device, host, nvme = spec.device_memory_bytes, spec.host_memory_bytes, spec.nvme_bytes
    if spec.kind == "cpu":
        device, host = device // CPU_SHARE, host // CPU_SHARE
    if config.device != "auto":
        emulation = Emulation.parse(config.device["emulate"])
        spec, device = emulation.apply(spec), emulation.memory_bytes
    if config.device_memory != "auto":
        device = int(config.device_memory)
    if config.host_memory != "auto":
        host = int(config.host_memory)
    if config.nvme_space != "auto":
        nvme = min(nvme, int(config.nvme_space))
    return spec.with_memory(device=device, host=host, nvme=nvme)
