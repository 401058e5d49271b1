"""What a model needs, per micro-batch: traced where the code runs on fake tensors, estimated from its matrices
where not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lazytrain_ds.workload.blocks import Block, BlockTable, find_blocks
from lazytrain_ds.workload.inputs import candidate_calls
from lazytrain_ds.workload.operators import Operator
from lazytrain_ds.workload.signature import parameter_shape
from lazytrain_ds.workload.trace import BlockTrace, ForwardTrace, TraceError, run_with_inputs, trace_with_inputs


@dataclass(frozen=True)
class Profile:
    """Traces by micro-batch. `source`: `traced`, `measured` (hooks in a real forward) or `estimated` (then `notes`
    says why).
    """

    traces: Mapping[int, ForwardTrace]
    source: str
    notes: tuple[str, ...] = ()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Sizes that were profiled, ascending."""
        return tuple(sorted(self.traces))


def profile_model(
    model: nn.Module,
    table: BlockTable,
    micro_batches: Sequence[int],
    sequence_length: int,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    zero3: bool = True,
) -> Profile:
    """Trace `model` at each micro-batch with made-up inputs (`candidate_calls`); nothing is allocated or computed.

    Code that fake tensors cannot run is really run on a small batch (`run_with_inputs`), the figures taken in
    proportion; when that is not possible either, they are estimated from the shapes of the matrices. `notes` says
    which.
    """
    traces: dict[int, ForwardTrace] = {}
    failures: list[str] = []
    for micro_batch in micro_batches:
        trace, reasons = _first_that_works(model, table, micro_batch, sequence_length, dtype, device, zero3)
        if trace is None:
            failures = reasons
            break
        traces[micro_batch] = trace
    if len(traces) == len(micro_batches):
        return Profile(traces, "traced", next(iter(traces.values())).notes)
    reason = failures[0] if failures else "its forward takes neither token ids nor one float tensor"
    measured = _measured(model, table, micro_batches, sequence_length, dtype, zero3)
    if measured is not None:
        note = f"{reason}; so each class of blocks was run once on a small batch, and its figures taken in proportion"
        return Profile(measured, "measured", (note,))
    note = f"memory per block is estimated from matrix shapes until the first forward, because {reason}"
    return Profile(
        {size: estimate(model, table, size, sequence_length, dtype) for size in micro_batches}, "estimated", (note,)
    )


def _first_that_works(
    model: nn.Module,
    table: BlockTable,
    micro_batch: int,
    sequence_length: int,
    dtype: torch.dtype | None,
    device: str,
    zero3: bool,
) -> tuple[ForwardTrace | None, list[str]]:
    failures = []
    for args, kwargs in candidate_calls(model, micro_batch, sequence_length, dtype):
        try:
            return (
                trace_with_inputs(model, table, args, kwargs, dtype=dtype, device=device, zero3=zero3, training=True),
                failures,
            )
        except TraceError as error:
            failures.append(str(error).splitlines()[0])
    return None, failures


SMALL_BATCH_TOKENS = 128


def _measured(
    model: nn.Module,
    table: BlockTable,
    micro_batches: Sequence[int],
    sequence_length: int,
    dtype: torch.dtype | None,
    zero3: bool,
) -> dict[int, ForwardTrace] | None:
    length = min(sequence_length, SMALL_BATCH_TOKENS)
    for args, kwargs in candidate_calls(model, 1, length, dtype):
        try:
            trace = run_with_inputs(model, table, args, kwargs, dtype=dtype, zero3=zero3, training=True)
        except TraceError:
            continue
        return {size: trace.scaled(size * sequence_length / length) for size in micro_batches}
    return None


def profile_call(
    model: nn.Module,
    table: BlockTable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    micro_batch: int,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    zero3: bool = True,
) -> Profile:
    """Profile one real call (the first micro-batch of a run), entered as `micro_batch`.

    Traced on fake tensors, else run once on the CPU with random weights (`notes` says so). TraceError where
    neither works.
    """
    try:
        trace = trace_with_inputs(model, table, args, kwargs, dtype=dtype, device=device, zero3=zero3)
    except TraceError as error:
        reason = str(error).splitlines()[0]
        trace = run_with_inputs(model, table, args, kwargs, dtype=dtype, zero3=zero3)
        return Profile({micro_batch: trace}, "measured", (f"{reason}; so each class of blocks was run once",))
    return Profile({micro_batch: trace}, "traced", trace.notes)


def observed_blocks(model: nn.Module, profile: Profile, pattern: str | Sequence[str] | None = None) -> BlockTable:
    """The block table in the order in which the traced forward called the modules."""
    return find_blocks(model, pattern, order=next(iter(profile.traces.values())).order)


def estimate(
    model: nn.Module, table: BlockTable, micro_batch: int, sequence_length: int, dtype: torch.dtype | None = None
) -> ForwardTrace:
    """Figures from shapes alone: each matrix reads and makes one vector per token, and keeps both.

    Never used for activation plans, only to place parameters and states before the first real forward.
    """
    tokens = micro_batch * sequence_length
    parameters = dict(model.named_parameters(remove_duplicate=False))
    blocks = tuple(_estimate_block(block, parameters, tokens, dtype) for block in table)
    return ForwardTrace(blocks=blocks, order=(), shared_bytes=0, loose_bytes=0, input_bytes=8 * tokens)


def _estimate_block(
    block: Block, parameters: Mapping[str, nn.Parameter], tokens: int, dtype: torch.dtype | None
) -> BlockTrace:
    names = [*block.parameters, *(name for name, _ in block.borrows)]
    shapes = [parameter_shape(parameters[name]) for name in names]
    matrices = [shape for shape in shapes if len(shape) >= 2]
    own = parameters[names[0]].dtype if names else torch.float32
    size = (dtype if dtype is not None and own.is_floating_point else own).itemsize
    width = matrices[0][-1] if matrices else max((shape[0] for shape in shapes if shape), default=1)
    kept = [tokens * size * (shape[-1] + shape[-2]) for shape in matrices if block.kind != "embedding"]
    flops = sum(2 * tokens * shape[-1] * shape[-2] for shape in matrices if block.kind != "embedding")
    moved = sum(kept)
    forward = (Operator("estimated", flops, moved, (), ()),)
    backward = (Operator("estimated", 2 * flops, 2 * moved, (), ()),)
    largest = max((size * torch.Size(shape).numel() for shape in matrices), default=0)
    return BlockTrace(
        boundary_bytes=tokens * width * size,
        output_bytes=tokens * width * size,
        kept=tuple(kept),
        needs_input=True,
        forward=forward,
        backward=backward,
        rerun_operators=1,
        transient_forward_bytes=sum(kept),
        transient_backward_bytes=sum(kept) + largest,
        chained=block.kind == "block",
        calls=1,
    )
