"""What a directory can do as swap space: who owns it, which file system it is on, whether it takes O_DIRECT."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lazytrain_ds.errors import SwapError, format_bytes

__all__ = [
    "DirectIO",
    "SwapPath",
    "absolute_path",
    "errno_name",
    "file_system_of",
    "inspect_swap_path",
    "probe_direct_io",
]

PAGE_BYTES = 4096

_RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "fuse.sshfs", "afs"}
)
_KERNEL_FILE_SYSTEMS = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "configfs", "bpf", "mqueue"}
)


def errno_name(number: int | None) -> str:
    """`28 -> "ENOSPC (No space left on device)"`."""
    if not number:
        return "no errno"
    return f"{errno.errorcode.get(number, f'errno {number}')} ({os.strerror(number)})"


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """`path` with `~` expanded, made absolute against the working directory of *now*.

    Raises SwapError for an empty path or an unknown `~user`.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        raise SwapError(f'nvme_path {text!r} is not a path; set it to a directory on a local disk, e.g. "/mnt/nvme"')
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise SwapError(f"nvme_path {text!r}: no such user, so ~ has no home directory; write the absolute path")
    return Path(os.path.abspath(expanded))


@dataclass(frozen=True)
class DirectIO:
    """What one directory's O_DIRECT wants. `error` says why it is not to be had there (then the rest is 1)."""

    supported: bool
    memory_alignment_bytes: int = 1
    length_alignment_bytes: int = 1
    error: str | None = None


@dataclass(frozen=True)
class SwapPath:
    """What `inspect_swap_path` found. `problem` is None when the path can be used; `warnings` do not stop a run."""

    path: Path
    exists: bool
    writable: bool
    direct_io: DirectIO
    free_bytes: int
    file_system: str
    ram_backed: bool
    network: bool
    problem: str | None
    warnings: tuple[str, ...]

    @property
    def o_direct(self) -> bool:
        """Whether O_DIRECT works there."""
        return self.direct_io.supported

    @property
    def capacity_bytes(self) -> int:
        """Bytes that add to host memory: 0 on tmpfs, whose files are host memory, and where nothing can be written."""
        return 0 if self.ram_backed or self.problem else self.free_bytes


def _anonymous_file(directory: Path, flags: int) -> int:
    """An open file in `directory` without a name (or with one that is gone at once): probing leaves no trace."""
    try:
        return os.open(directory, flags | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(prefix=".lazytrain_probe_", dir=directory)
    try:
        return os.open(name, flags | os.O_CLOEXEC)
    finally:
        os.close(descriptor)
        os.unlink(name)


def probe_direct_io(directory: Path) -> DirectIO:
    """Find the smallest memory and length alignment that O_DIRECT takes in `directory` by writing a few blocks.

    Raises OSError when nothing can be written there at all.
    """
    buffer = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    try:
        descriptor = _anonymous_file(directory, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return DirectIO(False, error=errno_name(error.errno))

    def accepts(memory_offset: int, length: int) -> bool:
        view = buffer[memory_offset : memory_offset + length]
        return os.pwritev(descriptor, [view], 0) == length and os.preadv(descriptor, [view], 0) == length

    try:
        last_error: OSError | None = None
        for length in (512, 1024, 2048, 4096):
            try:
                if not accepts(0, length):
                    continue
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                last_error = error
                continue
            try:
                memory = 512 if accepts(512, length) else PAGE_BYTES
            except OSError:
                memory = PAGE_BYTES
            # 512-byte lengths would work on most disks, but make the disk read, change and rewrite its 4 KiB sector.
            return DirectIO(True, memory, max(length, PAGE_BYTES))
        return DirectIO(False, error=errno_name(last_error.errno if last_error else errno.EINVAL))
    finally:
        os.close(descriptor)


def _unescape(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def file_system_of(path: Path) -> tuple[str, str]:
    """(type, source) of the mount that holds `path`, from /proc/self/mountinfo; ("unknown", "") without it."""
    real = os.path.realpath(path)
    best, found = -1, ("unknown", "")
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        left, _, right = line.partition(" - ")
        mount_point = _unescape(left.split()[4])
        inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= best:  # a later mount on the same point hides the earlier one
            fields = right.split()
            best, found = len(mount_point), (fields[0], fields[1])
    return found


def _nearest_existing(path: Path) -> Path:
    while not os.path.lexists(path):
        path = path.parent
    return path


def inspect_swap_path(path: str | os.PathLike[str], *, create: bool = True) -> SwapPath:
    """Look at a directory meant for swap files and leave no trace there. Never raises for what it finds.

    A missing directory is judged by the nearest directory that exists; with `create` false it is a problem.
    The one place that judges such a path: NvmeStore at its start, and `hardware.nvme.check_nvme_path` for everyone who
    asks before a run.
    """
    try:
        target = absolute_path(path)
    except SwapError as error:
        return SwapPath(Path(os.fspath(path)), False, False, DirectIO(False), 0, "unknown", False, False,
                              str(error), ())  # fmt: skip
    try:
        existing = _nearest_existing(target)
    except OSError as error:  # a name that is too long, a loop of links
        return SwapPath(target, False, False, DirectIO(False), 0, "unknown", False, False,
                              f"nvme_path {target}: {errno_name(error.errno)}", ())  # fmt: skip
    exists = existing == target
    file_system, source = file_system_of(existing)
    ram_backed = file_system in _RAM_FILE_SYSTEMS or source.startswith("/dev/zram")
    network = file_system in _NETWORK_FILE_SYSTEMS
    direct_io, free_bytes, writable, problem = DirectIO(False), 0, False, None
    if not existing.is_dir():
        what = "a file" if existing.exists() else "a broken link"
        problem = f"nvme_path {target}: {existing} is {what}, not a directory; name a directory on a local disk"
    elif file_system in _KERNEL_FILE_SYSTEMS:
        problem = f"nvme_path {target} is on {file_system}, which is not a disk; name a directory on a local disk"
    elif not exists and not create:
        problem = f"nvme_path {target} does not exist; create it, or name a directory that exists"
    elif not os.access(existing, os.W_OK | os.X_OK):
        read_only = bool(os.statvfs(existing).f_flag & os.ST_RDONLY)
        why = "is on a file system mounted read-only" if read_only else f"is not writable for user id {os.geteuid()}"
        problem = f"nvme_path {target}: {existing} {why}; name a directory you may write to, or change its permissions"
    else:
        try:
            direct_io = probe_direct_io(existing)
            space = os.statvfs(existing)
            free_bytes, writable = space.f_bavail * space.f_frsize, True
        except OSError as error:
            problem = (
                f"nvme_path {target}: writing a test file to {existing} failed with {errno_name(error.errno)}; "
                "name a directory on a local disk that you may write to"
            )
    warnings = []
    if ram_backed:
        warnings.append(
            f"nvme_path {target} is on {file_system}: its files are host memory, so it adds no capacity. "
            "Name a directory on an SSD instead."
        )
    if network:
        warnings.append(f"nvme_path {target} is on {file_system}, a network file system; a local SSD is far faster")
    if not problem and not direct_io.supported:
        warnings.append(
            f"nvme_path {target}: {file_system} has no O_DIRECT ({direct_io.error}); using buffered I/O, "
            "which passes through the page cache and takes host memory and CPU time"
        )
    if not problem and free_bytes < 2**30:
        warnings.append(f"nvme_path {target}: only {format_bytes(free_bytes)} free")
    return SwapPath(
        target, exists, writable, direct_io, free_bytes, file_system, ram_backed, network, problem, tuple(warnings)
    )
