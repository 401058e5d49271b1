"""Bytes that a phase of a run needs beyond what the plan keeps anyway: loading, initializing, saving, resuming.

The planner adds these to the placement's bytes (parameters, states, gradients where the plan puts them). Loading
happens before states exist, so it costs more than the placement only where the loaded model is larger than its
copy in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lazytrain_ds.planning.instance import BlockClass, PhaseBytes
from lazytrain_ds.workload.signature import parameter_numel


def phase_bytes(
    model: nn.Module,
    classes: Sequence[BlockClass],
    order: Sequence[str],
    *,
    compute_dtype: torch.dtype | None,
    loaded_dtype: torch.dtype | None = None,
    gathers_on_save: bool = False,
) -> tuple[PhaseBytes, ...]:
    """Extra bytes per phase.

    `loaded_dtype`: dtype of the weights when the script builds the model (None: the model's own); where it is
    wider than the compute dtype, the wide copy goes parameter by parameter, and the planner's placement already
    covers the narrow one. `initialize`: the largest block once more, while it moves into its flat buffer and gets
    its fp32 master. `save`: the largest block's states on their way to disk, and the 16-bit model where DeepSpeed
    is asked to gather it. `resume`: the same, streamed the other way.
    """
    narrow = wide = 0
    for parameter in {id(parameter): parameter for parameter in model.parameters()}.values():
        numel = parameter_numel(parameter)
        own = loaded_dtype if loaded_dtype is not None and parameter.dtype.is_floating_point else parameter.dtype
        compute = compute_dtype if compute_dtype is not None and parameter.dtype.is_floating_point else parameter.dtype
        wide += numel * own.itemsize
        narrow += numel * compute.itemsize
    largest = max((item for item in classes if item.name in order), key=lambda item: item.parameter_count)
    states = 12 * largest.trainable_count
    gathered = narrow if gathers_on_save else 0
    return (
        PhaseBytes("load", host_bytes=max(0, wide - narrow)),
        PhaseBytes("initialize", host_bytes=largest.parameter_bytes + 4 * largest.trainable_count),
        PhaseBytes("step"),
        PhaseBytes("save", host_bytes=states + gathered),
        PhaseBytes("resume", host_bytes=states),
    )
