"""DeepSpeed's `aio_handle` (Linux libaio) as a back end, for who asks for it.

The handle never looks at the result of a request (`io_event.res`), aborts the process when an assertion fails, and
keeps a thread that must be joined before the interpreter ends. So: one handle per worker, memory from its own locked
allocator, our own check that each block really moved, and `close` in the thread that used it. Its build takes minutes
and, once interrupted, leaves a lock file at which the next load waits for ever: `aio_problem` looks first.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lazytrain_ds.errors import SwapError
from lazytrain_ds.hardware.swap_path import DirectIO
from lazytrain_ds.runtime.swap.backends import AioSettings, Kind, Segment, TransferError
from lazytrain_ds.runtime.swap.memory import AlignedBuffer, memory_view

__all__ = ["AioProblem", "DeepSpeedAioBackend", "aio_problem"]

logger = logging.getLogger(__name__)


class DeepSpeedAioBackend:
    """DeepSpeed's `aio_handle` (Linux libaio). O_DIRECT only. Loading (or building) the op happens here."""

    name = "deepspeed_aio"

    def __init__(self, direct_io: DirectIO, settings: AioSettings, *, build: bool = True) -> None:
        if not direct_io.supported:
            raise SwapError(
                f'NVMe store: the "deepspeed_aio" back end needs O_DIRECT, which this directory lacks '
                f'({direct_io.error}); use the "threads" back end'
            )
        self._settings = settings
        self._module = _load_aio(build, settings.request_bytes * settings.threads * 2)

    def open(self, path: Path, kind: Kind) -> _AioFile:
        flags = os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
        return _AioFile(str(path), os.open(path, flags))

    def close(self, file: _AioFile) -> None:
        os.close(file.descriptor)

    def worker(self) -> _AioWorker:
        settings = self._settings
        handle = self._module.aio_handle(
            block_size=settings.block_bytes, queue_depth=settings.queue_depth, single_submit=settings.single_submit,
            overlap_events=settings.overlap_events, intra_op_parallelism=1,
        )  # fmt: skip
        return _AioWorker(handle, settings.block_bytes)

    def takes_directly(self, tensor: torch.Tensor) -> bool:
        # The handle would copy any memory that is not page-locked into a buffer of its own at each call.
        return tensor.data_ptr() % 4096 == 0 and tensor.is_pinned()


@dataclass(frozen=True)
class _AioFile:
    name: str
    descriptor: int  # for checking what the handle wrote


class _AioWorker:
    def __init__(self, handle: Any, block_bytes: int) -> None:
        self._handle = handle
        self._block_bytes = block_bytes
        self._staging: torch.Tensor | None = None
        self._sector = AlignedBuffer(4096)

    def staging(self, size_bytes: int) -> Segment:
        if self._staging is None or self._staging.numel() < size_bytes:
            self._free_staging()
            self._staging = self._handle.new_cpu_locked_tensor(size_bytes, torch.empty(0, dtype=torch.uint8))
        return self._staging.data_ptr(), self._staging.numel()

    def transfer(self, kind: Kind, file: _AioFile, segments: Sequence[Segment], offset: int) -> None:
        segments = [segment for segment in segments if segment[1]]
        done = 0
        for address, size in segments:
            if kind == "read":
                # The handle asserts, and so aborts the process, on a file that is too short.
                if os.fstat(file.descriptor).st_size < offset + done + size:
                    raise TransferError(errno.EIO, "the file ends early", done)
                self._read(file, address, size, offset + done, done)
            else:
                self._write(file, address, size, offset + done, done)
            done += size

    def _tensor(self, address: int, size: int) -> torch.Tensor:
        return torch.frombuffer(memory_view(address, size), dtype=torch.uint8)

    def _ends(self, size: int) -> list[int]:
        """Where the handle's requests end, counted from the first one's start."""
        return [*range(self._block_bytes, size, self._block_bytes), size]

    def _read(self, file: _AioFile, address: int, size: int, offset: int, done: int) -> None:
        # A request that failed or fell short leaves the end of its block as it was: a random mark that no file holds.
        mark = secrets.token_bytes(16)
        for end in self._ends(size):
            memory_view(address + end - 16, 16)[:] = mark
        if self._handle.sync_pread(self._tensor(address, size), file.name, offset) != 1:
            raise TransferError(errno.EIO, "aio_handle refused the read (its message is on stderr)", done)
        for end in self._ends(size):
            if bytes(memory_view(address + end - 16, 16)) == mark:
                raise TransferError(errno.EIO, f"aio_handle did not fill the block that ends at {offset + end}", done)

    def _write(self, file: _AioFile, address: int, size: int, offset: int, done: int) -> None:
        if self._handle.sync_pwrite(self._tensor(address, size), file.name, offset) != 1:
            raise TransferError(errno.EIO, "aio_handle refused the write (its message is on stderr)", done)
        sector = memory_view(self._sector.address, 4096)
        for end in self._ends(size):
            if os.preadv(file.descriptor, [sector], offset + end - 4096) != 4096 or sector != memory_view(
                address + end - 4096, 4096
            ):
                raise TransferError(errno.EIO, f"aio_handle did not write the block that ends at {offset + end}", done)

    def _free_staging(self) -> None:
        if self._staging is not None:
            self._handle.free_cpu_locked_tensor(self._staging)
            self._staging = None

    def close(self) -> None:
        self._free_staging()
        self._handle = None  # joins the handle's own thread, here, while the interpreter is whole


