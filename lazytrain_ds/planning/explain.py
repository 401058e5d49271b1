"""Why a plan is as it is: the step's parts, what hinders each block, what more memory or a faster link would buy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from lazytrain_ds.errors import InfeasibleError, PlanError, format_bytes
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.moves import Aspect, Space
from lazytrain_ds.planning.plan import BlockPlan, Plan
from lazytrain_ds.planning.schema import TIERS, ChannelName, TierName
from lazytrain_ds.planning.simulator import Outcome, Simulator
from lazytrain_ds.planning.solve import solve

__all__ = ["BlockReason", "Explanation", "Objective", "WhatIf", "block_reason", "explain"]

_GB: Final = 10**9
# A block's alternatives, the one without its cost first; the first that differs from the plan is asked about.
_WISHES: Final[tuple[tuple[Aspect, str], ...]] = (
    ("choice", "keep everything"),
    ("saved", "saved tensors on the device"),
    ("boundary", "boundary on the device"),
    ("parameters", "parameters resident"),
    ("optimizer", "states on the device"),
)


@dataclass(frozen=True)
class Objective:
    """The step's parts; they add up to `step_seconds`."""

    step_seconds: float
    compute_seconds: float
    recompute_seconds: float
    device_step_seconds: float
    exposed_seconds: tuple[tuple[ChannelName, float], ...]


@dataclass(frozen=True)
class BlockReason:
    """Equal neighbouring blocks: what was decided, and per wish (a cheaper life) what hinders it."""

    first: int
    last: int
    decision: str
    hindrances: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class WhatIf:
    """Re-solved with one change: the new step, and the seconds it saves (negative within the solver's gap)."""

    change: str
    step_seconds: float
    saved_seconds: float


@dataclass(frozen=True)
class Explanation:
    objective: Objective
    blocks: tuple[BlockReason, ...]
    what_if: tuple[WhatIf, ...]

    def text(self) -> str:
        """A report for people."""
        o = self.objective
        lines = [
            f"step {o.step_seconds:.4g} s = compute {o.compute_seconds:.4g} + recompute {o.recompute_seconds:.4g} "
            f"+ optimizer on the device {o.device_step_seconds:.4g} + waits "
            + ", ".join(f"{channel} {seconds:.4g}" for channel, seconds in o.exposed_seconds)
        ]
        for reason in self.blocks:
            name = f"block {reason.first}" if reason.first == reason.last else f"blocks {reason.first}-{reason.last}"
            lines.append(f"{name}: {reason.decision}")
            lines += [f"    {wish}: {hindrance}" for wish, hindrance in reason.hindrances]
        lines += [
            f"{item.change}: step {item.step_seconds:.4g} s, saves {item.saved_seconds:.4g} s" for item in self.what_if
        ]
        return "\n".join(lines)


def _decision(block: BlockPlan) -> str:
    parameters = "resident" if block.resident else f"{block.parameter_tier}, lead {block.parameter_lead}"
    saved = f", saved tensors in {block.saved_tier}" if block.saved_tier != "device" else ""
    group = block.optimizer
    return (
        f"{block.choice}, boundary {block.boundary}{saved}; parameters {parameters}; "
        f"states {group.precision} in {group.tier}"
    )


def _value(space: Space, name: str, aspect: Aspect) -> object | None:
    """The wished value of an aspect, or None where the plan space does not have it."""
    values = space.values[name, aspect]
    if aspect == "choice":
        return next((value for value in values if space.choices[name][value].kind == "keep"), None)
    if aspect == "parameters":
        return ("device", False) if ("device", False) in values else None
    if aspect == "optimizer":
        return next((value for value in values if value.tier == "device"), None)
    return "device" if "device" in values else None


def _hindrance(before: Outcome, after: Outcome) -> str:
    """Why the change is not part of the plan."""
    if after.shortages:
        return "; ".join(
            f"{tier} would exceed its cap by {format_bytes(need - have)}" for tier, need, have in after.shortages
        )
    change = after.step_seconds - before.step_seconds
    if abs(change) <= 1e-7 * before.step_seconds:
        return "it would fit and change nothing: not the bottleneck"
    if change < 0:
        return f"it would save {-change:.3g} s: within the solver's gap"
    worst = max(after.stalls, key=lambda channel: after.stalls[channel] - before.stalls[channel])
    if after.stalls[worst] > before.stalls[worst]:
        return f"{change:.3g} s slower: compute would wait longer for {worst}"
    return f"{change:.3g} s slower: more compute"


