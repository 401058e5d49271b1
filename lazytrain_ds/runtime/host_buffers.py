"""Host memory of the runtime: page-aligned, page-locked where that is allowed and works, bounded in total.

Buffers are our own mappings (`aligned_empty`) registered with the driver, not `torch.empty(pin_memory=True)`: torch's
caching host allocator rounds each request up to a power of two (33 GiB take 64 GiB) and keeps what is freed. The same
mappings can be read and written with O_DIRECT, so NVMe -> host -> device takes no bounce copy.

Since torch's allocator does not know these buffers, it records no events for them: who starts an asynchronous copy
keeps its buffer until the copy's event is done.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from typing import Any, Protocol

import torch

from lazytrain_ds.errors import HostMemoryError, format_bytes
from lazytrain_ds.runtime.swap.memory import PAGE_BYTES, aligned_empty, round_up

__all__ = ["CudaPageLock", "HostBufferPool", "PageLock", "PageLockError"]

logger = logging.getLogger(__name__)


class PageLockError(RuntimeError):
    """The driver refused to page-lock memory."""


class PageLock(Protocol):
    """Page-locks whole pages for a device, so that its copies run at full speed and asynchronously."""

    def register(self, address: int, size_bytes: int) -> None:
        """Lock. Raises PageLockError."""

    def unregister(self, address: int) -> None:
        """Undo `register` for a buffer that starts at `address`. Raises PageLockError."""


class CudaPageLock:
    """`cudaHostRegister`."""

    _PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context, as torch's own pinned memory is

    def register(self, address: int, size_bytes: int) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._check(runtime.cudaHostRegister(address, size_bytes, self._PORTABLE), "cudaHostRegister")

    def unregister(self, address: int) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._check(runtime.cudaHostUnregister(address), "cudaHostUnregister")

    @classmethod
    def _check(cls, result: Any, call: str) -> None:
        if int(result) != 0:
            cls._forget_error()
            raise PageLockError(f"{call}: {result}")

    @staticmethod
    def _forget_error() -> None:
        # CUDA remembers the refusal, and torch's next kernel launch would report it as its own failure.
        version = (torch.version.cuda or "").split(".")[0]
        try:
            ctypes.CDLL(f"libcudart.so.{version}").cudaGetLastError()
        except (OSError, AttributeError) as error:
            logger.debug("cannot clear CUDA's last error: %s", error)


class _Buffer:
    """One mapping. `whole` is all of it as bytes."""

    def __init__(self, size_bytes: int) -> None:
        self.whole = aligned_empty(size_bytes, torch.uint8)
        self.size_bytes = round_up(max(size_bytes, 1), PAGE_BYTES)
        self.address = self.whole.untyped_storage().data_ptr()
        self.purpose = ""


class HostBufferPool:
    """Hands out 1-D CPU tensors and takes them back for reuse.

    Args:
        limit_bytes: most bytes this pool may hold, used and kept for reuse together; None is unlimited.
        page_lock: how to page-lock; None (also: `pin_memory: false` in the user's config) leaves memory pageable.

    When the driver refuses (WSL2 and containers limit page-locked memory), the pool goes on with pageable memory, says
    so once, and does not try again: copies are slower and results are the same. Thread-safe.
    """

    def __init__(self, limit_bytes: int | None = None, *, page_lock: PageLock | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._page_lock = page_lock
        self._refused = page_lock is None
        self._lock = threading.RLock()
        self._used: dict[int, _Buffer] = {}
        self._spare: list[_Buffer] = []
        self._locked: dict[int, _Buffer] = {}
        self._peak_bytes = 0
        # Memory must not be unmapped while the driver has it locked: at exit and at collection, not only at `close`.
        self._finalizer = weakref.finalize(self, _unlock_all, self._locked, page_lock)

    @staticmethod
    def cost_bytes(numel: int, dtype: torch.dtype) -> int:
        """Host bytes that one buffer takes, locked or not: whole pages (torch's pinned memory: a power of two)."""
        return round_up(max(numel * dtype.itemsize, 1), PAGE_BYTES)

    @property
    def total_bytes(self) -> int:
        """Bytes held: in use and kept for reuse."""
        with self._lock:
            return sum(buffer.size_bytes for buffer in (*self._used.values(), *self._spare))

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        with self._lock:
            return sum(buffer.size_bytes for buffer in self._used.values())

    @property
    def page_locked_bytes(self) -> int:
        """Bytes that are page-locked (and so cannot be swapped out by the system)."""
        with self._lock:
            return sum(buffer.size_bytes for buffer in self._locked.values())

    @property
    def peak_bytes(self) -> int:
        """Largest `total_bytes` so far."""
        return self._peak_bytes

    def by_purpose(self) -> dict[str, int]:
        """Bytes in use per purpose."""
        result: dict[str, int] = {}
        with self._lock:
            for buffer in self._used.values():
                result[buffer.purpose] = result.get(buffer.purpose, 0) + buffer.size_bytes
        return result

    def allocate(self, numel: int, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """A page-aligned tensor of `numel` elements, its content undefined. Give it back with `release`.

        Reuses a spare buffer of at most twice the size. Raises HostMemoryError, with need and have and who holds what,
        when the limit would be passed even without the spare buffers.
        """
        need = self.cost_bytes(numel, dtype)
        with self._lock:
            fitting = [buffer for buffer in self._spare if need <= buffer.size_bytes <= 2 * need]
            if fitting:
                buffer = min(fitting, key=lambda spare: spare.size_bytes)
                self._spare.remove(buffer)
            else:
                self._make_room(need, purpose)
                buffer = self._new_buffer(need, purpose)
            buffer.purpose = purpose
            self._used[buffer.address] = buffer
            self._peak_bytes = max(self._peak_bytes, self.total_bytes)
        return buffer.whole[: numel * dtype.itemsize].view(dtype)

    def release(self, tensor: torch.Tensor) -> None:
        """Take back a tensor from `allocate` (or a view of it). Nothing may read or write it any more, copies included.

        Raises ValueError for a tensor that is not in use here.
        """
        with self._lock:
            buffer = self._used.pop(tensor.untyped_storage().data_ptr(), None)
            if buffer is None:
                raise ValueError("HostBufferPool.release: the tensor is not (or no longer) one of this pool's")
            self._spare.append(buffer)

    def trim(self) -> None:
        """Free the spare buffers."""
        with self._lock:
            for buffer in self._spare:
                self._unlock(buffer)
            self._spare.clear()

    def close(self) -> None:
        """Free the spare buffers and unlock all; tensors still in use stay valid as pageable memory."""
        with self._lock:
            self._spare.clear()
            self._finalizer()

    def _make_room(self, need_bytes: int, purpose: str) -> None:
        if self.limit_bytes is None or self.total_bytes + need_bytes <= self.limit_bytes:
            return
        self.trim()
        if self.total_bytes + need_bytes <= self.limit_bytes:
            return
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(self.by_purpose().items()))
        raise HostMemoryError(
            f"host buffers: {purpose} needs {format_bytes(need_bytes)}, "
            f"{format_bytes(self.limit_bytes - self.total_bytes)} of {format_bytes(self.limit_bytes)} are free (held: "
            f"{held or 'nothing'}). Raise lazytrain.host_memory, set nvme_path so that states can go to disk, or let "
            "the planner choose again."
        )

    def _new_buffer(self, size_bytes: int, purpose: str) -> _Buffer:
        try:
            buffer = _Buffer(size_bytes)
        except MemoryError as error:
            raise HostMemoryError(
                f"host buffers: the system has no {format_bytes(size_bytes)} for {purpose} ({error}); lower "
                "lazytrain.host_memory to what the machine really has"
            ) from error
        if self._page_lock is not None and not self._refused:
            self._lock_pages(buffer, self._page_lock)
        return buffer

    def _lock_pages(self, buffer: _Buffer, page_lock: PageLock) -> None:
        try:
            page_lock.register(buffer.address, buffer.size_bytes)
        except (PageLockError, RuntimeError) as error:
            logger.warning(
                "host buffers: page-locking %s failed with %s after %s were locked; going on with pageable memory. "
                "Copies to the device are slower, results are the same. Under WSL2 or in a container raise the "
                "limit, or set pin_memory to false.",
                format_bytes(buffer.size_bytes),
                error,
                format_bytes(self.page_locked_bytes),
            )
            self._refused = True
            return
        self._locked[buffer.address] = buffer

    def _unlock(self, buffer: _Buffer) -> None:
        if self._locked.pop(buffer.address, None) is not None:
            _unregister(self._page_lock, buffer)


def _unregister(page_lock: PageLock | None, buffer: _Buffer) -> None:
    if page_lock is None:
        return
    try:
        page_lock.unregister(buffer.address)
    except (PageLockError, RuntimeError) as error:  # at exit the driver may be gone already
        logger.debug("host buffers: unlocking failed: %s", error)


def _unlock_all(locked: dict[int, _Buffer], page_lock: PageLock | None) -> None:
    while locked:
        _, buffer = locked.popitem()
        _unregister(page_lock, buffer)
