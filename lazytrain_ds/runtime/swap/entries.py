"""What the NVMe store knows of a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from lazytrain_ds.runtime.swap.transfers import Operation

__all__ = ["Entry", "TensorSpec"]


@dataclass(frozen=True)
class TensorSpec:
    """What `NvmeStore.reserve` needs to know of a tensor."""

    dtype: torch.dtype
    numel: int

    @property
    def payload_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class Entry:
    """A tensor's file, and the transfers on it that later ones of the same key wait for."""

    key: str
    path: Path
    capacity_bytes: int = 0
    spec: TensorSpec | None = None  # of the last write handed in, done or not
    last_write: Operation | None = None
    reads: list[Operation] = field(default_factory=list)  # handed in since the last write
