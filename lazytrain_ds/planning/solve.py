"""`solve(instance) -> Plan`: rules, the MILP and local search are planners of one type; the simulator decides.

Deterministic: limits are counts of simulated visits and solver nodes, never the clock. `time_limit_seconds` is turned
into such counts by a fixed rate, so the same instance gives the same plan on a loaded machine too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from lazytrain_ds.errors import InfeasibleError, PlanError, format_bytes
from lazytrain_ds.planning.auto import Found, plan_auto
from lazytrain_ds.planning.bounds import lower_bound
from lazytrain_ds.planning.infeasible import diagnose
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.moves import Freedom, Space, activations_of
from lazytrain_ds.planning.paper_plan import paper_plan
from lazytrain_ds.planning.plan import BlockPlan, Plan
from lazytrain_ds.planning.rules import RULES, apply, best_rule
from lazytrain_ds.planning.schema import digest
from lazytrain_ds.planning.simulator import Outcome, Simulator, predict

__all__ = ["KINDS", "activation_ladder", "solve"]

KINDS: Final = ("auto", "paper", *RULES)

# Simulated block visits a second of planning is taken to be worth: a fixed rate, whatever this machine does.
_VISITS_PER_SECOND: Final = 100_000
_DEFAULT_SECONDS: Final = 3.0


@contextmanager
def _no_collector() -> Iterator[None]:
    """Planning makes and drops many small acyclic objects; the cycle collector would triple its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _budget(instance: Instance, time_limit_seconds: float | None) -> int:
    """Simulated visits allowed; at least sixty simulations (three micro-steps each)."""
    seconds = _DEFAULT_SECONDS if time_limit_seconds is None else time_limit_seconds
    return max(60 * 6 * instance.block_count, int(seconds * _VISITS_PER_SECOND))


def solve(
    instance: Instance,
    *,
    placement: Plan | None = None,
    time_limit_seconds: float | None = None,
    gap: float = 0.01,
    kind: str = "auto",
    solver: str = "auto",
) -> Plan:
    """The best plan found for `instance`, with its prediction (times, peaks, lower bound, best rule).

    `placement`: take every block's parameters and optimizer, micro-batch, rounds and step mode from this plan and
    decide activations and prefetch leads only. `kind`: "auto" (everything), "paper" (the published activation program)
    or a rule's name. `gap`: stop looking once the plan is this close to its bound. `solver`: "auto", "highs" or "scip".
    Raises InfeasibleError with the shortages when nothing fits, PlanError for a kind or placement outside the space.
    """
    with _no_collector():
        try:
            return _solve(instance, placement, time_limit_seconds, gap, kind, solver)
        except InfeasibleError as error:
            if kind != "auto" or placement is not None:
                raise
            raise InfeasibleError(diagnose(instance).text(), error.shortages) from error


def _solve(
    instance: Instance, placement: Plan | None, time_limit_seconds: float | None, gap: float, kind: str, solver: str
) -> Plan:
    if kind not in KINDS:
        raise PlanError(f"unknown planner kind {kind!r}; there are {', '.join(KINDS)}")
    simulator = Simulator(instance)
    if placement is not None:
        placement = _checked_placement(instance, placement)
        instance = replace(instance, micro_batches=(placement.micro_batch,))
    rule_name, _, rule_outcome = best_rule(instance, simulator)
    budget = _budget(instance, time_limit_seconds)
    bound, status = 0.0, kind
    if kind in RULES:
        plan, outcome = apply(kind, instance, simulator)
        if placement is not None:
            plan, outcome = _graft(simulator, placement, plan)
    elif kind == "paper":
        plan, outcome = paper_plan(instance, simulator, solver)
        if placement is not None:
            plan, outcome = _graft(simulator, placement, plan)
    else:
        found = _auto(instance, simulator, placement, budget, gap, solver)
        plan, outcome, status = found.plan, found.outcome, found.status
        bound = found.bound_seconds
    if not outcome.fits:
        short = "; ".join(
            f"{tier}: needs {format_bytes(need)}, has {format_bytes(have)} ({format_bytes(need - have)} short)"
            for tier, need, have in outcome.shortages
        )
        raise InfeasibleError(
            f"no plan of kind {kind!r} fits at micro-batch {plan.micro_batch}: {short}; raise that cap, take a smaller "
            "micro-batch or sequence, or let the planner decide more",
            outcome.shortages,
        )
    if not bound:
        bound = lower_bound(instance, simulator)
    prediction = predict(instance, plan, simulator=simulator, lower_bound_seconds=min(bound, outcome.step_seconds))
    prediction = replace(prediction, solver_status=status)
    if rule_outcome.fits:
        prediction = replace(prediction, best_rule=rule_name, best_rule_seconds=rule_outcome.step_seconds)
    return replace(plan, prediction=prediction, instance=digest(simulator.instance))


