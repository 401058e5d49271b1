"""Memory that O_DIRECT accepts: page-aligned tensors and raw views on tensor memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

__all__ = ["PAGE_BYTES", "AlignedBuffer", "aligned_empty", "copy_memory", "memory_view", "round_up"]

PAGE_BYTES = 4096
"""Alignment of everything allocated here. Every disk's logical block (512 or 4,096 bytes) divides it."""

_HUGE_PAGE_BYTES = 2 << 20

_view_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_from_memory.restype = ctypes.py_object
_view_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_PYBUF_WRITE = 0x200


def round_up(count: int, unit: int) -> int:
    """Smallest multiple of `unit` that is at least `count`."""
    return -(-count // unit) * unit


def memory_view(address: int, size_bytes: int) -> memoryview:
    """Writable view on raw memory. The caller keeps that memory alive."""
    view: memoryview = _view_from_memory(address, size_bytes, _PYBUF_WRITE)
    return view


def copy_memory(destination: int, source: int, size_bytes: int) -> None:
    """memcpy between two addresses with the GIL released (a memoryview assignment would hold it)."""
    ctypes.memmove(destination, source, size_bytes)


def _map_private(size_bytes: int) -> mmap.mmap:
    # Not the default MAP_SHARED: that is shmem, which a forked data-loader worker would share and write into.
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE_PAGE_BYTES:
        # A disk request has a limited number of memory segments (254 on a virtio disk: 1 MiB of scattered small pages),
        # and each page costs time to pin. Huge pages where the kernel has them; it is fine if it has not.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def aligned_empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D CPU tensor of `numel` elements whose first byte is page-aligned, in a storage padded to whole pages.

    NvmeStore moves such a tensor (and any slice of it that starts on a multiple of the disk's block) without a
    bounce copy. Fresh memory is zero, as the kernel hands it out.
    Raises ValueError for a negative `numel`, MemoryError when the system has no memory to give.
    """
    if numel < 0:
        raise ValueError(f"aligned_empty: numel must be at least 0, got {numel}")
    payload_bytes = numel * dtype.itemsize
    try:
        mapping = _map_private(max(PAGE_BYTES, round_up(payload_bytes, PAGE_BYTES)))
    except OSError as error:
        raise MemoryError(f"aligned_empty: no memory for {payload_bytes} bytes: {error}") from error
    return torch.frombuffer(mapping, dtype=torch.uint8)[:payload_bytes].view(dtype)


class AlignedBuffer:
    """A private page-aligned byte buffer: the bounce buffer of one worker. `address` and `size_bytes` are fixed."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = round_up(size_bytes, PAGE_BYTES)
        self._tensor = aligned_empty(self.size_bytes, torch.uint8)
        self.address = self._tensor.data_ptr()
