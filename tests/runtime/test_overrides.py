"""Whatever our subclasses override of DeepSpeed stands in the table, and what the table calls overridden is."""

from __future__ import annotations

import pytest
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from lazytrain_ds.runtime import overrides
from lazytrain_ds.runtime.checkpoint import MappedCheckpointEngine
from lazytrain_ds.runtime.coordinator import LazyCoordinator
from lazytrain_ds.runtime.engine import LazyTrainEngine
from lazytrain_ds.runtime.stage3 import LazyStage3

SUBCLASSES = [
    (LazyTrainEngine, DeepSpeedEngine),
    (LazyStage3, DeepSpeedZeroOptimizer_Stage3),
    (LazyCoordinator, PartitionedParameterCoordinator),
    (MappedCheckpointEngine, TorchCheckpointEngine),
]


@pytest.mark.parametrize(("ours", "upstream"), SUBCLASSES)
def test_table_is_complete_and_true(ours: type, upstream: type) -> None:
    own = {name for base in ours.__mro__ if base.__module__.startswith("lazytrain_ds") for name in vars(base)}
    # `zero.Init` leaves `_old_init` on every Module class it has seen, for the rest of the process.
    left_behind = {"_abc_impl", "_old_init"}
    special = {name for name in own if name.startswith("__") or name in left_behind} - {"__init__"}
    overridden = {name for name in own - special if hasattr(upstream, name)}
    prefix = f"{upstream.__module__}.{upstream.__qualname__}."
    listed = {
        e.name.removeprefix(prefix)
        for e in overrides.OVERRIDDEN
        if e.name.startswith(prefix) and not e.why.startswith("relied on")
    }
    assert overridden == listed
