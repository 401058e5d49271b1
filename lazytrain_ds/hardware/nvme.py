"""A swap directory before a run: is it usable, how much fits, how fast is it with the access that swapping uses."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from lazytrain_ds.errors import ConfigError, format_bytes
from lazytrain_ds.hardware.swap_path import SwapPath, inspect_swap_path

CHUNK_BYTES = 8 << 20


def check_nvme_path(path: str | Path, need_bytes: int = 0) -> SwapPath:
    """Check `nvme_path` before anything is allocated; nothing is left behind. What to warn of is in the report.

    The directory itself may be missing if its parent exists (it is then created at the start of a run, not here).
    ConfigError names path, need, have and a way out when it is a file, not writable, on a read-only or full disk,
    or too small for `need_bytes`.
    """
    report = inspect_swap_path(path)
    if report.problem:
        raise ConfigError(report.problem)
    directory = report.path
    if not report.exists and not directory.parent.is_dir():
        raise ConfigError(
            f"nvme_path {directory} does not exist and neither does {directory.parent} (a disk not mounted?); "
            f"create it: mkdir -p {directory}"
        )
    if need_bytes > report.capacity_bytes:
        have = "none of it is disk" if report.ram_backed else f"{format_bytes(report.free_bytes)} are free"
        raise ConfigError(
            f"nvme_path {directory} needs {format_bytes(need_bytes)}, {have}; free some space, name another disk "
            "or give the plan more host memory (host_memory)"
        )
    return report


def free_bytes(path: str | Path) -> int:
    """Free disk space at `path` (0 on a memory file system, which is no disk)."""
    return inspect_swap_path(path).capacity_bytes


@dataclass(frozen=True)
class NvmeRates:
    """Sustained rates of one large file, and whether O_DIRECT was used."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    direct: bool


def measure_nvme(path: str | Path, budget_seconds: float = 1.0, *, largest_bytes: int = 1 << 30) -> NvmeRates:
    """Write, then read, one file in 8 MiB pieces for about the budget each; the file is removed.

    Raises ConfigError when the path is unusable (see `check_nvme_path`).
    """
    checked = check_nvme_path(path)
    base = checked.path if checked.path.is_dir() else checked.path.parent
    file = base / f".lazytrain-probe-{os.getpid()}"
    flag = os.O_DIRECT if checked.o_direct else 0
    buffer = mmap.mmap(-1, CHUNK_BYTES)
    buffer.write(os.urandom(1 << 16) * (CHUNK_BYTES >> 16))  # some SSDs compress
    limit = min(largest_bytes, max(CHUNK_BYTES, checked.free_bytes // 4))
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR | flag, 0o600)
        try:
            start = time.perf_counter()
            written = 0
            while written + CHUNK_BYTES <= limit and (written == 0 or time.perf_counter() - start < budget_seconds):
                written += os.pwrite(descriptor, buffer, written)
            os.fsync(descriptor)
            write_seconds = time.perf_counter() - start
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            done = 0
            while done < written and (done == 0 or time.perf_counter() - start < budget_seconds):
                count = os.preadv(descriptor, [buffer], done)
                if count <= 0:
                    break
                done += count
            read_seconds = time.perf_counter() - start
        finally:
            os.close(descriptor)
    finally:
        file.unlink(missing_ok=True)
    return NvmeRates(done / read_seconds, written / write_seconds, checked.o_direct)
