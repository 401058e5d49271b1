"""Fixed rules: planners of one line each, in the same space as the solver's plans, and its baselines.

All use one step ahead prefetch and put parameters and optimizer states as near the host as they fit: both in host
memory; states on NVMe; both on NVMe; and, where the host is out of bounds, on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lazytrain_ds.errors import PlanError
from lazytrain_ds.planning.instance import BlockCosts, Instance, StepMode
from lazytrain_ds.planning.plan import BlockPlan, BoundaryHome, Plan, SubGroupPlan
from lazytrain_ds.planning.schema import TIERS, Precision, TierName
from lazytrain_ds.planning.simulator import Outcome, Simulator

__all__ = [
    "RULES",
    "best_rule",
    "build",
    "checkpoint_all",
    "checkpoint_all_host",
    "keep_all",
    "megatrain",
    "placements",
    "sub_group",
    "zero3_offload",
]

# (choice kind, boundary home, segment length, step mode)
_RECIPES: Final[dict[str, tuple[str, BoundaryHome, int, StepMode]]] = {
    "keep_all": ("keep", "device", 1, "hidden"),
    "checkpoint_all": ("boundary", "device", 1, "hidden"),
    "checkpoint_all_host": ("boundary", "host", 1, "hidden"),
    "megatrain": ("boundary", "device", 4, "serial"),
    "zero3_offload": ("boundary", "device", 1, "serial"),
}


def sub_group(instance: Instance, tier: TierName, precision: Precision | None = None) -> SubGroupPlan | None:
    """The sub-group plan for states in `tier` (fp32 where the numerics have it), or None where they exclude it."""
    device = "device" if tier == "device" else "host"
    for wanted in (precision,) if precision else ("fp32", "8bit"):
        if instance.optimizer_mode(device, wanted) is not None:  # type: ignore[arg-type]
            return SubGroupPlan(tier, wanted, device)  # type: ignore[arg-type]
    return None


def placements(instance: Instance) -> list[tuple[TierName, SubGroupPlan]]:
    """(parameter tier, sub-group) pairs a rule may use, the preferred one first."""
    allowed = instance.allowed
    trainable = any(block_class.trainable_count for block_class in instance.classes)
    pairs: list[tuple[TierName, TierName]] = [
        ("host", "host"),
        ("host", "nvme"),
        ("nvme", "nvme"),
        ("nvme", "host"),
        ("device", "host"),
        ("device", "nvme"),
        ("device", "device"),
        ("host", "device"),
        ("nvme", "device"),
    ]
    result = []
    present = [tier for tier in TIERS if instance.tier(tier).usable_bytes > 0]
    # Absent tiers come last: only where the user's keys leave nothing else, to say how much is missing.
    pairs.sort(key=lambda pair: sum(tier not in present for tier in pair))
    for parameters, states in pairs:
        group = sub_group(instance, states)
        if parameters not in allowed.parameter_tiers:
            continue
        if not trainable and group is None:
            group = SubGroupPlan()
        if group is not None and (states in allowed.optimizer_tiers or not trainable):
            result.append((parameters, group))
    if not result:
        raise PlanError(
            f"no optimizer mode fits the allowed tiers: modes {instance.optimizer_modes}, parameters "
            f"{allowed.parameter_tiers}, optimizer states {allowed.optimizer_tiers}; allow another tier"
        )
    return result


def choice_name(instance: Instance, costs: BlockCosts, kind: str) -> str:
    """The menu entry of `kind`, or the allowed one that is nearest to it (a one-entry menu has no alternative)."""
    menu = costs.menu
    usable = [choice for choice in menu if choice.kind in instance.allowed.choice_kinds] or [menu[0]]
    for choice in usable:
        if choice.kind == kind:
            return choice.name
    return usable[-1 if kind == "boundary" else 0].name


def build(
    name: str,
    instance: Instance,
    micro_batch: int,
    parameter_tier: TierName,
    group: SubGroupPlan,
) -> Plan:
    """The rule `name` with a given placement. Raises PlanError where `allowed` excludes what the rule is about."""
    if name not in _RECIPES:
        raise PlanError(f"unknown rule {name!r}; there are {', '.join(_RECIPES)}")
    kind, home, length, step = _RECIPES[name]
    allowed = instance.allowed
    if length > 1 and not allowed.drop_boundaries:
        raise PlanError(f"rule {name!r} drops boundaries, which this instance does not allow")
    length = min(length, allowed.longest_segment)
    tiers = allowed.boundary_tiers
    boundary: BoundaryHome = home if home in tiers else tiers[0]
    blocks: list[BlockPlan] = []
    run = 0
    for index in range(instance.block_count):
        costs = instance.costs(index, micro_batch)
        chosen = choice_name(instance, costs, kind)
        choice = costs.choice(chosen)
        recomputed = choice.kind == "boundary"
        run = run + 1 if recomputed else 0
        dropped = recomputed and run > 1 and (run - 1) % length != 0
        saved: TierName = "device"
        if choice.offloadable_bytes and "device" not in allowed.saved_tiers:
            saved = allowed.saved_tiers[0]
        blocks.append(
            BlockPlan(
                choice=chosen,
                boundary="dropped" if dropped else boundary if choice.needs_input else "device",
                saved_tier=saved,
                parameter_tier=parameter_tier,
                parameter_lead=min(1, allowed.longest_lead),
                activation_lead=min(1, allowed.longest_lead),
                optimizer=group,
            )
        )
    mode = step if step in allowed.step_modes else allowed.step_modes[0]
    return Plan(tuple(blocks), micro_batch, instance.rounds(micro_batch), mode, origin=name)


def _better(left: Outcome, right: Outcome) -> bool:
    return (left.excess, left.step_seconds) < (right.excess, right.step_seconds)


def apply(name: str, instance: Instance, simulator: Simulator | None = None) -> tuple[Plan, Outcome]:
    """The rule's plan and outcome: per micro-batch the first placement that fits; of those the fastest.

    Where nothing fits, the plan that exceeds the caps least. Raises PlanError where the rule is not allowed.
    """
    simulator = simulator or Simulator(instance)
    best: tuple[Plan, Outcome] | None = None
    for micro_batch in instance.micro_batches:
        for parameter_tier, group in placements(instance):
            plan = build(name, instance, micro_batch, parameter_tier, group)
            outcome = simulator.run(plan)
            if best is None or _better(outcome, best[1]):
                best = plan, outcome
            if outcome.fits:
                break
    assert best is not None
    return best


def keep_all(instance: Instance) -> Plan:
    """Every saved tensor stays on the device: 6N FLOPs per token, no recomputation."""
    return apply("keep_all", instance)[0]


def checkpoint_all(instance: Instance) -> Plan:
    """Every block keeps its boundary on the device and recomputes the rest: 8N."""
    return apply("checkpoint_all", instance)[0]


def checkpoint_all_host(instance: Instance) -> Plan:
    """Every block keeps its boundary in host memory and recomputes the rest: 8N."""
    return apply("checkpoint_all_host", instance)[0]


def megatrain(instance: Instance) -> Plan:
    """Segments of four blocks, boundaries on the device, serial optimizer step: 9.5N."""
    return apply("megatrain", instance)[0]


def zero3_offload(instance: Instance) -> Plan:
    """What ZeRO-3 with offload and activation checkpointing does: checkpoint_all with a serial step."""
    return apply("zero3_offload", instance)[0]


RULES: Final[dict[str, Callable[[Instance], Plan]]] = {
    "keep_all": keep_all,
    "checkpoint_all": checkpoint_all,
    "checkpoint_all_host": checkpoint_all_host,
    "megatrain": megatrain,
    "zero3_offload": zero3_offload,
}


def best_rule(instance: Instance, simulator: Simulator | None = None) -> tuple[str, Plan, Outcome]:
    """(name, plan, outcome) of the fastest rule that fits, or of the one that exceeds the caps least."""
    simulator = simulator or Simulator(instance)
    best: tuple[str, Plan, Outcome] | None = None
    for name in RULES:
        try:
            plan, outcome = apply(name, instance, simulator)
        except PlanError:
            continue  # this rule is not in the allowed plan space
        if best is None or _better(outcome, best[2]):
            best = name, plan, outcome
    if best is None:
        raise PlanError("no rule is allowed for this instance; widen `allowed`")
    return best
