"""`kind="auto"`: the count model's solutions, arranged, and rules, improved by local search; the simulator chooses.

For every micro-batch and step mode the model's linear relaxation gives a bound; the promising ones get the integer
program, solved again with memory held back until its plans fit the simulator, for a short and a long prefetch lead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from lazytrain_ds.planning.arrange import ORDERS, Order, arrange
from lazytrain_ds.planning.counts import Key
from lazytrain_ds.planning.instance import Instance, StepMode
from lazytrain_ds.planning.milp import CountModel
from lazytrain_ds.planning.moves import Freedom, with_lead
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.positions import PositionModel
from lazytrain_ds.planning.relaxation import Relaxation
from lazytrain_ds.planning.schema import TierName
from lazytrain_ds.planning.search import Search, better
from lazytrain_ds.planning.simulator import Outcome, Simulator

__all__ = ["Candidate", "Found", "plan_auto"]

# The model is solved again at most this often to make room for what it cannot see (slots, prefetches, tails).
_RESERVATIONS: Final = 6
_MODEL_GAP: Final = 5e-3
_MODEL_NODES: Final = 50
# The integer program solved for its bound.
_BOUND_GAP: Final = 5e-4
_BOUND_NODES: Final = 200


@dataclass
class Candidate:
    """One micro-batch and step mode with its proven bound, which better relaxations raise."""

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
        own = [seed for seed in seeds if seed[0].micro_batch == candidate.micro_batch]
        base = own[0][0] if own else _resized(instance, seeds[0][0], candidate.micro_batch)
        share = budget // 2 if rank == 0 else budget // 4
        search = Search(simulator, candidate.micro_batch, freedom, share)
        whole = CountModel(candidate.relaxation).solve(solver=solver, gap=_BOUND_GAP, node_limit=_BOUND_NODES)
        candidate.bound_seconds = max(candidate.bound_seconds, whole.bound_seconds)
        found.bound_seconds = _least(options)
        good = found.bound_seconds * (1 + gap / 2)
        if found.outcome.fits and candidate.bound_seconds >= found.outcome.step_seconds * (1 - gap / 2):
            continue
        limit = found.outcome.step_seconds if found.outcome.fits else float("inf")
        starts = _Starts(candidate, placement or base, search, solver, limit).collect(good, thorough=rank == 0)
        chosen = _different([*starts, *own[:1]])
        for plan, outcome in _improvements(search, chosen, good):
            found.offer(plan, outcome, "count model, arranged and improved")
            if outcome.fits and outcome.step_seconds <= good:
                return found
        spent += share - search.left
    if not options or not found.outcome.fits:
        for plan, _ in seeds[:2]:
            search = Search(simulator, plan.micro_batch, freedom, (budget - spent) // 2)
            found.offer(*search.improve(plan), "rule, improved")
    elif found.gap > gap / 2 and spent < budget:
        search = Search(simulator, found.plan.micro_batch, freedom, budget - spent)
        found.offer(*search.explore(found.plan, found.bound_seconds * (1 + gap / 2)), found.status)
    _raise_bound(found, options, gap)
    return found


def _improvements(search: Search, starts: list[tuple[Plan, Outcome]], good: float) -> Iterator[tuple[Plan, Outcome]]:
    """Every start improved with its part of half the simulations left; the one that did best with the others too."""
    part = search.left // (2 * len(starts)) if len(starts) > 1 else search.left
    improved: list[tuple[Plan, Outcome]] = []
    for plan, _ in starts:
        improved.append(search.improve(plan, good, part))
        yield improved[-1]
    if search.left > 0:
        yield search.explore(min(improved, key=_merit)[0], good)


def _least(options: list[Candidate]) -> float:
    return min(candidate.bound_seconds for candidate in options)


def _raise_bound(found: Found, options: list[Candidate], gap: float) -> None:
    """Ask the model with positions about the candidates that hold the bound down, until the plan is near enough."""
    asked: set[int] = set()
    while options and found.outcome.fits and found.gap > gap:
        index = min(range(len(options)), key=lambda i: options[i].bound_seconds)
        if index in asked:
            break
        asked.add(index)
        solution = PositionModel(options[index].relaxation).solve()
        options[index].bound_seconds = max(options[index].bound_seconds, solution.bound_seconds)
        found.bound_seconds = _least(options)


def _resized(instance: Instance, plan: Plan, micro_batch: int) -> Plan:
    return replace(plan, micro_batch=micro_batch, rounds=instance.rounds(micro_batch))


# Prefetch leads, and shares of the channels' rates that the model may count on: it knows volumes, not moments.
_LEADS: Final = (4, 2, 1, 0)
_RATES: Final = (1.0, 0.92, 0.85)
# Leads that are tried again at a lower rate.
_TRIED_AGAIN: Final = 2
# Leads for which the ends are planned in whole numbers.
_LEADS_OF_ENDS: Final = 3
# Starts that are improved.
_IMPROVED: Final = 4
# Which decisions a start's model takes in whole numbers: those of single blocks at the ends, or all.
Whole = Literal["none", "ends", "all"]


class _Starts:
    """Arranged solutions of one candidate's count model; counts whose plans all take `limit` seconds are left out."""

    def __init__(self, candidate: Candidate, base: Plan, search: Search, solver: str, limit: float) -> None:
        self._relaxation = candidate.relaxation
        self._base = base
        self._search = search
        self._solver = solver
        self._limit = limit
        self.pool: list[tuple[Plan, Outcome]] = []
        self._relaxations: dict[int, Relaxation] = {}
        self._tried: set[tuple[int, tuple[tuple[Key, float], ...]]] = set()

    def collect(self, good: float, *, thorough: bool) -> list[tuple[Plan, Outcome]]:
        """The best first: feasible ones by time, then by excess; stops at one that takes at most `good` seconds."""
        rates = _RATES if thorough else _RATES[::2]
        longest = self._search.simulator.instance.allowed.longest_lead
        leads = list(dict.fromkeys(min(lead, longest) for lead in _LEADS))
        done: list[tuple[int, float, int]] = []
        for rate in rates:
            for lead in leads:
                self._note(done, lead, self._with_lead(lead, rate))
                if self._reached(good):
                    break
            # With less than the whole rate only the longest lead and those that did best are tried.
            best = [lead for *_, lead in sorted(done)]
            leads = list(dict.fromkeys([*leads[:1], *best]))[:_TRIED_AGAIN]
            if self._reached(good):
                break
        # Half an embedding in the model is a whole one too much in a plan: the ends in whole numbers, then all.
        best = list(dict.fromkeys([longest, *(lead for *_, lead in sorted(done))]))
        for rate in rates:
            for lead in best[: _LEADS_OF_ENDS if thorough and rate == 1.0 else _TRIED_AGAIN]:
                if not self._reached(good):
                    self._with_lead(lead, rate, "ends")
        for rate in (rates[0], rates[-1]) if thorough else ():
            for lead in best[:_TRIED_AGAIN]:
                if not self._reached(good):
                    self._with_lead(lead, rate, "all")
        self.pool.sort(key=_merit)
        return self.pool

    def _reached(self, good: float) -> bool:
        return any(outcome.fits and outcome.step_seconds <= good for _, outcome in self.pool)

    @staticmethod
    def _note(done: list[tuple[int, float, int]], lead: int, best: Outcome | None) -> None:
        if best is not None:
            done.append((best.excess, best.step_seconds, lead))

    def _with_longest(self, lead: int) -> Relaxation:
        """The candidate's model where no lead is longer: it knows what a short one cannot hide or hold."""
        if lead not in self._relaxations:
            whole = self._relaxation
            allowed = replace(whole.instance.allowed, longest_lead=lead)
            relaxation = Relaxation(replace(whole.instance, allowed=allowed), whole.costs, whole.mode)
            relaxation.fixed = whole.fixed
            self._relaxations[lead] = relaxation
        return self._relaxations[lead]

    def _with_lead(self, lead: int, rate: float, whole: Whole = "none") -> Outcome | None:
        """Solve for this lead and arrange, holding back memory until a plan fits; the best outcome."""
        model = CountModel(self._with_longest(lead), derate=rate, relaxed=whole != "all", whole_ends=whole == "ends")
        reserve: dict[TierName, float] = {"device": 0.0, "host": 0.0, "nvme": 0.0}
        base = with_lead(with_lead(self._base, "parameter_lead", lead), "activation_lead", lead)
        base = replace(base, origin=f"lead {lead}, {whole} whole")
        orders = ORDERS
        short: tuple[tuple[TierName, int, int], ...] = ()
        found: list[Outcome] = []
        for _ in range(_RESERVATIONS):
            solution = model.solve(solver=self._solver, gap=_MODEL_GAP, node_limit=_MODEL_NODES)
            if solution.counts is None:
                break
            key = (lead, tuple(sorted(solution.counts.items())))
            if key in self._tried:
                if not short:
                    break
                # Whole counts near these are the same as before: more room for what is missing.
                self._make_room(model, reserve, short)
                continue
            self._tried.add(key)
            if model.relaxation.least_seconds(solution.counts) >= self._limit:
                break
            results: list[tuple[Outcome, Order]] = []
            for order, plan in arrange(self._relaxation, solution.counts, base, orders):
                outcome = self._search.evaluate(plan)
                if outcome is None:
                    break
                self.pool.append((plan, outcome))
                if outcome.fits:
                    self._limit = min(self._limit, outcome.step_seconds)
                results.append((outcome, order))
            results.sort(key=lambda item: (item[0].excess, item[0].step_seconds))
            found += [outcome for outcome, _ in results[:1]]
            if not results or results[0][0].fits:
                break
            # What the model cannot see needs room; next time only the orders that needed least.
            orders = tuple(order for _, order in results[:3])
            short = results[0][0].shortages
            self._make_room(model, reserve, short)
        return min(found, key=lambda outcome: (outcome.excess, outcome.step_seconds), default=None)

    @staticmethod
    def _make_room(
        model: CountModel, reserve: dict[TierName, float], short: tuple[tuple[TierName, int, int], ...]
    ) -> None:
        for tier, need, have in short:
            reserve[tier] += (need - have) * 1.05
            model.reserve(tier, reserve[tier])


def _different(pool: list[tuple[Plan, Outcome]]) -> list[tuple[Plan, Outcome]]:
    """The best start of each kind; without one that fits, the one that exceeds least."""
    result: list[tuple[Plan, Outcome]] = []
    for plan, outcome in sorted(pool, key=_merit):
        if result and (len(result) == _IMPROVED or not outcome.fits):
            break
        if all(other.origin != plan.origin for other, _ in result):
            result.append((plan, outcome))
    return result


def _merit(item: tuple[Plan, Outcome]) -> tuple[int, float]:
    return item[1].excess, item[1].step_seconds
