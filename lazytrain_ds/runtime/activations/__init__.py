"""Activations under a plan: keep, recompute some, recompute all, drop; on the device, in host memory, on NVMe.

`ActivationRuntime` (runtime.py) wraps each block's forward (wrapping.py, blocks.py). What autograd saves becomes a
handle (storages.py), collected per forward pass (frame.py), moved by mover.py through buffers.py. segments.py makes
dropped boundaries again, replay.py makes a second run equal to the first, takeover.py deals with models that
checkpoint by themselves; lazytrain_ds/runtime/selective.py keeps the outputs of chosen operators.
"""

from lazytrain_ds.runtime.activations.counters import ActivationCounters
from lazytrain_ds.runtime.activations.frame import ParameterAccess, ParameterView
from lazytrain_ds.runtime.activations.mover import Store, StoreTicket
from lazytrain_ds.runtime.activations.runtime import KEEP, ActivationRuntime

__all__ = [
    "KEEP",
    "ActivationCounters",
    "ActivationRuntime",
    "ParameterAccess",
    "ParameterView",
    "Store",
    "StoreTicket",
]
