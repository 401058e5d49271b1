"""One locked directory of swap files: owned by one live run, taken over after a killed one, gone when the run ends.

Layout inside the directory the user names (`nvme_path`):

    lazytrain_swap_<name>/            mode 0700, one per rank
        owner.lock                    flock held while the run lives; JSON: pid, host, start time
        manifest.json                 JSON: the token that all our file names carry, and the directories we created
        lt_<token>_<number>.swap      mode 0600, one per tensor

A file is removed only if the manifest is ours and the file's name carries the manifest's token.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import re
import secrets
import signal
import socket
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lazytrain_ds.errors import SwapError, format_bytes
from lazytrain_ds.hardware.swap_path import absolute_path, errno_name

__all__ = ["OrphanedSwap", "SwapDirectory", "find_orphans", "remove_orphans"]

logger = logging.getLogger(__name__)

_PREFIX = "lazytrain_swap_"
_LOCK = "owner.lock"
_MANIFEST = "manifest.json"
_MANIFEST_KIND = "lazytrain_ds swap directory"
_TOKEN = re.compile(r"[0-9a-f]{12}\Z")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def _swap_file(token: str, name: str) -> bool:
    return re.fullmatch(rf"lt_{token}_[0-9]{{8,}}\.swap", name) is not None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _read_manifest(root: Path) -> dict[str, Any] | None:
    """The manifest of `root`, or None where there is none that we wrote."""
    data = _read_json(root / _MANIFEST)
    token = data.get("token")
    if data.get("kind") != _MANIFEST_KIND or not isinstance(token, str) or not _TOKEN.match(token):
        return None
    return data


def _describe_owner(owner: dict[str, Any]) -> str:
    """Who wrote the lock file: one phrase for messages."""
    if "pid" not in owner:
        return "another process"
    started = owner.get("started")
    return (
        f"process {owner['pid']} on {owner.get('host', 'an unknown host')} (started {started or 'at an unknown time'})"
    )


def _sweep(root: Path, token: str, created: list[str]) -> tuple[int, int]:
    """Remove our files under `root`, then `root` and the directories we created above it, where empty.

    Returns (files removed, bytes freed on disk). Uses no lock of this process: a signal handler calls it. If anything
    stays (a file that is not ours, or that cannot be removed), so do manifest and lock file, for the next run.
    """
    files, freed = _remove_swap_files(root, token)
    try:
        if set(os.listdir(root)) - {_MANIFEST, _LOCK}:
            return files, freed
        manifest = _read_manifest(root)
        if manifest is not None and manifest["token"] != token:
            return files, freed  # swept before, and another run has moved in since
        for name in (_MANIFEST, _LOCK):  # the lock file last
            os.unlink(root / name)
        for directory in (str(root), *created):
            os.rmdir(directory)
    except OSError as error:  # not empty (another rank), or gone already
        logger.debug("NVMe store: %s", error)
    return files, freed


def _remove_swap_files(root: Path, token: str) -> tuple[int, int]:
    """Unlink what the manifest's token marks as ours. Returns (files removed, bytes freed on disk)."""
    files = freed = 0
    try:
        names = os.listdir(root)
    except OSError:
        return 0, 0
    for name in names:
        if not _swap_file(token, name):
            continue
        try:
            size = os.lstat(root / name).st_blocks * 512
            os.unlink(root / name)
        except OSError as error:
            logger.debug("NVMe store: %s stays: %s", root / name, error)
            continue
        files += 1
        freed += size
    return files, freed


def _acquire(root: Path) -> int:
    """Open and flock the lock file of `root`; returns its descriptor. Raises BlockingIOError when somebody holds it."""
    while True:
        descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                # The previous owner unlinks the file when it leaves; a lock on an unlinked file protects nothing.
                if os.path.samestat(os.fstat(descriptor), os.stat(root / _LOCK)):
                    return descriptor
            except FileNotFoundError:
                pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