def _hindrances(
    space: Space, simulator: Simulator, plan: Plan, outcome: Outcome, index: int
) -> tuple[tuple[str, str], ...]:
    """(wish, what hinders it) of one block, for every wish that differs from the plan."""
    name = space.instance.order[index]
    found: list[tuple[str, str]] = []
    for aspect, wish in _WISHES:
        value = _value(space, name, aspect)
        if value is None or space.get(plan.blocks[index], aspect) == value:
            continue
        changed = space.moved(plan, [index], aspect, value)
        if changed.blocks != plan.blocks:
            found.append((wish, _hindrance(outcome, simulator.run(changed))))
    return tuple(found)


def _reasons(instance: Instance, plan: Plan, simulator: Simulator, outcome: Outcome) -> tuple[BlockReason, ...]:
    space = Space(instance, plan.micro_batch)
    result: list[BlockReason] = []
    first = 0
    for index in range(1, plan.block_count + 1):
        same = (
            index < plan.block_count
            and plan.blocks[index] == plan.blocks[first]
            and instance.order[index] == instance.order[first]
        )
        if same:
            continue
        hindrances = _hindrances(space, simulator, plan, outcome, first)
        result.append(BlockReason(first, index - 1, _decision(plan.blocks[first]), hindrances))
        first = index
    return tuple(result)


def block_reason(instance: Instance, plan: Plan, block: int) -> BlockReason:
    """Why block `block` is as it is. PlanError if the plan is not in the plan space or has no such block."""
    plan.check(instance)
    if not 0 <= block < plan.block_count:
        raise PlanError(f"there is no block {block}; the plan has blocks 0 to {plan.block_count - 1}")
    simulator = Simulator(instance)
    space = Space(instance, plan.micro_batch)
    hindrances = _hindrances(space, simulator, plan, simulator.run(plan), block)
    return BlockReason(block, block, _decision(plan.blocks[block]), hindrances)


def _more(tier: TierName) -> Callable[[Instance], Instance]:
    def change(instance: Instance) -> Instance:
        tiers = tuple(
            replace(t, capacity_bytes=t.capacity_bytes + _GB) if t.name == tier else t for t in instance.tiers
        )
        return replace(instance, tiers=tiers)

    return change


def _faster(instance: Instance) -> Instance:
    channels = tuple(
        replace(c, bytes_per_second=1.1 * c.bytes_per_second) if c.name in ("h2d", "d2h") else c
        for c in instance.channels
    )
    return replace(instance, channels=channels)


def explain(
    instance: Instance, plan: Plan, *, what_if: bool = True, time_limit_seconds: float | None = None
) -> Explanation:
    """Explain `plan`. `what_if` solves the instance again once per tier in use and once for a faster link.

    Raises PlanError if the plan is not in the plan space of `instance`.
    """
    plan.check(instance)
    simulator = Simulator(instance)
    outcome = simulator.run(plan)
    program = outcome.program
    objective = Objective(
        step_seconds=outcome.step_seconds,
        compute_seconds=program.step_compute_seconds,
        recompute_seconds=program.step_recompute_seconds,
        device_step_seconds=program.device_step_seconds,
        exposed_seconds=tuple((channel, seconds) for channel, seconds in outcome.stalls.items()),  # type: ignore[misc]
    )
    answers: list[WhatIf] = []
    if what_if:
        questions: list[tuple[str, Callable[[Instance], Instance]]] = [
            (f"1 GB more {tier} memory" if tier != "nvme" else "1 GB more NVMe space", _more(tier))
            for tier in TIERS
            if instance.tier(tier).capacity_bytes > 0
        ]
        questions.append(("a 10 % faster link", _faster))
        for label, change in questions:
            try:
                other = solve(change(instance), time_limit_seconds=time_limit_seconds)
            except InfeasibleError:
                continue
            assert other.prediction is not None
            # The old plan fits the larger instance as well: never report a loss that only the search made.
            seconds = min(other.prediction.step_seconds, Simulator(change(instance)).run(plan).step_seconds)
            answers.append(WhatIf(label, seconds, outcome.step_seconds - seconds))
    return Explanation(objective, _reasons(instance, plan, simulator, outcome), tuple(answers))
