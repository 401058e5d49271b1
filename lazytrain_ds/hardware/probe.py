"""Measure this machine: matmul rate, memory bandwidth, both link directions at once, SSD, optimizer.

Each measurement takes about `budget_seconds` and reports the best of several repeats (memory and link: the
median), so that another process on the machine disturbs it little. Results are cached per machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lazytrain_ds.errors import LazyTrainError
from lazytrain_ds.hardware.host_memory import host_memory
from lazytrain_ds.hardware.nvme import measure_nvme
from lazytrain_ds.hardware.spec import HardwareSpec, OptimizerRate
from lazytrain_ds.planning.instance import Channel

MIB = 1 << 20


def cache_directory(configured: str | Path | None = None) -> Path:
    """Where probes and profiles are cached: `configured`, else $XDG_CACHE_HOME or ~/.cache, then lazytrain_ds."""
    if configured is not None:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lazytrain_ds"


def machine_key(**extra: object) -> str:
    """Fingerprint of what a measurement depends on: processor, device, versions, threads, and `extra`."""
    import torch

    facts: dict[str, object] = {
        "node": platform.node(),
        "machine": platform.machine(),
        "processor": _processor_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **{key: str(value) for key, value in extra.items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def probe(
    *,
    nvme_path: str | Path | None = None,
    cache_dir: str | Path | None = None,
    refresh: bool = False,
    budget_seconds: float = 0.5,
    optimizer: Callable[[str, str, float], float | None] | None = None,
) -> HardwareSpec:
    """The machine this runs on, measured (or read from the cache, unless `refresh`).

    `nvme_path`: a directory on the SSD to measure (None: no SSD). `optimizer`: a function (step device, precision,
    budget in seconds) -> seconds per parameter that times the real update kernel, or None where it has none;
    without it a fused AdamW of torch stands in. Capacities are what is available now and are never taken from the
    cache. A cache that cannot be written is ignored.
    """
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    file = cache_directory(cache_dir) / f"probe-{machine_key(kind=kind, nvme=nvme_path, kernel=bool(optimizer))}.json"
    if not refresh:
        cached = _read(file)
        if cached is not None:
            return _with_capacity(cached, nvme_path)
    spec = _probe_cuda(budget_seconds, optimizer) if kind == "cuda" else _probe_cpu(budget_seconds, optimizer)
    if nvme_path is not None:
        rates = measure_nvme(nvme_path, budget_seconds)
        spec = replace(
            spec,
            nvme_read=Channel("nvme_read", rates.read_bytes_per_second, 1e-4),
            nvme_write=Channel("nvme_write", rates.write_bytes_per_second, 1e-4),
            measured=(*spec.measured, "nvme_read", "nvme_write"),
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(spec.to_json())
        temporary.replace(file)
    except OSError:
        pass
    return _with_capacity(spec, nvme_path)


def _read(file: Path) -> HardwareSpec | None:
    try:
        return HardwareSpec.from_json(file.read_bytes())
    except (OSError, LazyTrainError):
        return None  # absent, or of an older version


def _with_capacity(spec: HardwareSpec, nvme_path: str | Path | None) -> HardwareSpec:
    host = host_memory().available_bytes
    device = host
    if spec.kind == "cuda":
        import torch

        device = torch.cuda.mem_get_info()[0]
    nvme = 0
    if nvme_path is not None:
        from lazytrain_ds.hardware.nvme import free_bytes

        nvme = free_bytes(nvme_path)
    return spec.with_memory(device=device, host=host, nvme=nvme)


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _instruction_set() -> str:
    """The best vector instructions of the processor that anything here uses."""
    import cpuinfo  # takes a second

    flags = set(cpuinfo.get_cpu_info().get("flags", ()))
    names = (("avx512_bf16", "avx512_bf16"), ("avx512f", "avx512"), ("avx2", "avx2"), ("asimd", "neon"))
    return next((name for flag, name in names if flag in flags), "portable")


# -- timing --


def _repeat(work: Callable[[], Any], budget_seconds: float, synchronize: Callable[[], None]) -> list[float]:
    """Durations of `work` repeated for the budget (at least three times), after one warm-up."""
    work()
    synchronize()
    durations: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(durations) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        synchronize()
        durations.append(time.perf_counter() - start)
    return durations


def _matmul_flops(dtype: Any, device: str, size: int, budget: float, synchronize: Callable[[], None]) -> float:
    import torch

    left = torch.randn(size, size, device=device, generator=_generator(device)).to(dtype)
    out = torch.empty_like(left)
    work = lambda: torch.mm(left, left, out=out)
    return 2 * size**3 / min(_repeat(work, budget, synchronize))


def _generator(device: str) -> Any:
    """A generator of our own: probing must not move the user's random state."""
    import torch

    return torch.Generator(device).manual_seed(0)