class SwapDirectory:
    """A swap directory that this process owns. Made by `SwapDirectory.open`; `close` removes it from the disk."""

    def __init__(self, root: Path, token: str, lock_descriptor: int, created: list[str]) -> None:
        self.root = root
        self._token = token
        self._lock_descriptor = lock_descriptor
        self._created = created
        self._pid = os.getpid()
        self._count = 0
        self._names = threading.Lock()
        self._closed = False
        self._swept = False
        _guard.add(self)

    @classmethod
    def open(cls, parent: str | os.PathLike[str], *, name: str = "rank0", create: bool = True) -> SwapDirectory:
        """Lock `<parent>/lazytrain_swap_<name>`, creating what is missing (mode 0700).

        A directory that a killed run left is taken over and its files are removed, said once at info level.
        Raises SwapError: `parent` cannot be created or used, a live run holds the directory (its pid is named),
        or something of that name exists that is not ours.
        """
        if not _NAME.match(name):
            raise SwapError(f"swap directory name {name!r}: use letters, digits, '_', '.' and '-', at most 64")
        base = absolute_path(parent)
        root = base / (_PREFIX + name)
        for _ in range(100):
            created = _make_directories(base, root, create)
            try:
                _check_ours(root)
                descriptor = _acquire(root)
            except BlockingIOError:
                owner = _read_json(root / _LOCK)
                own = " (this same process: close the first store before opening a second)"
                raise SwapError(
                    f"NVMe store: {root} is in use by {_describe_owner(owner)}"
                    f"{own if owner.get('pid') == os.getpid() else ''}. Wait until it ends, end it, or set another "
                    "nvme_path for this run."
                ) from None
            except FileNotFoundError:
                continue  # the previous owner removed the directory between our two steps
            except SwapError:
                raise
            except OSError as error:
                raise SwapError(
                    f"NVMe store: cannot lock {root / _LOCK}: {errno_name(error.errno)}. Set nvme_path to a local "
                    "file system that supports flock."
                ) from error
            break
        else:
            raise SwapError(f"NVMe store: {root} keeps disappearing; is another run starting and stopping there?")
        try:
            created += _take_over(root)
            token = secrets.token_hex(6)
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
            _write_manifest(root, {"kind": _MANIFEST_KIND, "version": 1, "token": token, "created": created})
            return cls(root, token, descriptor, created)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, SwapError):
                raise
            raise SwapError(f"NVMe store: cannot write to {root}: {errno_name(error.errno)}") from error

    def new_path(self) -> Path:
        """A path for one more swap file; short, whatever the tensor is called. The file is not created."""
        with self._names:
            self._count += 1
            return self.root / f"lt_{self._token}_{self._count:08d}.swap"

    def free_bytes(self) -> int:
        """Bytes an unprivileged process may still write there (0 if the directory is gone)."""
        try:
            space = os.statvfs(self.root)
        except OSError:
            return 0
        return space.f_bavail * space.f_frsize

    def close(self) -> None:
        """Remove our files and directories and give up the lock. Safe to call twice, and from a forked child
        (which leaves the parent's files alone)."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        _sweep(self.root, self._token, self._created)
        self._swept = True
        os.close(self._lock_descriptor)
        _guard.discard(self)

    def _remove_in_signal_handler(self) -> None:
        # Also while `close` is sweeping: launchers follow Ctrl-C with a SIGTERM, and this process ends before the
        # interrupted sweep could go on.
        if os.getpid() == self._pid and not self._swept:
            _sweep(self.root, self._token, self._created)

    def _forget_in_child(self) -> None:
        # flock belongs to the open file, which a fork shares: without this, a data-loader worker that outlives its
        # killed parent would keep the directory locked.
        if not self._closed:
            self._closed = True
            os.close(self._lock_descriptor)


def _make_directories(base: Path, root: Path, create: bool) -> list[str]:
    """Create `root` and what is missing above it; returns the ones made above `root`, innermost first."""
    missing = []
    probe = base
    try:
        while not os.path.lexists(probe):
            missing.append(probe)
            probe = probe.parent
        if missing and not create:
            raise SwapError(f"NVMe store: {base} does not exist; create it, or set nvme_path to one that does")
        for directory in (*reversed(missing), root):
            try:
                os.mkdir(directory, 0o700)
            except FileExistsError:
                if not os.path.isdir(directory):
                    raise
    except OSError as error:
        if isinstance(error, SwapError):
            raise
        raise SwapError(
            f"NVMe store: cannot create {root}: {errno_name(error.errno)}. Set nvme_path to a directory on a local "
            "disk that you may write to."
        ) from error
    return [str(directory) for directory in missing]


def _check_ours(root: Path) -> None:
    """Refuse a directory that somebody else made; narrow the permissions of our own."""
    status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise SwapError(f"NVMe store: {root} exists but is not a directory of ours; move it away")
    if _read_manifest(root) is None and set(os.listdir(root)) - {_LOCK, _MANIFEST, _MANIFEST + ".new"}:
        raise SwapError(
            f"NVMe store: {root} holds files but no {_MANIFEST} that we wrote, so nothing in it is touched. "
            "Move it away, or set another nvme_path."
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        os.chmod(root, 0o700)


def _take_over(root: Path) -> list[str]:
    """Remove what a killed run left in `root` (whose lock we hold). Returns the directories that run created."""
    manifest = _read_manifest(root)
    if manifest is None:
        return []
    owner = _read_json(root / _LOCK)
    files, freed = _remove_swap_files(root, manifest["token"])
    if files:
        logger.info(
            "NVMe store: took over %s from %s, which ended without cleaning up; removed %d swap files, %s",
            root, _describe_owner(owner), files, format_bytes(freed),
        )  # fmt: skip
    created = manifest.get("created", [])
    return [str(item) for item in created] if isinstance(created, list) else []


def _write_manifest(root: Path, manifest: dict[str, Any]) -> None:
    """Durably: after a power loss the swap files must still be recognisable as ours."""
    temporary = root / (_MANIFEST + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(manifest).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, root / _MANIFEST)


class _Guard:
    """Cleans up at interpreter exit, on SIGTERM and SIGHUP, and detaches forked children."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[SwapDirectory] = weakref.WeakSet()
        self._taken: list[int] = []
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self._at_exit)

    def add(self, directory: SwapDirectory) -> None:
        self._open.add(directory)
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers; without them the next run takes over
        for number in _SIGNALS:
            # Only where nobody chose anything: a handler of the user's ends in SystemExit, or in a take-over.
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._on_signal)
                self._taken.append(number)

    def discard(self, directory: SwapDirectory) -> None:
        self._open.discard(directory)
        if self._open or threading.current_thread() is not threading.main_thread():
            return
        for number in self._taken:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL)
        self._taken.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The interrupted code may hold any lock of ours, so this takes none: names are unlinked, I/O in flight goes
        # to files without a name, and the default action then ends the process with the status its parent expects.
        for directory in list(self._open):
            directory._remove_in_signal_handler()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _at_exit(self) -> None:
        for directory in list(self._open):
            directory.close()

    def _after_fork(self) -> None:
        for directory in list(self._open):
            directory._forget_in_child()


