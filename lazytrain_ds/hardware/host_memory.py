"""How much host memory this process may really use: physical memory, cgroup limits (v1 and v2, every ancestor),
pin limits.

Note [Page cache]
A cgroup counts page cache as used, but the kernel gives its inactive file pages back before it kills anything. So
the room in a cgroup is limit - (usage - inactive file pages). /proc/meminfo's MemAvailable already does the same
for the machine.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazytrain_ds.errors import UnsupportedError

# cgroup v1 writes "no limit" as the largest page-aligned signed 64-bit number.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class HostMemory:
    """`available_bytes`: what may still be allocated now. `source`: what limits it. `notes`: files that could not
    be read.
    """

    total_bytes: int
    available_bytes: int
    source: str
    notes: tuple[str, ...] = ()


def host_memory(*, proc: str | Path = "/proc", cgroup: str | Path = "/sys/fs/cgroup") -> HostMemory:
    """Memory available to this process: the machine's, or less where a cgroup above it allows less.

    `proc`, `cgroup`: where those file systems are mounted (tests give fake ones). Raises UnsupportedError without
    /proc/meminfo.
    """
    proc, cgroup = Path(proc), Path(cgroup)
    total, available = _meminfo(proc)
    best = HostMemory(total, available, "physical memory")
    notes: list[str] = []
    for limit, usage, cache, where in _limits(proc, cgroup, notes):
        room = max(0, limit - max(0, usage - cache))
        if room < best.available_bytes:
            best = HostMemory(min(total, limit), room, f"cgroup limit of {where}")
    return HostMemory(best.total_bytes, best.available_bytes, best.source, tuple(notes))


def _meminfo(proc: Path) -> tuple[int, int]:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError as error:
        raise UnsupportedError(f"host memory: {proc / 'meminfo'} cannot be read ({error}); set host_memory") from error
    fields = {}
    for line in lines:
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            fields[name] = int(number[0]) * 1024
    if "MemTotal" not in fields:
        raise UnsupportedError(f"host memory: {proc / 'meminfo'} has no MemTotal; set host_memory")
    fallback = fields.get("MemFree", 0) + fields.get("Cached", 0)
    return fields["MemTotal"], fields.get("MemAvailable", fallback)


def _limits(proc: Path, cgroup: Path, notes: list[str]) -> list[tuple[int, int, int, str]]:
    """(limit, usage, reclaimable cache, directory) of every cgroup that limits us."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        number, controllers, path = parts
        if number == "0" and controllers == "":
            root, limits = cgroup, ("memory.max", "memory.high")
            usage_name, cache_name = "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limits = cgroup / "memory", ("memory.limit_in_bytes",)
            usage_name, cache_name = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        for directory in _ancestors(root, path):
            limit = min(
                (value for value in (_number(directory / name, notes) for name in limits) if value is not None),
                default=None,
            )
            if limit is None or limit >= _NO_LIMIT:
                continue
            usage = _number(directory / usage_name, notes) or 0
            found.append((limit, usage, _statistic(directory / "memory.stat", cache_name), str(directory)))
    return found


def _ancestors(root: Path, path: str) -> list[Path]:
    """The cgroup's directory and all above it, up to the mount. In a container `path` may not exist below the mount."""
    parts = [part for part in path.split("/") if part and part != ".."]
    directories = [root.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]
    return [directory for directory in directories if directory.is_dir()]


def _number(path: Path, notes: list[str]) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if text == "max":
        return None
    if not text.isdigit():
        notes.append(f"{path} holds {text[:40]!r}, which is no number; ignored")
        return None
    return int(text)


def _statistic(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name and value.strip().isdigit():
                return int(value)
    except OSError:
        pass
    return 0


def pinned_cost_bytes(byte_count: int) -> int:
    """What one pinned request really takes: torch's caching host allocator rounds it up to a power of two."""
    return 0 if byte_count <= 0 else 1 << (byte_count - 1).bit_length()


@dataclass(frozen=True)
class PinLimit:
    """`limit_bytes`: how much may be pinned (None: no limit known). `reason`: why."""

    limit_bytes: int | None
    reason: str


def pin_limit(*, proc: str | Path = "/proc") -> PinLimit:
    """Limits on pinned memory that can be read without pinning any: RLIMIT_MEMLOCK, and WSL2 (about half of the
    memory).
    """
    proc = Path(proc)
    try:
        kernel = (proc / "version").read_text().lower()
    except OSError:
        kernel = os.uname().release.lower()
    if "microsoft" in kernel:
        return PinLimit(
            _meminfo(proc)[0] // 2, "WSL2 pins at most about half of the memory, and charges the GPU for it"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return PinLimit(None, "no limit")
    # The CUDA driver pins without mlock, so this binds only mlock itself; it is reported, not enforced.
    return PinLimit(None, f"RLIMIT_MEMLOCK is {soft} bytes; it does not bind the CUDA driver")


def probe_pin_limit(pin: Callable[[int], Any], wanted_bytes: int, *, step_bytes: int = 256 << 20) -> int:
    """Bytes that `pin(size)` really grants up to `wanted_bytes`, in steps; everything is released before returning.

    `pin` allocates that many pinned bytes and returns an object that holds them; any exception counts as a refusal.
    """
    held = []
    granted = 0
    while granted < wanted_bytes:
        size = min(step_bytes, wanted_bytes - granted)
        try:
            held.append(pin(size))
        except Exception:
            break
        granted += size
    held.clear()
    return granted
