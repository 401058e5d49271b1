"""A swap directory: is it usable, is it really a disk, how much fits, how fast is it with the access that swapping
uses.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from lazytrain_ds.errors import ConfigError, format_bytes

CHUNK_BYTES = 8 << 20
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.sshfs", "9p", "glusterfs", "beegfs")


@dataclass(frozen=True)
class NvmePath:
    """A checked swap directory. `direct`: O_DIRECT works there. `in_memory`: it is RAM, and counts as no capacity."""

    path: Path
    file_system: str
    free_bytes: int
    direct: bool
    in_memory: bool
    warnings: tuple[str, ...] = ()


def resolve(path: str | Path) -> Path:
    """Absolute, with `~` expanded; a relative path is below the current directory."""
    return Path(path).expanduser().absolute()


def check_nvme_path(path: str | Path, need_bytes: int = 0, *, mounts: str | Path = "/proc/mounts") -> NvmePath:
    """Check `nvme_path` before anything is allocated; nothing is left behind.

    The directory itself may be missing if its parent exists (it is then created at the start of a run, not here).
    ConfigError names path, need, have and a way out when it is a file, not writable, on a read-only or full disk,
    or too small for `need_bytes`.
    """
    directory = resolve(path)
    base = directory
    while not _exists(base) and base != base.parent:
        base = base.parent
    if _exists(directory) and not directory.is_dir():
        raise ConfigError(f"nvme_path: {directory} is a file; name a directory on an SSD")
    if not base.is_dir():
        raise ConfigError(f"nvme_path: {directory} cannot be created, because {base} is not a directory")
    if base not in (directory, directory.parent):
        raise ConfigError(
            f"nvme_path: {directory} does not exist and neither does {directory.parent} (a disk not mounted?); "
            f"create it: mkdir -p {directory}"
        )
    _try_writing(directory, base)
    file_system = _file_system(base, Path(mounts))
    free = shutil.disk_usage(base).free
    in_memory = file_system in _MEMORY_FILE_SYSTEMS
    warnings = []
    if in_memory:
        warnings.append(f"nvme_path {directory} is on {file_system}: that is RAM, so it adds no capacity")
    if file_system in _NETWORK_FILE_SYSTEMS:
        warnings.append(f"nvme_path {directory} is on {file_system}, a network file system: it will be slow")
    if need_bytes > (0 if in_memory else free):
        have = "none of it is disk" if in_memory else f"{format_bytes(free)} are free"
        raise ConfigError(
            f"nvme_path: {directory} needs {format_bytes(need_bytes)}, {have}; free some space, name another disk "
            "or give the plan more host memory (host_memory)"
        )
    direct = _direct_works(base)
    if not direct:
        warnings.append(
            f"nvme_path {directory}: {file_system} does not support O_DIRECT; files go through the page cache"
        )
    return NvmePath(directory, file_system, free, direct, in_memory, tuple(warnings))


def free_bytes(path: str | Path, *, mounts: str | Path = "/proc/mounts") -> int:
    """Free disk space at `path` (0 on a memory file system, which is no disk)."""
    base = resolve(path)
    while not _exists(base) and base != base.parent:
        base = base.parent
    if _file_system(base, Path(mounts)) in _MEMORY_FILE_SYSTEMS:
        return 0
    return shutil.disk_usage(base).free


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _try_writing(directory: Path, base: Path) -> None:
    """A real write: permission bits do not tell about read-only mounts, quotas, /proc, or what root may do."""
    probe = base / f".lazytrain-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, stat.S_IRUSR | stat.S_IWUSR)
    except OSError as error:
        raise ConfigError(
            f"nvme_path: {directory} is not writable: {error.strerror} (errno {error.errno}); name a directory that "
            "belongs to you"
        ) from error
    try:
        written = os.write(descriptor, b"\0" * 4096)
        os.fsync(descriptor)
        if written != 4096:
            raise ConfigError(f"nvme_path: {directory} is full: {written} of 4096 bytes were written")
    except OSError as error:
        raise ConfigError(
            f"nvme_path: writing to {directory} failed: {error.strerror} (errno {error.errno}), "
            f"{format_bytes(shutil.disk_usage(base).free)} are free"
        ) from error
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def _file_system(path: Path, mounts: Path) -> str:
    """Type of the file system that holds `path` ("unknown" without a mount table)."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return "unknown"
    real = str(path.resolve())
    best = ("", "unknown")
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, fields[2])
    return best[1]


def _direct_works(directory: Path) -> bool:
    probe = directory / f".lazytrain-direct-{os.getpid()}"
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    buffer = mmap.mmap(-1, 4096)
    try:
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flag, 0o600)
        try:
            return os.write(descriptor, buffer) == 4096
        finally:
            os.close(descriptor)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)


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
    flag = os.O_DIRECT if checked.direct else 0
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
    return NvmeRates(done / read_seconds, written / write_seconds, checked.direct)