def _checked_placement(instance: Instance, placement: Plan) -> Plan:
    if placement.block_count != instance.block_count:
        raise PlanError(f"placement has {placement.block_count} blocks, the model has {instance.block_count}")
    if placement.micro_batch not in instance.micro_batches:
        raise PlanError(f"placement has micro-batch {placement.micro_batch}, not one of {instance.micro_batches}")
    return replace(placement, prediction=None)


def _graft(simulator: Simulator, placement: Plan, activations: Plan) -> tuple[Plan, Outcome]:
    """The placement with the activation decisions of another plan of the same micro-batch."""
    blocks: list[BlockPlan] = [
        activations_of(mine, other) for mine, other in zip(placement.blocks, activations.blocks, strict=True)
    ]
    blocks = Space(simulator.instance, placement.micro_batch).normalize(blocks)
    plan = replace(placement, blocks=tuple(blocks), origin=activations.origin)
    return plan, simulator.run(plan)


def _auto(
    instance: Instance, simulator: Simulator, placement: Plan | None, budget: int, gap: float, solver: str
) -> Found:
    seeds: list[tuple[Plan, Outcome]] = []
    for name in RULES:
        try:
            plan, outcome = apply(name, instance, simulator)
        except PlanError:
            continue
        seeds.append(_graft(simulator, placement, plan) if placement is not None else (plan, outcome))
    if placement is not None:  # with its own activations: what is found is no worse
        seeds.append((replace(placement, origin="placement"), simulator.run(placement)))
    if not seeds:
        raise PlanError("no rule is allowed for this instance; widen `allowed`")
    freedom = Freedom(placement=placement is None)
    found = plan_auto(
        instance,
        simulator,
        seeds,
        freedom=freedom,
        placement=placement,
        budget=budget,
        gap=gap,
        solver=solver,
    )
    found.plan = replace(found.plan, origin="auto")
    return found


def activation_ladder(instance: Instance, plan: Plan, n: int) -> tuple[Plan, ...]:
    """Up to `n` plans with the placement of `plan` and ever less device memory, for when a real run needs more.

    The first one needs less than `plan`; the last one about the least any found plan needs. Predictions are filled.
    """
    simulator = Simulator(instance)
    current = simulator.run(plan)
    least = min(
        (_graft(simulator, plan, build)[1].peaks["device"] for build in _lean(instance, plan)),
        default=current.peaks["device"],
    )
    device = instance.tier("device")
    rungs: list[Plan] = []
    highest = current.peaks["device"]
    extra = max(phase.device_bytes for phase in (instance.phase("step"), *instance.phases))
    for step in range(1, n + 1):
        cap = highest - (highest - least) * step // n
        tiers = tuple(
            replace(tier, capacity_bytes=cap + extra + device.margin_bytes) if tier.name == "device" else tier
            for tier in instance.tiers
        )
        try:
            rung = solve(replace(instance, tiers=tiers), placement=plan, time_limit_seconds=0.5)
        except InfeasibleError:
            break
        peak = rung.prediction.peak_bytes("device") if rung.prediction else 0
        before = rungs[-1].prediction.peak_bytes("device") if rungs and rungs[-1].prediction else highest + extra
        if peak < before:
            rungs.append(replace(rung, origin=f"ladder {len(rungs) + 1}", instance=digest(instance)))
    return tuple(rungs)


def _lean(instance: Instance, plan: Plan) -> list[Plan]:
    """Rule plans at the micro-batch of `plan`, whose activations need little of the device."""
    single = replace(instance, micro_batches=(plan.micro_batch,))
    result = []
    for name in ("checkpoint_all_host", "checkpoint_all", "megatrain"):
        try:
            result.append(apply(name, single)[0])
        except PlanError:
            continue
    return result
