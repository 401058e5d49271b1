"""The public seam between a plan and ZeRO-3: a Policy answers what to do at each block. Ours answers from a Plan.

Blocks are numbered in forward order, embedding first and head last. A user's own policy (`"policy": "module:Class"`)
is constructed with the Plan and the BlockTable and may override any method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lazytrain_ds.planning.instance import Instance, StepMode
from lazytrain_ds.planning.plan import BoundaryHome, Plan, SubGroupPlan
from lazytrain_ds.planning.schema import TierName

__all__ = ["ActivationAction", "BlockAction", "PlanPolicy", "Policy"]


@dataclass(frozen=True)
class BlockAction:
    """At the start of a block's pass: copies to issue (in this order); at its end: whether its parameters stay."""

    fetch: tuple[int, ...]
    keep: bool


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
        """What to fetch when `block`'s forward starts, and whether its parameters stay until its backward."""
        raise NotImplementedError

    def before_backward(self, block: int) -> BlockAction:
        """What to fetch when `block`'s backward starts; `keep` is whether its parameters stay afterwards."""
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
    """Executes a Plan: fetches are issued when the block `parameter_lead` positions earlier starts."""

    def __init__(self, plan: Plan, instance: Instance, blocks: Any) -> None:
        super().__init__(plan, instance, blocks)
        count = plan.block_count
        sequence = [*range(count), *reversed(range(count))]
        # fetch_at[p]: blocks whose copy is issued when position p of the forward+backward sequence starts.
        fetch_at: list[list[int]] = [[] for _ in sequence]
        for position, block in enumerate(sequence):
            decisions = plan.blocks[block]
            in_backward = position >= count
            held = decisions.keep_parameters or block == count - 1  # the last block goes straight into its backward
            if decisions.resident or (in_backward and held):
                continue
            fetch_at[max(0, position - decisions.parameter_lead)].append(block)
        self._forward = [
            BlockAction(tuple(fetch_at[block]), plan.blocks[block].keep_parameters or plan.blocks[block].resident)
            for block in range(count)
        ]
        self._backward = [
            BlockAction(tuple(fetch_at[2 * count - 1 - block]), plan.blocks[block].resident) for block in range(count)
        ]

    def before_forward(self, block: int) -> BlockAction:
        return self._forward[block]

    def before_backward(self, block: int) -> BlockAction:
        return self._backward[block]

    def activations(self, block: int) -> ActivationAction:
        decisions = self.plan.blocks[block]
        choice = self.instance.costs(block, self.plan.micro_batch).choice(decisions.choice)
        return ActivationAction(
            choice.kind, choice.ops, decisions.boundary, decisions.saved_tier, decisions.activation_lead
        )

    def parameter_tier(self, block: int) -> TierName:
        return self.plan.blocks[block].parameter_tier

    def sub_group(self, block: int) -> SubGroupPlan:
        return self.plan.blocks[block].optimizer

    def optimizer_step(self) -> StepMode:
        return self.plan.optimizer_step
