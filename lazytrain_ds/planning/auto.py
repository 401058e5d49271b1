"""`kind="auto"`: the count model's solutions, arranged, and rules, improved by local search; the simulator chooses.

For every micro-batch and step mode the model's linear relaxation gives a bound; the promising ones get the integer
program, solved again with memory held back until its plans fit the simulator, for a short and a long prefetch lead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from lazytrain_ds.planning.arrange import arrange
from lazytrain_ds.planning.instance import Instance, StepMode
from lazytrain_ds.planning.milp import CountModel
from lazytrain_ds.planning.moves import Freedom
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.relaxation import Key, Relaxation
from lazytrain_ds.planning.search import Search, better, with_lead
from lazytrain_ds.planning.simulator import Outcome, Simulator

__all__ = ["Candidate", "Found", "plan_auto"]

# The model is solved again at most this often to make room for what it cannot see (slots, prefetches, tails).
_RESERVATIONS: Final = 4
_MODEL_GAP: Final = 1e-3


@dataclass
class Candidate:
    """One micro-batch and step mode with its proven bound."""

    micro_batch: int
    mode: StepMode
    relaxation: Relaxation
    bound_seconds: float


@dataclass
class Found:
    """The best plan so far, what bounds every plan, and how it was reached."""

    plan: Plan
    outcome: Outcome
    bound_seconds: float
    status: str

    def offer(self, plan: Plan, outcome: Outcome, status: str) -> bool:
        """Take the plan if it is better."""
        if not better(outcome, self.outcome):
            return False
        self.plan, self.outcome, self.status = plan, outcome, status
        return True

    @property
    def gap(self) -> float:
        return self.outcome.step_seconds / self.bound_seconds - 1 if self.bound_seconds > 0 else float("inf")


def candidates(instance: Instance, simulator: Simulator, freedom: Freedom, placement: Plan | None) -> list[Candidate]:
    """All (micro-batch, step mode) pairs that may fit, the most promising first; their least bound holds for all."""
    result = []
    for micro_batch in instance.micro_batches:
        for mode in instance.allowed.step_modes:
            if placement is not None and placement.optimizer_step != mode:
                continue
            relaxation = Relaxation(instance, simulator.costs(micro_batch), mode)
            if placement is not None:
                relaxation.fix_placement(placement)
            solution = CountModel(relaxation, relaxed=True).solve()
            if solution.counts is not None:
                result.append(Candidate(micro_batch, mode, relaxation, solution.bound_seconds))
    result.sort(key=lambda candidate: candidate.bound_seconds)
    return result


def plan_auto(
    instance: Instance,
    simulator: Simulator,
    seeds: list[tuple[Plan, Outcome]],
    *,
    freedom: Freedom,
    placement: Plan | None,
    budget: int,
    gap: float,
    solver: str,
) -> Found:
    """The best plan found; `seeds` (rule plans) must not be empty. `Found.outcome` tells whether it fits."""
    seeds = sorted(seeds, key=lambda seed: (seed[1].excess, seed[1].step_seconds))
    options = candidates(instance, simulator, freedom, placement)
    bound = options[0].bound_seconds if options else 0.0
    found = Found(*seeds[0], bound, f"rule {seeds[0][0].origin}")
    spent = 0
    for rank, candidate in enumerate(options[:3]):
        if found.outcome.fits and candidate.bound_seconds >= found.outcome.step_seconds * (1 - gap / 2):
            break
        base = next((plan for plan, _ in seeds if plan.micro_batch == candidate.micro_batch), None)
        base = base or replace(
            seeds[0][0], micro_batch=candidate.micro_batch, rounds=instance.rounds(candidate.micro_batch)
        )
        share = budget // 2 if rank == 0 else budget // 4
        search = Search(simulator, candidate.micro_batch, freedom, share)
        starts = _starts(candidate, placement or base, search, solver)
        for plan, outcome in starts[:2]:
            plan, outcome = search.improve(plan, good=bound * (1 + gap / 4))
            found.offer(plan, outcome, "count model, arranged and improved")
            if outcome.fits and found.gap <= gap / 4:
                return found
        spent += share - search.left
    if not options or not found.outcome.fits:
        for plan, _ in seeds[:2]:
            search = Search(simulator, plan.micro_batch, freedom, (budget - spent) // 2)
            found.offer(*search.improve(plan), "rule, improved")
    return found


def _starts(candidate: Candidate, base: Plan, search: Search, solver: str) -> list[tuple[Plan, Outcome]]:
    """Arranged solutions of the count model, the best first: feasible ones by time, then by excess."""
    allowed = search.simulator.instance.allowed
    pool: list[tuple[Plan, Outcome]] = []
    for lead in sorted({min(lead, allowed.longest_lead) for lead in (1, 2, 4)}, reverse=True):
        model = CountModel(candidate.relaxation)
        reserve = {"device": 0.0, "host": 0.0, "nvme": 0.0}
        lead_base = with_lead(with_lead(base, "parameter_lead", lead), "activation_lead", lead)
        seen: set[tuple[tuple[Key, float], ...]] = set()
        for _ in range(_RESERVATIONS):
            solution = model.solve(solver=solver, gap=_MODEL_GAP)
            if solution.counts is None:
                break
            key = tuple(sorted(solution.counts.items()))
            if key in seen:
                break
            seen.add(key)
            best: tuple[Plan, Outcome] | None = None
            for plan in arrange(candidate.relaxation, solution.counts, lead_base):
                outcome = search.evaluate(plan)
                if outcome is None:
                    break
                pool.append((plan, outcome))
                if best is None or better(outcome, best[1]):
                    best = plan, outcome
            if best is None or best[1].fits:
                break
            for tier, need, have in best[1].shortages:
                reserve[tier] += (need - have) * 1.05
                model.reserve(tier, reserve[tier])
    pool.sort(key=lambda item: (item[1].excess, item[1].step_seconds))
    return pool