_guard = _Guard()


@dataclass(frozen=True)
class OrphanedSwap:
    """A swap directory whose run is gone. `owner` says whose it was; `size_bytes` is what it occupies on disk."""

    path: Path
    files: int
    size_bytes: int
    owner: str


def _candidates(path: str | os.PathLike[str]) -> list[Path]:
    base = absolute_path(path)
    try:
        inside = [base / name for name in sorted(os.listdir(base)) if name.startswith(_PREFIX)]
    except OSError:
        return []
    roots = [base, *inside] if base.name.startswith(_PREFIX) else inside
    return [root for root in roots if not root.is_symlink() and root.is_dir() and _read_manifest(root) is not None]


def _lock_if_orphaned(root: Path) -> int | None:
    """The locked descriptor when nobody lives in `root`, else None."""
    try:
        return _acquire(root)
    except OSError as error:  # held by a live run; or gone, or not ours to open
        if not isinstance(error, (BlockingIOError, FileNotFoundError)):
            logger.warning("NVMe store: cannot lock %s: %s", root / _LOCK, errno_name(error.errno))
        return None


def _orphans(path: str | os.PathLike[str]) -> Iterator[tuple[Path, dict[str, Any], str]]:
    """(root, manifest, owner) of each orphan below `path`, locked while the caller looks at it."""
    for root in _candidates(path):
        descriptor = _lock_if_orphaned(root)
        if descriptor is None:
            continue
        try:
            manifest = _read_manifest(root)
            if manifest is not None:
                yield root, manifest, _describe_owner(_read_json(root / _LOCK))
        finally:
            os.close(descriptor)


def find_orphans(path: str | os.PathLike[str]) -> list[OrphanedSwap]:
    """Swap directories under `path` (an `nvme_path`, or one swap directory) that no live run owns. Removes nothing."""
    found = []
    for root, manifest, owner in _orphans(path):
        names = [name for name in os.listdir(root) if _swap_file(manifest["token"], name)]
        size_bytes = sum(os.lstat(root / name).st_blocks * 512 for name in names)
        found.append(OrphanedSwap(root, len(names), size_bytes, owner))
    return found


def remove_orphans(path: str | os.PathLike[str]) -> list[OrphanedSwap]:
    """Remove what `find_orphans` finds, holding each directory's lock meanwhile. Returns what was removed."""
    removed = []
    for root, manifest, owner in _orphans(path):
        files, freed = _sweep(root, manifest["token"], [str(item) for item in manifest.get("created", [])])
        removed.append(OrphanedSwap(root, files, freed, owner))
    return removed
