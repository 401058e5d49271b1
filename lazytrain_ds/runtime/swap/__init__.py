"""Our NVMe store. `NvmeStore` is what the runtime uses; `inspect_swap_path` and the orphan helpers serve `doctor`."""

from lazytrain_ds.errors import SwapError
from lazytrain_ds.hardware.swap_path import SwapPath, absolute_path, inspect_swap_path
from lazytrain_ds.runtime.swap.backends import AioSettings
from lazytrain_ds.runtime.swap.deepspeed_aio import aio_problem
from lazytrain_ds.runtime.swap.directory import OrphanedSwap, find_orphans, remove_orphans
from lazytrain_ds.runtime.swap.memory import aligned_empty
from lazytrain_ds.runtime.swap.store import NvmeStore, TensorSpec
from lazytrain_ds.runtime.swap.transfers import Throttle, Ticket

__all__ = [
    "AioSettings",
    "NvmeStore",
    "OrphanedSwap",
    "SwapError",
    "SwapPath",
    "TensorSpec",
    "Throttle",
    "Ticket",
    "absolute_path",
    "aio_problem",
    "aligned_empty",
    "find_orphans",
    "inspect_swap_path",
    "remove_orphans",
]
