"""Host memory for offloaded activations: pooled by size, bounded, returned to the base line after every step."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from lazytrain_ds.errors import HostMemoryError, format_bytes

__all__ = ["GRANULARITY_BYTES", "HostBuffers"]

GRANULARITY_BYTES = 4096
"""Buffers are whole pages: sizes that differ by a few bytes share them, and an NVMe store can move them directly."""


class HostBuffers:
    """Byte buffers by size. What is given back is kept for the next step, up to the most that was in use at once.

    `allocate(byte_count)` makes a new 1-D uint8 tensor. `cap_bytes` bounds what is in use plus what is pooled.
    Thread-safe: graphs are freed by autograd's threads.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], name: str, cap_bytes: int | None = None) -> None:
        self._allocate = allocate
        self._name = name
        self.cap_bytes = cap_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self.in_use_bytes = 0
        self.pooled_bytes = 0
        self.peak_bytes = 0

    @staticmethod
    def padded(byte_count: int) -> int:
        """Size of the buffer that holds `byte_count` bytes."""
        return -(-byte_count // GRANULARITY_BYTES) * GRANULARITY_BYTES

    def try_take(self, byte_count: int) -> torch.Tensor | None:
        """A buffer of at least `byte_count` bytes, or None where the cap does not allow another one now."""
        size = self.padded(byte_count)
        with self._lock:
            pool = self._free.get(size)
            if pool:
                buffer = pool.pop()
                self.pooled_bytes -= size
            else:
                if self.cap_bytes is not None and self.in_use_bytes + size > self.cap_bytes:
                    return None
                while self.cap_bytes is not None and self.in_use_bytes + self.pooled_bytes + size > self.cap_bytes:
                    self._drop_one()
                buffer = self._allocate(size)
            self.in_use_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
            return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer that nothing reads or writes any more."""
        size = buffer.numel()
        with self._lock:
            self.in_use_bytes -= size
            self._free.setdefault(size, []).append(buffer)
            self.pooled_bytes += size
            # Sizes of an earlier shape would otherwise stay beside those of the present one for ever.
            while self.in_use_bytes + self.pooled_bytes > self.peak_bytes:
                self._drop_one(keep=size)

    def _drop_one(self, keep: int | None = None) -> None:
        sizes = [size for size, pool in self._free.items() if pool]
        size = next((candidate for candidate in sizes if candidate != keep), sizes[0])
        self._free[size].pop()
        if not self._free[size]:
            del self._free[size]
        self.pooled_bytes -= size

    def trim(self) -> None:
        """Free everything pooled and start a new peak."""
        with self._lock:
            self._free.clear()
            self.pooled_bytes = 0
            self.peak_bytes = self.in_use_bytes

    def refusal(self, byte_count: int) -> HostMemoryError:
        """The error for a buffer that will not fit however long one waits."""
        return HostMemoryError(
            f"host memory for {self._name}: need {format_bytes(self.padded(byte_count))} more, but "
            f"{format_bytes(self.in_use_bytes)} of {format_bytes(self.cap_bytes or 0)} are in use. Raise "
            "lazytrain.host_memory, use a smaller micro-batch, or let the planner choose again."
        )
