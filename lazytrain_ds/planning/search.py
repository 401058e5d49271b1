"""Local search on the simulator: takes a plan, returns one that is never worse.

Worse means more bytes above the caps, then a longer step. The search is deterministic: its only limit is a count of
simulations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lazytrain_ds.planning.instance import StepMode
from lazytrain_ds.planning.moves import Freedom, Space, pick
from lazytrain_ds.planning.plan import BlockPlan, Plan
from lazytrain_ds.planning.simulator import Outcome, Simulator

__all__ = ["Search", "activations_of", "better", "with_lead"]

# A move must gain at least this share of the step, so that rounding noise does not send the search in circles.
_LEAST_GAIN = 1e-7


def better(left: Outcome, right: Outcome) -> bool:
    """Whether `left` beats `right`: less above the caps, then clearly faster."""
    if left.excess != right.excess:
        return left.excess < right.excess
    return left.step_seconds < right.step_seconds * (1 - _LEAST_GAIN)


class Search:
    """Improves plans of one instance and micro-batch within a budget of simulations."""

    def __init__(self, simulator: Simulator, micro_batch: int, freedom: Freedom, budget: int) -> None:
        self.simulator = simulator
        self.space = Space(simulator.instance, micro_batch)
        self.freedom = freedom
        self.left = budget
        self._seen: dict[tuple[object, ...], Outcome] = {}

    def evaluate(self, plan: Plan) -> Outcome | None:
        """The simulator's outcome, or None when the budget is spent. Plans seen before are free."""
        key = (plan.blocks, plan.optimizer_step)
        found = self._seen.get(key)
        if found is None:
            if self.left <= 0:
                return None
            self.left -= 1
            found = self.simulator.run(plan)
            self._seen[key] = found
        return found

    def improve(self, plan: Plan, good: float = 0.0) -> tuple[Plan, Outcome]:
        """Repeat all moves until none helps, the budget is spent, or a fitting plan takes at most `good` seconds."""
        outcome = self.evaluate(plan) or self.simulator.run(plan)
        improved = True
        while improved and self.left > 0 and not (outcome.fits and outcome.step_seconds <= good):
            improved = False
            for attempt in (self._whole_plan, self._block_moves, self._swaps):
                found = attempt(plan, outcome)
                if found is not None:
                    plan, outcome = found
                    improved = True
        return plan, outcome

    # ---- moves

    def _try(self, candidate: Plan, outcome: Outcome) -> Outcome | None:
        result = self.evaluate(candidate)
        return result if result is not None and better(result, outcome) else None

    def _whole_plan(self, plan: Plan, outcome: Outcome) -> tuple[Plan, Outcome] | None:
        """Step mode and uniform leads."""
        allowed = self.simulator.instance.allowed
        changed = False
        candidates: list[Callable[[Plan], Plan]] = []
        if self.freedom.placement:
            for mode in allowed.step_modes:
                candidates.append(partial(_with_step, mode=mode))
            for lead in range(allowed.longest_lead + 1):
                candidates.append(partial(with_lead, field="parameter_lead", lead=lead))
        if self.freedom.activations:
            for lead in range(allowed.longest_lead + 1):
                candidates.append(partial(with_lead, field="activation_lead", lead=lead))
        for change in candidates:
            candidate = change(plan)
            result = self._try(candidate, outcome)
            if result is not None:
                plan, outcome, changed = candidate, result, True
        return (plan, outcome) if changed else None

    def _block_moves(self, plan: Plan, outcome: Outcome) -> tuple[Plan, Outcome] | None:
        changed = False
        space = self.space
        for name, aspect, source, target in list(space.pairs(plan, self.freedom.aspects)):
            size = len(space.holders(plan, name, aspect).get(source, ()))
            while size >= 1 and self.left > 0:
                moved = False
                for pattern in ("late", "early", "spread"):
                    holders = space.holders(plan, name, aspect).get(source, [])
                    if not holders or (size >= len(holders) and pattern != "late"):
                        continue
                    candidate = space.moved(plan, pick(holders, size, pattern), aspect, target)
                    result = self._try(candidate, outcome)
                    if result is not None:
                        plan, outcome, changed, moved = candidate, result, True, True
                        break
                if not moved:
                    size //= 2
        return (plan, outcome) if changed else None

    def _swaps(self, plan: Plan, outcome: Outcome) -> tuple[Plan, Outcome] | None:
        """Exchange the whole decision of two neighbouring unequal blocks of one class."""
        changed = False
        order = self.simulator.instance.order
        for index in range(len(order) - 1):
            left, right = plan.blocks[index], plan.blocks[index + 1]
            if order[index] != order[index + 1] or left == right or self.left <= 0:
                continue
            blocks = list(plan.blocks)
            if self.freedom.placement:
                blocks[index], blocks[index + 1] = right, left
            else:
                blocks[index] = activations_of(left, right)
                blocks[index + 1] = activations_of(right, left)
            candidate = replace(plan, blocks=tuple(self.space.normalize(blocks)))
            result = self._try(candidate, outcome)
            if result is not None:
                plan, outcome, changed = candidate, result, True
        return (plan, outcome) if changed else None


def _with_step(plan: Plan, mode: StepMode) -> Plan:
    return replace(plan, optimizer_step=mode)


def with_lead(plan: Plan, field: str, lead: int) -> Plan:
    return replace(plan, blocks=tuple(replace(block, **{field: lead}) for block in plan.blocks))  # type: ignore[arg-type]


def activations_of(block: BlockPlan, other: BlockPlan) -> BlockPlan:
    """`block` with the activation decisions of `other`."""
    return replace(
        block,
        choice=other.choice,
        boundary=other.boundary,
        saved_tier=other.saved_tier,
        activation_lead=other.activation_lead,
    )
