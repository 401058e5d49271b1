"""The choices a block has for what autograd keeps inside it, read off its operator trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lazytrain_ds.planning.instance import ActivationChoice
from lazytrain_ds.workload.operators import Operator
from lazytrain_ds.workload.trace import BlockTrace

Seconds = Callable[[Sequence[Operator]], float]


def activation_menu(trace: BlockTrace, seconds: Seconds, *, droppable: bool) -> tuple[ActivationChoice, ...]:
    """From "keep everything" to "keep the boundary only".

    `seconds` times a list of operators. `droppable`: whether the block's input may be re-made by the block before
    it; where not, the last choice keeps just as little but is of kind `selective`, which excludes it from segments.
    """
    keep = ActivationChoice(
        name="keep",
        kind="keep",
        kept_bytes=trace.kept_bytes,
        offloadable_bytes=trace.kept_bytes,
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
    return (keep, last)
