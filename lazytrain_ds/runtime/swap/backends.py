"""How bytes get to and from the disk: what a back end is, and the default one, `preadv`/`pwritev` from Python threads.

A back end moves one request (at most a few MiB) in the calling worker thread and returns when it is done; splitting,
ordering, bounce buffers and bookkeeping are NvmeStore's. `threads` needs no build, checks each byte count the kernel
returns, and is the default; benchmarks/swap_backends.md has both measured.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from lazytrain_ds.errors import SwapError
from lazytrain_ds.hardware.swap_path import DirectIO
from lazytrain_ds.runtime.swap.memory import AlignedBuffer, memory_view

__all__ = ["AioSettings", "Backend", "Kind", "Segment", "ThreadsBackend", "TransferError", "Worker"]

Kind = Literal["read", "write"]

Segment = tuple[int, int]
"""(address, size in bytes) of one piece of memory."""

_MAX_REQUEST_BYTES = 256 << 20  # far below the 2 GiB at which Linux cuts a single read or write short


@dataclass(frozen=True)
class AioSettings:
    """How deep the queues are, per direction.

    `request_bytes` is what one call moves (the kernel splits it into device requests that run side by side), `threads`
    is how many calls run at once. A worker needs the GIL once per request, and a busy Python thread gives it up only
    every 5 ms: hence the large requests. The defaults reach the disk's rate in benchmarks/swap_backends.md. A user's
    DeepSpeed `aio` block maps to request_bytes = block_size x queue_depth (the bytes one aio thread keeps in flight)
    and threads = intra_op_parallelism.
    """

    request_bytes: int = 8 << 20
    threads: int = 4
    block_bytes: int = 1 << 20
    queue_depth: int = 8
    single_submit: bool = False
    overlap_events: bool = True

    @classmethod
    def from_deepspeed(cls, aio: dict[str, Any] | None) -> AioSettings:
        """From the `aio` block of a DeepSpeed config; None or an empty block gives the defaults."""
        if not aio:
            return cls()
        block, depth = int(aio.get("block_size", 1 << 20)), int(aio.get("queue_depth", 8))
        threads = int(aio.get("intra_op_parallelism", aio.get("thread_count", 1)))
        if min(block, depth, threads) < 1:
            raise SwapError(
                f"aio: block_size {block}, queue_depth {depth} and intra_op_parallelism {threads} must be at least 1"
            )
        request = min(max(block * depth, 4096), _MAX_REQUEST_BYTES) // 4096 * 4096
        return cls(
            request_bytes=request,
            threads=min(threads, 64),
            block_bytes=max(4096, min(block, request) // 4096 * 4096),
            queue_depth=depth,
            single_submit=bool(aio.get("single_submit", False)),
            overlap_events=bool(aio.get("overlap_events", True)),
        )


class Worker(Protocol):
    """One worker thread's connection to a back end. Used by that thread only."""

    def staging(self, size_bytes: int) -> Segment:
        """The worker's own bounce buffer, at least `size_bytes` long, allocated at first use."""

    def transfer(self, kind: Kind, file: Any, segments: Sequence[Segment], offset: int) -> None:
        """Move all `segments` to or from `offset` on. Raises OSError (`done_bytes` attribute set) if it cannot."""

    def close(self) -> None:
        """Give the worker's resources back."""


class Backend(Protocol):
    """What NvmeStore needs from a back end."""

    name: str

    def open(self, path: Path, kind: Kind) -> Any: ...
    def close(self, file: Any) -> None: ...
    def worker(self) -> Worker: ...
    def takes_directly(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's own memory can be given to `transfer`, so that no copy is needed."""


class TransferError(OSError):
    """An OSError that knows how many bytes of the request were done."""

    def __init__(self, number: int, reason: str, done_bytes: int) -> None:
        super().__init__(number, reason)
        self.done_bytes = done_bytes


class ThreadsBackend:
    """`preadv`/`pwritev`, with O_DIRECT where the directory has it. The calls release the GIL."""

    name = "threads"

    def __init__(self, direct_io: DirectIO) -> None:
        self._direct_io = direct_io

    def open(self, path: Path, kind: Kind) -> int:
        flags = os.O_RDONLY if kind == "read" else os.O_WRONLY
        if self._direct_io.supported:
            flags |= os.O_DIRECT
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)

    def close(self, file: int) -> None:
        os.close(file)

    def worker(self) -> _ThreadsWorker:
        return _ThreadsWorker(self._direct_io.length_alignment_bytes if self._direct_io.supported else 1)

    def takes_directly(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() % self._direct_io.memory_alignment_bytes == 0


class _ThreadsWorker:
    def __init__(self, length_alignment_bytes: int) -> None:
        self._alignment = length_alignment_bytes
        self._staging: AlignedBuffer | None = None

    def staging(self, size_bytes: int) -> Segment:
        if self._staging is None or self._staging.size_bytes < size_bytes:
            self._staging = AlignedBuffer(size_bytes)
        return self._staging.address, self._staging.size_bytes

    def transfer(self, kind: Kind, file: int, segments: Sequence[Segment], offset: int) -> None:
        call: Callable[[int, list[memoryview], int], int] = os.preadv if kind == "read" else os.pwritev
        wanted = sum(size for _, size in segments)
        done = 0
        while done < wanted:
            try:
                count = call(file, [memory_view(*piece) for piece in _skip(segments, done)], offset + done)
            except OSError as error:
                raise TransferError(error.errno or errno.EIO, str(error.strerror), done) from error
            # A short count is legal (a signal, the device's limits); under O_DIRECT only whole blocks can be resumed.
            progress = count // self._alignment * self._alignment if done + count < wanted else count
            if progress <= 0:
                reason = "the file ends early" if kind == "read" else f"a short write: the kernel took {count} bytes"
                raise TransferError(errno.EIO, reason, done)
            done += progress

    def close(self) -> None:
        self._staging = None


def _skip(segments: Sequence[Segment], size_bytes: int) -> list[Segment]:
    """`segments` without their first `size_bytes` bytes."""
    rest = []
    for address, size in segments:
        cut = min(size_bytes, size)
        size_bytes -= cut
        if size > cut:
            rest.append((address + cut, size - cut))
    return rest
