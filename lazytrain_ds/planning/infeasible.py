"""When nothing fits: which cap is short, by how much, and what would change it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from lazytrain_ds.errors import PlanError, format_bytes, format_bytes_up
from lazytrain_ds.planning.arrange import arrange
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.milp import CountModel
from lazytrain_ds.planning.moves import Freedom, with_lead
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.relaxation import Relaxation
from lazytrain_ds.planning.rules import RULES, apply
from lazytrain_ds.planning.schema import TIERS, TierName
from lazytrain_ds.planning.search import Search
from lazytrain_ds.planning.simulator import Outcome, Simulator

__all__ = ["CapReport", "Diagnosis", "diagnose", "leanest"]

_BUDGET: Final = 150


@dataclass(frozen=True)
class CapReport:
    """One tier. `need_bytes`: the smallest capacity (margin included) at which a plan was found with the other caps as
    they are; None where no capacity of this tier helps. `proven_bytes`: no plan fits below it (None: never fits).
    `margin_bytes`: what is left free of `have_bytes`; `need_bytes` has the same margin."""

    tier: TierName
    have_bytes: int
    need_bytes: int | None
    proven_bytes: int | None
    margin_bytes: int = 0

    def advice(self, usable_bytes: int) -> str:
        """`usable_bytes` as a capacity to ask for: margins are a share of it, so a larger one loses more to them."""
        if self.margin_bytes < self.have_bytes:
            capacity = math.ceil(usable_bytes / (1 - self.margin_bytes / self.have_bytes))
        else:
            capacity = usable_bytes + self.margin_bytes
        return f"{self.tier} {format_bytes_up(capacity)} instead of {format_bytes(self.have_bytes)}"


@dataclass(frozen=True)
class Diagnosis:
    """`shortages`: (tier, need, have) of the nearest plan. `largest_micro_batch`: None where none fits.

    `written_bytes`: (need, have) of the nearest plan's writes to NVMe per step where they are over the write budget,
    which is one of the `shortages` then.
    """

    shortages: tuple[tuple[TierName, int, int], ...]
    caps: tuple[CapReport, ...]
    largest_micro_batch: int | None
    nearest: Plan
    written_bytes: tuple[int, int] | None = None

    def text(self) -> str:
        """What is short, by how much, and what to do, in one paragraph."""
        capacities = [item for item in self.shortages if item[1:] != self.written_bytes]
        lines = [
            f"{tier}: needs {format_bytes(need)}, has {format_bytes(have)} ({format_bytes(need - have)} short)"
            for tier, need, have in capacities
        ]
        if self.written_bytes is not None:
            need, have = map(format_bytes, self.written_bytes)
            lines.append(f"nvme_write_budget: {need} are written in a step, and the budget is {have}")
        short = "; ".join(lines)
        helps = [
            report.advice(report.need_bytes - report.margin_bytes)
            for report in self.caps
            if report.need_bytes is not None and report.need_bytes > report.have_bytes
        ]
        parts = [f"no plan fits; the nearest (micro-batch {self.nearest.micro_batch}) is short of {short}"]
        if helps:
            parts.append("one larger cap is enough, the others as they are: " + " or ".join(helps))
        else:
            reports = {report.tier: report for report in self.caps}
            together = [reports[tier].advice(need) for tier, need, _ in capacities if tier in reports]
            parts.append("no single larger cap is enough" + (": " if together else "") + " and ".join(together))
        if self.largest_micro_batch is not None:
            parts.append(f"the largest micro-batch that fits is {self.largest_micro_batch}")
        elif len(self.nearest.blocks):
            parts.append("no micro-batch on the list fits")
        return "; ".join(parts)


def _key(outcome: Outcome) -> tuple[int, float]:
    return outcome.excess, outcome.step_seconds


def leanest(instance: Instance, elastic: tuple[TierName, ...] = TIERS, budget: int = _BUDGET) -> tuple[Plan, Outcome]:
    """The plan that exceeds the caps least, from rules and the count model with `elastic` tiers; any micro-batch."""
    simulator = Simulator(instance)
    pool: list[tuple[Plan, Outcome]] = []
    for micro_batch in instance.micro_batches:
        single = replace(instance, micro_batches=(micro_batch,))
        for name in RULES:
            try:
                pool.append(apply(name, single, simulator))
            except PlanError:
                continue
    if not pool:
        raise PlanError("no rule is allowed for this instance; widen `allowed`")
    pool.sort(key=lambda item: _key(item[1]))
    base = pool[0][0]
    relaxation = Relaxation(instance, simulator.costs(base.micro_batch), base.optimizer_step)
    solution = CountModel(relaxation, elastic=elastic).solve()
    if solution.counts is not None:
        for lead in sorted({0, min(1, instance.allowed.longest_lead)}):
            lean = with_lead(with_lead(base, "parameter_lead", lead), "activation_lead", lead)
            pool.extend((plan, simulator.run(plan)) for _, plan in arrange(relaxation, solution.counts, lean))
    pool.sort(key=lambda item: _key(item[1]))
    best = pool[0]
    for plan, _ in pool[:2]:
        if best[1].fits:
            break
        search = Search(simulator, plan.micro_batch, Freedom(), budget * 6 * instance.block_count)
        found = search.improve(plan, good=float("inf"))
        if _key(found[1]) < _key(best[1]):
            best = found
    return best


def _with_capacity(instance: Instance, tier: TierName, capacity_bytes: int) -> Instance:
    tiers = tuple(replace(t, capacity_bytes=capacity_bytes) if t.name == tier else t for t in instance.tiers)
    return replace(instance, tiers=tiers)


def _proven(instance: Instance, tier: TierName) -> int | None:
    """Usable bytes of `tier` below which the count model alone excludes every plan."""
    simulator = Simulator(instance)
    least: float | None = None
    for micro_batch in instance.micro_batches:
        for mode in instance.allowed.step_modes:
            relaxation = Relaxation(instance, simulator.costs(micro_batch), mode)
            solution = CountModel(relaxation, relaxed=True, elastic=(tier,)).solve()
            if solution.counts is not None:
                need = instance.tier(tier).usable_bytes + solution.short_bytes[tier]
                least = need if least is None else min(least, need)
    return None if least is None else int(least)


def _cap_report(instance: Instance, tier: TierName, budget: int) -> CapReport:
    """Smallest capacity found: the plan space with this tier's cap at 0 minimizes what it needs there."""
    have = instance.tier(tier)
    proven = _proven(instance, tier)
    if proven is None:
        return CapReport(tier, have.capacity_bytes, None, None, have.margin_bytes)
    proven_capacity = proven + have.margin_bytes
    squeezed = _with_capacity(instance, tier, have.margin_bytes + 1)
    _, outcome = leanest(squeezed, (tier,), budget)
    others = [name for name, _, _ in outcome.shortages if name != tier]
    if others:
        # The search traded this tier against another one; ask again with this tier wide open.
        wide = _with_capacity(instance, tier, 2**62)
        _, outcome = leanest(wide, TIERS, budget)
        if outcome.shortages:
            return CapReport(tier, have.capacity_bytes, None, proven_capacity, have.margin_bytes)
    needs = Simulator(instance).phase_needs(outcome.program, outcome.peaks)[tier]
    need = max(needs.values()) + have.margin_bytes
    return CapReport(tier, have.capacity_bytes, need, proven_capacity, have.margin_bytes)


def diagnose(instance: Instance, *, budget: int = _BUDGET) -> Diagnosis:
    """Why `instance` is infeasible (for a feasible one: shortages are empty and caps say how small they may be)."""
    nearest, outcome = leanest(instance, budget=budget)
    caps = tuple(_cap_report(instance, tier, budget) for tier in TIERS if instance.tier(tier).capacity_bytes > 0)
    largest = None
    for micro_batch in sorted(instance.micro_batches, reverse=True):
        _, found = leanest(replace(instance, micro_batches=(micro_batch,)), budget=budget)
        if found.fits:
            largest = micro_batch
            break
    budget_bytes = instance.nvme_write_budget_bytes_per_step
    written = outcome.nvme_written_bytes
    over = budget_bytes is not None and written > budget_bytes
    return Diagnosis(outcome.shortages, caps, largest, nearest, (written, budget_bytes or 0) if over else None)