def _extension_directories() -> list[Path]:
    """Where torch builds async_io and the pin_memory op that it needs."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        from torch.utils import cpp_extension

        probe = cpp_extension._get_build_directory("async_io", False)
        root = os.path.dirname(probe)
    return [Path(root) / name for name in ("pin_memory", "async_io")]


def _installed_ops() -> bool:
    """Whether DeepSpeed was installed with async_io compiled in."""
    try:
        from deepspeed.git_version_info import installed_ops
    except ImportError:
        return False
    return bool(installed_ops.get("async_io"))


@dataclass(frozen=True)
class AioProblem:
    """Why async_io cannot be loaded at once. `locked`: because torch's build lock file is there."""

    message: str
    locked: bool = False


def aio_problem() -> AioProblem | None:
    """Why DeepSpeed's async_io cannot be loaded at once, without a build; None if it can. Loads and builds nothing."""
    if _installed_ops():
        return None
    directories = _extension_directories()
    for directory in directories:
        lock = directory / "lock"
        try:
            minutes = (time.time() - lock.stat().st_mtime) / 60
        except OSError:
            continue
        return AioProblem(
            f"{lock} is there since {minutes:.0f} minutes: either another process is building that extension right "
            "now, or a build was interrupted; loading it would wait for ever. If no build is running, "
            f"delete that file: rm {lock}",
            locked=True,
        )
    missing = [directory.name for directory in directories if not (directory / f"{directory.name}.so").exists()]
    if missing:
        return AioProblem(f"not built yet (no {' or '.join(missing)} in {directories[0].parent})")
    return None


def _can_lock(size_bytes: int) -> bool:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= size_bytes:
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    capabilities = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return bool(capabilities >> 14 & 1)  # CAP_IPC_LOCK lifts the limit


def _load_aio(build: bool, locked_bytes: int, *, wait_seconds: float = 5.0) -> ModuleType:
    """Load the op; with `build`, build it first if need be (minutes). Raises SwapError, and never waits for a lock
    file longer than `wait_seconds`."""
    advice = 'Use the "threads" back end, which needs no build.'
    deadline = time.monotonic() + wait_seconds
    while (problem := aio_problem()) is not None and problem.locked and build and time.monotonic() < deadline:
        time.sleep(0.2)
    if problem is not None and (problem.locked or not build):
        raise SwapError(f"NVMe store: DeepSpeed's async_io cannot be loaded: {problem.message}. {advice}")
    if not _can_lock(locked_bytes):
        raise SwapError(
            f"NVMe store: DeepSpeed's async_io locks {locked_bytes} bytes of memory, more than `ulimit -l` allows, and "
            f"would abort the process. Raise the limit, or make aio block_size and queue_depth smaller. {advice}"
        )
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if problem is not None:
        if not builder.is_compatible(verbose=False):
            raise SwapError(
                "NVMe store: DeepSpeed's async_io cannot be built: libaio is missing or has no io_submit "
                f"(Debian and Ubuntu: apt install libaio-dev). {advice}"
            )
        logger.warning(
            "NVMe store: building DeepSpeed's async_io in %s; this takes minutes", _extension_directories()[1]
        )
    try:
        module: ModuleType = builder.load(verbose=False)
    except Exception as error:
        raise SwapError(f"NVMe store: DeepSpeed's async_io did not load: {error}. {advice}") from error
    return module