def _copy_rate(source: Any, target: Any, budget: float, synchronize: Callable[[], None]) -> float:
    """Bytes per second of one copy (of the copy's size: a copy inside one memory moves twice as much)."""
    work = lambda: target.copy_(source, non_blocking=True)
    return source.numel() * source.element_size() / statistics.median(_repeat(work, budget, synchronize))


def _update_rate(device: str, budget: float, synchronize: Callable[[], None]) -> float:
    """Seconds per parameter of torch's fused AdamW in fp32."""
    import torch

    numel = 4 * MIB if device == "cpu" else 64 * MIB
    parameter = torch.nn.Parameter(torch.zeros(numel, device=device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return min(_repeat(optimizer.step, budget, synchronize)) / numel


def _optimizer_rates(
    devices: tuple[tuple[str, str], ...],
    budget: float,
    synchronize: Callable[[], None],
    kernel: Callable[[str, str, float], float | None] | None,
) -> tuple[OptimizerRate, ...]:
    rates = []
    for step_device, device in devices:
        for precision in ("fp32", "8bit"):
            seconds = kernel(step_device, precision, budget) if kernel is not None else None
            if seconds is None and precision == "fp32":
                seconds = _update_rate(device, budget, synchronize)
            if seconds is not None:
                rates.append(OptimizerRate(step_device, precision, seconds))  # type: ignore[arg-type]
    return tuple(rates)


def _probe_cpu(budget: float, kernel: Callable[[str, str, float], float | None] | None) -> HardwareSpec:
    import torch

    synchronize = lambda: None
    source = torch.zeros(64 * MIB, dtype=torch.uint8)
    target = torch.ones_like(source)
    copy = _copy_rate(source, target, budget, synchronize)
    launch = min(_repeat(lambda: source[:1].add_(0), min(budget, 0.1), synchronize))
    return HardwareSpec(
        name=_processor_name(),
        kind="cpu",
        device_memory_bytes=0,
        flops_bf16=_matmul_flops(torch.bfloat16, "cpu", 256, budget, synchronize),
        flops_fp32=_matmul_flops(torch.float32, "cpu", 512, budget, synchronize),
        device_bytes_per_second=2 * copy,
        h2d=Channel("h2d", copy, 1e-6),
        d2h=Channel("d2h", copy, 1e-6),
        nvme_read=Channel("nvme_read", 1e9, 1e-4),
        nvme_write=Channel("nvme_write", 1e9, 1e-4),
        host_memory_bytes=0,
        host_bytes_per_second=2 * copy,
        launch_seconds=launch,
        cores=len(os.sched_getaffinity(0)),
        instruction_set=_instruction_set(),
        optimizer=_optimizer_rates((("device", "cpu"), ("host", "cpu")), budget, synchronize, kernel),
        measured=("flops_bf16", "flops_fp32", "device_bytes_per_second", "h2d", "d2h", "host_bytes_per_second",
                  "launch_seconds", "optimizer"),
    )  # fmt: skip


def _probe_cuda(budget: float, kernel: Callable[[str, str, float], float | None] | None) -> HardwareSpec:
    import torch

    synchronize = torch.cuda.synchronize
    free, total = torch.cuda.mem_get_info()
    size = 256 * MIB
    host_out, host_in = (torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    device_in, device_out = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    up, down = _both_directions(host_out, device_in, device_out, host_in, budget)
    device_copy = _copy_rate(device_in, device_out, budget, synchronize)
    pageable = torch.zeros(64 * MIB, dtype=torch.uint8)
    host_copy = _copy_rate(pageable, torch.ones_like(pageable), budget, lambda: None)
    # Clocks settle after some seconds under load; the first repeats are on boost.
    _matmul_flops(torch.bfloat16, "cuda", 8192, 4 * budget, synchronize)
    flops_bf16 = _sustained_matmul(torch.bfloat16, budget)
    flops_fp32 = _sustained_matmul(torch.float32, budget)
    tiny = device_in[:1]
    launch = min(_repeat(lambda: [tiny.add_(0) for _ in range(100)], min(budget, 0.2), synchronize)) / 100
    return HardwareSpec(
        name=torch.cuda.get_device_name(),
        kind="cuda",
        device_memory_bytes=free,
        flops_bf16=flops_bf16,
        flops_fp32=flops_fp32,
        device_bytes_per_second=2 * device_copy,
        h2d=Channel("h2d", up, 1e-5),
        d2h=Channel("d2h", down, 1e-5),
        nvme_read=Channel("nvme_read", 2e9, 1e-4),
        nvme_write=Channel("nvme_write", 2e9, 1e-4),
        host_memory_bytes=0,
        host_bytes_per_second=2 * host_copy,
        launch_seconds=launch,
        # What is gone beyond our own tensors is the context, a display and other processes.
        context_bytes=max(0, total - free - torch.cuda.memory_reserved()) if free < total else 0,
        cores=len(os.sched_getaffinity(0)),
        instruction_set=_instruction_set(),
        optimizer=_optimizer_rates((("device", "cuda"), ("host", "cpu")), budget, synchronize, kernel),
        measured=("device_memory_bytes", "flops_bf16", "flops_fp32", "device_bytes_per_second", "h2d", "d2h",
                  "host_bytes_per_second", "launch_seconds", "context_bytes", "optimizer"),
    )  # fmt: skip


def _sustained_matmul(dtype: Any, budget: float) -> float:
    """FLOP/s over the whole budget, not of the best repeat."""
    import torch

    size = 8192
    left = torch.randn(size, size, device="cuda", generator=_generator("cuda")).to(dtype)
    out = torch.empty_like(left)
    durations = _repeat(lambda: torch.mm(left, left, out=out), budget, torch.cuda.synchronize)
    return 2 * size**3 / statistics.median(durations)


def _both_directions(
    host_out: Any, device_in: Any, device_out: Any, host_in: Any, budget: float
) -> tuple[float, float]:
    """(up, down) bytes per second while both directions are busy."""
    import torch

    up_stream, down_stream = torch.cuda.Stream(), torch.cuda.Stream()
    rates: list[tuple[float, float]] = []
    end = time.perf_counter() + budget
    while len(rates) < 4 or time.perf_counter() < end:
        spans = []
        for stream, target, source in ((up_stream, device_in, host_out), (down_stream, host_in, device_out)):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                first.record()
                for _ in range(4):
                    target.copy_(source, non_blocking=True)
                last.record()
            spans.append((first, last))
        torch.cuda.synchronize()
        moved = 4 * host_out.numel()
        up, down = (moved / (first.elapsed_time(last) / 1000) for first, last in spans)
        rates.append((up, down))
    rates = rates[1:]
    return statistics.median(rate[0] for rate in rates), statistics.median(rate[1] for rate in rates)
