"""The public seam between a plan and ZeRO-3: a Policy answers what to do at each block. Ours answers from a Plan.

Blocks are numbered in forward order, embedding first and head last. A user's own policy (`"policy": "module:Class"`)
is constructed with the Plan and the BlockTable and may override any method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.instance import Instance, StepMode
from lazytrain_ds.planning.plan import BoundaryHome, Plan, SubGroupPlan
from lazytrain_ds.planning.program import BACKWARD, FORWARD, PARAMETER, RERUN, Program
from lazytrain_ds.planning.schema import TierName

__all__ = ["ActivationAction", "BlockAction", "PlanPolicy", "Policy"]


@dataclass(frozen=True)
class BlockAction:
    """One visit of a block: copies to issue when it starts, in this order, and what to let go when it ends.

    `fetch`: blocks needed in the pass under way. `fetch_ahead`: blocks that the backward will need first, issued while
    the forward still runs; skipped in a forward without gradient. `release`: blocks (its own, lent ones) whose
    parameters are not held until their next use.
    """

    fetch: tuple[int, ...] = ()
    fetch_ahead: tuple[int, ...] = ()
    release: tuple[int, ...] = ()


@dataclass(frozen=True)
class ActivationAction:
    """How a block's activations are treated; see `BlockPlan` and `ActivationChoice` for the meaning of each field."""

    kind: str
    ops: tuple[str, ...]
    boundary: BoundaryHome
    saved_tier: TierName
    lead: int


class Policy:
    """Base of all policies; every method may be overridden."""

    def __init__(self, plan: Plan, instance: Instance, blocks: Any) -> None:
        self.plan = plan
        self.instance = instance
        self.blocks = blocks

    def before_forward(self, block: int) -> BlockAction:
        """What to fetch when `block`'s forward starts and to release when it ends."""
        raise NotImplementedError

    def before_rerun(self, block: int) -> BlockAction:
        """The same for a re-run of `block` inside backward (a dropped boundary is made again)."""
        raise NotImplementedError

    def before_backward(self, block: int) -> BlockAction:
        """The same for `block`'s backward."""
        raise NotImplementedError

    def reruns_before_backward(self, block: int) -> bool:
        """Whether other blocks are re-run before this one's backward needs its own parameters."""
        raise NotImplementedError

    def activations(self, block: int) -> ActivationAction:
        """What to do with `block`'s saved tensors and boundary."""
        raise NotImplementedError

    def parameter_tier(self, block: int) -> TierName:
        """Home of `block`'s parameters; `device` is resident."""
        raise NotImplementedError

    def sub_group(self, block: int) -> SubGroupPlan:
        """Home, precision and step device of `block`'s optimizer states."""
        raise NotImplementedError

    def optimizer_step(self) -> StepMode:
        """Whether updates hide behind the next forward or finish inside `step()`."""
        raise NotImplementedError


class PlanPolicy(Policy):
    """Executes a Plan by the simulator's own layout of it, so that both fetch and release at the same visits."""

    def __init__(self, plan: Plan, instance: Instance, blocks: Any) -> None:
        super().__init__(plan, instance, blocks)
        program = Program(Costs(instance, plan.micro_batch), plan)
        issued: list[list[tuple[int, int]]] = [[] for _ in program.visits]
        for at, transfers in enumerate(program.issues):
            issued[at] += [(transfer.need, transfer.block) for transfer in transfers if transfer.kind == PARAMETER]
        for at, transfers in enumerate(program.write_backs):
            issued[at] += [(transfer.need, transfer.block) for transfer in transfers]
        fetched_for = {(unit, need) for transfers in issued for need, unit in transfers}
        release: list[list[int]] = [[] for _ in program.visits]
        last_use: dict[int, int] = {}
        lent: dict[int, list[int]] = {}
        for block, owner in instance.borrows:
            lent.setdefault(block, []).append(owner)
        for position, (_, block) in enumerate(program.visits):
            for unit in (block, *lent.get(block, ())):
                if (unit, position) in fetched_for and unit in last_use:
                    release[last_use[unit]].append(unit)
                last_use[unit] = position
        for unit, position in last_use.items():
            release[position].append(unit)
        self._actions: dict[tuple[int, int], BlockAction] = {}
        for position, visit in enumerate(program.visits):
            needed = sorted(issued[position])
            now = [unit for need, unit in needed if (need < program.turn) == (position < program.turn)]
            ahead = [unit for need, unit in needed if unit not in now]
            gone = [unit for unit in dict.fromkeys(release[position]) if not plan.blocks[unit].resident]
            self._actions[visit] = BlockAction(tuple(now), tuple(ahead), tuple(gone))
        self._last_of_segment = {stop - 1 for start, stop in plan.segments() if stop - start > 1}

    def before_forward(self, block: int) -> BlockAction:
        return self._actions[FORWARD, block]

    def before_rerun(self, block: int) -> BlockAction:
        return self._actions.get((RERUN, block), BlockAction(release=(block,)))

    def before_backward(self, block: int) -> BlockAction:
        return self._actions[BACKWARD, block]

    def reruns_before_backward(self, block: int) -> bool:
        return block in self._last_of_segment

    def activations(self, block: int) -> ActivationAction:
        decisions = self.plan.blocks[block]
        choice = self.instance.costs(block, self.plan.micro_batch).choice(decisions.choice)
        # A selective choice that keeps no operator's output is plain recomputation of a block outside segments.
        kind = "boundary" if choice.kind == "selective" and not choice.ops else choice.kind
        return ActivationAction(kind, choice.ops, decisions.boundary, decisions.saved_tier, decisions.activation_lead)

    def parameter_tier(self, block: int) -> TierName:
        return self.plan.blocks[block].parameter_tier

    def sub_group(self, block: int) -> SubGroupPlan:
        return self.plan.blocks[block].optimizer

    def optimizer_step(self) -> StepMode:
        return self.plan.optimizer_step
