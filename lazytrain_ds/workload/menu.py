"""The choices a block has for what autograd keeps inside it, read off its operator trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lazytrain_ds.planning.instance import ActivationChoice
from lazytrain_ds.workload.operators import Operator
from lazytrain_ds.workload.selective import efficient_sets
from lazytrain_ds.workload.trace import BlockTrace

Seconds = Callable[[Sequence[Operator]], float]

MINIMUM_OFFLOAD_BYTES = 1 << 16
"""Smaller storages never leave the device: a transfer costs more than it saves."""

MOST_CHOICES = 8


def activation_menu(trace: BlockTrace, seconds: Seconds, *, droppable: bool) -> tuple[ActivationChoice, ...]:
    """From "keep everything" to "keep the boundary only".

    `seconds` times a list of operators. `droppable`: whether the block's input may be re-made by the block before
    it; where not, the last choice keeps just as little but is of kind `selective`, which excludes it from segments.
    """
    keep = ActivationChoice(
        name="keep",
        kind="keep",
        kept_bytes=trace.kept_bytes,
        offloadable_bytes=offloadable(trace.kept),
        recompute_seconds=0.0,
        needs_input=trace.needs_input,
    )
    rerun = trace.forward[: trace.rerun_operators]
    last = ActivationChoice(
        name="boundary" if droppable else "recompute",
        kind="boundary" if droppable else "selective",
        kept_bytes=0,
        offloadable_bytes=0,
        recompute_seconds=seconds(rerun),
        recompute_flops=sum(operator.flops for operator in rerun),
    )
    between = [
        ActivationChoice(
            name="keep " + "+".join(name.removeprefix("aten.").removesuffix(".default") for name in kept.ops),
            kind="selective",
            kept_bytes=sum(kept.kept),
            offloadable_bytes=offloadable(kept.kept),
            recompute_seconds=kept.seconds,
            recompute_flops=sum(operator.flops for operator in kept.rerun),
            ops=kept.ops,
        )
        for kept in efficient_sets(trace.forward, trace.rerun_operators, seconds, trace.kept_bytes, MOST_CHOICES - 2)
        if kept.seconds < last.recompute_seconds
    ]
    return (keep, *between, last)


def offloadable(sizes: Sequence[int]) -> int:
    """Bytes of the storages that may leave the device."""
    return sum(size for size in sizes if size >= MINIMUM_OFFLOAD_BYTES)
