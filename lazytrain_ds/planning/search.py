"""Local search on the simulator: takes a plan, returns one that is never worse.

Worse means more bytes above the caps, then a longer step. The search is deterministic: its only limit is a count of
simulated visits. A candidate whose counts alone prove that it cannot win (relaxation.py) is not simulated, and a
simulation ends as soon as it shows that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

from lazytrain_ds.planning.instance import StepMode
from lazytrain_ds.planning.moves import Aspect, Freedom, Space, activations_of, pick, with_lead
from lazytrain_ds.planning.plan import BlockPlan, Plan
from lazytrain_ds.planning.relaxation import Relaxation
from lazytrain_ds.planning.simulator import Outcome, Simulator

__all__ = ["Search", "better"]

# A move must gain at least this share of the step, so that rounding noise does not send the search in circles.
_LEAST_GAIN: Final = 1e-7
# What a simulation and a look at the count model cost beyond visits, in visits.
_SIMULATION: Final = 20
_COUNTING: Final = 10
# A random walk: how much longer a step it accepts at first, changes at once, visits it takes at least, walks at most.
_SLACK: Final = 5e-2
_SHAKES: Final = 3
_LEAST_WALK: Final = 10_000
_MOST_WALKS: Final = 100
# Blocks that wait longest, and partners tried for each, in one round of exchanges.
_WAITING: Final = 6
_PARTNERS: Final = 4
# Pairs of moves simulated in one round, the model's favourites.
_PAIRS: Final = 24

# Up to this many blocks all pairs of changes are tried, not the model's favourites only.
_FEW_BLOCKS: Final = 8
# Three changes at once are tried where there are at most so many.
_TRIPLES: Final = 20_000
# Moves on either side of a pair.
_HALVES: Final = 16

Move = tuple[str, Aspect, Any, Any]


class _Ranked(NamedTuple):
    """A move with what the count model says of it: seconds gained, device bytes freed."""

    rank: tuple[float, float, float]
    order: int
    move: Move
    gain: float
    freed: float


def better(left: Outcome, right: Outcome) -> bool:
    """Whether `left` beats `right`: less above the caps, then clearly faster."""
    if left.excess != right.excess:
        return left.excess < right.excess
    return left.step_seconds < right.step_seconds * (1 - _LEAST_GAIN)


class Search:
    """Improves plans of one instance and micro-batch within a budget of simulated visits (see `Simulator.visits`)."""

    def __init__(self, simulator: Simulator, micro_batch: int, freedom: Freedom, budget: int) -> None:
        self.simulator = simulator
        self.space = Space(simulator.instance, micro_batch)
        self.freedom = freedom
        self.left = budget
        self._seen: dict[tuple[object, ...], Outcome] = {}
        # Plans that are known not to fit in so many seconds.
        self._worse: dict[tuple[object, ...], float] = {}
        self._models: dict[StepMode, Relaxation] = {}
        self._numbers: dict[BlockPlan, int] = {}
        self._numbered: dict[int, tuple[BlockPlan, int]] = {}

    def model(self, mode: StepMode) -> Relaxation:
        """The count model that proves candidates hopeless."""
        if mode not in self._models:
            costs = self.simulator.costs(self.space.micro_batch)
            self._models[mode] = Relaxation(self.simulator.instance, costs, mode)
        return self._models[mode]

    def _key(self, plan: Plan) -> tuple[object, ...]:
        """What makes the plan this one; blocks are looked up by identity, as plans share most of them."""
        numbered = self._numbered
        result: list[object] = [plan.optimizer_step]
        for block in plan.blocks:
            known = numbered.get(id(block))
            if known is None:
                known = numbered[id(block)] = (block, self._numbers.setdefault(block, len(self._numbers)))
            result.append(known[1])
        return tuple(result)

    def evaluate(self, plan: Plan, most: float | None = None) -> Outcome | None:
        """The simulator's outcome, or None when the budget is spent, or where the plan does not fit in `most` seconds.

        Plans seen before are free.
        """
        key = self._key(plan)
        found = self._seen.get(key)
        if found is not None:
            return found
        if self.left <= 0 or (most is not None and most <= self._worse.get(key, 0.0)):
            return None
        before = self.simulator.visits
        found = self.simulator.run(plan) if most is None else self.simulator.better(plan, most)
        self.left -= _SIMULATION + self.simulator.visits - before
        if found is not None:
            self._seen[key] = found
        elif most is not None:
            self._worse[key] = most
        return found

    def improve(self, plan: Plan, good: float = 0.0, share: int | None = None) -> tuple[Plan, Outcome]:
        """Repeat all moves until none helps, the budget is spent, or a fitting plan takes at most `good` seconds.

        `share`: visits of the budget that may be used here (None: all that are left).
        """
        spare = 0 if share is None else max(0, self.left - share)
        self.left -= spare
        try:
            return self._improve(plan, good)
        finally:
            self.left += spare

    def _improve(self, plan: Plan, good: float) -> tuple[Plan, Outcome]:
        outcome = self.evaluate(plan) or self.simulator.run(plan)
        attempts = (
            self._whole_plan,
            self._block_moves,
            self._pairs,
            self._exchanges,
            self._lead_moves,
            self._swaps,
            self._all_triples,
        )
        stuck = 0
        position = 0
        while stuck < len(attempts) and self.left > 0 and not (outcome.fits and outcome.step_seconds <= good):
            found = attempts[position % len(attempts)](plan, outcome)
            position += 1
            stuck += 1
            if found is not None:
                plan, outcome = found
                stuck = 0
        return plan, outcome

    def explore(self, plan: Plan, good: float = 0.0) -> tuple[Plan, Outcome]:
        """`improve`, then a walk of random changes that may be a little worse, and `improve` again where it ended well.

        The random numbers are the same every time.
        """
        best = self.improve(plan, good)
        dice = random.Random(plan.block_count)
        rounds = 0
        while self.left > _LEAST_WALK and best[1].fits and best[1].step_seconds > good and rounds < _MOST_WALKS:
            rounds += 1
            walked = self._walk(best, dice, max(self.left // 2, _LEAST_WALK), good)
            if better(walked[1], best[1]):
                best = self.improve(walked[0], good, self.left // 2)
        return best

    def _walk(self, start: tuple[Plan, Outcome], dice: random.Random, share: int, good: float) -> tuple[Plan, Outcome]:
        """The best plan met on a walk that at first accepts steps a little longer, at last only shorter ones."""
        best = current = start
        end = self.left - share
        tried = 0
        while self.left > end and best[1].step_seconds > good and tried < share:
            tried += 1
            slack = _SLACK * (self.left - end) / share
            candidate = self._shaken(current[0], dice)
            most = current[1].step_seconds * (1 + slack)
            self.left -= _COUNTING
            if candidate.blocks == current[0].blocks or self._hopeless_at(candidate, 0.0, most):
                continue
            outcome = self.evaluate(candidate, most)
            if outcome is None or not outcome.fits or outcome.step_seconds > most:
                continue
            current = (candidate, outcome)
            if better(outcome, best[1]):
                best = current
        return best

    def _shaken(self, plan: Plan, dice: random.Random) -> Plan:
        """`plan` with a few changes of some blocks, or exchanges between two."""
        order = self.simulator.instance.order
        for _ in range(dice.randint(1, _SHAKES)):
            if dice.random() < 0.5:
                part = dice.choice(self._parts())
                block = dice.randrange(plan.block_count)
                own = part(plan, block)
                others = [i for i in range(len(order)) if order[i] == order[block] and part(plan, i) != own]
                if others:
                    plan = self._exchanged(plan, block, dice.choice(others), part)
                continue
            moves = list(self.space.pairs(plan, (*self.freedom.aspects, *self.freedom.leads)))
            if moves:
                name, aspect, source, target = dice.choice(moves)
                holders = self.space.holders(plan, name, aspect)[source]
                size = dice.randint(1, max(1, len(holders) // 8))
                plan = self.space.moved(plan, sorted(dice.sample(holders, size)), aspect, target)
        return plan

    # ---- moves

    def _hopeless(self, candidate: Plan, outcome: Outcome) -> bool:
        most = outcome.step_seconds * (1 - _LEAST_GAIN) if outcome.fits else float("inf")
        return self._hopeless_at(candidate, outcome.excess, most)

    def _hopeless_at(self, candidate: Plan, excess: float, seconds: float) -> bool:
        """Whether counts prove that the candidate exceeds the caps by more, or takes that long."""
        model = self.model(candidate.optimizer_step)
        try:
            counts = model.counts(candidate)
        except KeyError:
            return False  # it uses a tier that is absent: the simulator will say by how much it does not fit
        if model.least_excess(counts) > excess:
            return True
        return seconds < float("inf") and model.least_seconds(counts) >= seconds

    def _try(self, candidate: Plan, outcome: Outcome) -> Outcome | None:
        self.left -= _COUNTING
        if self._hopeless(candidate, outcome):
            return None
        result = self.evaluate(candidate, outcome.step_seconds if outcome.fits else None)
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
        """Set one aspect of many, then fewer, blocks of a class."""
        return self._moves(plan, outcome, [item.move for item in self._ranked(plan, outcome)])

    def _ranked(self, plan: Plan, outcome: Outcome) -> list[_Ranked]:
        """All single-block moves, those the count model likes best first: less above the caps, then faster."""
        model = self.model(plan.optimizer_step)
        before = model.counts(plan)
        seconds, need = model.seconds(before), model.device_bytes(before)
        result: list[_Ranked] = []
        for index, move in enumerate(self.space.pairs(plan, self.freedom.aspects)):
            name, aspect, source, target = move
            holders = self.space.holders(plan, name, aspect)[source]
            candidate = self.space.moved(plan, pick(holders, 1, "spread"), aspect, target)
            after = model.counts(candidate)
            gain, freed = seconds - model.seconds(after), need - model.device_bytes(after)
            rank = (-freed if not outcome.fits else 0.0, -gain, -freed)
            result.append(_Ranked(rank, index, move, gain, freed))
        result.sort(key=lambda item: (item.rank, item.order))
        return result

    def _lead_moves(self, plan: Plan, outcome: Outcome) -> tuple[Plan, Outcome] | None:
        """One visit earlier or later, for some blocks of a class."""
        moves = [move for move in self.space.pairs(plan, self.freedom.leads) if abs(move[2] - move[3]) == 1]
        return self._moves(plan, outcome, moves)

    def _moves(self, plan: Plan, outcome: Outcome, moves: list[Move]) -> tuple[Plan, Outcome] | None:
        """Try every move at the numbers of blocks that the count model likes best."""
        changed = False
        space = self.space
        for name, aspect, source, target in moves:
            if self.left <= 0:
                break
            for rank, size in enumerate(self._sizes(plan, outcome, (name, aspect, source, target))):
                for pattern in ("spread", "late", "early") if rank == 0 else ("spread",):
                    holders = space.holders(plan, name, aspect).get(source, [])
                    if not holders or (size >= len(holders) and pattern != "spread"):
                        continue
                    candidate = space.moved(plan, pick(holders, size, pattern), aspect, target)
                    result = self._try(candidate, outcome)
                    if result is not None:
                        plan, outcome, changed = candidate, result, True
        return (plan, outcome) if changed else None

    def _sizes(self, plan: Plan, outcome: Outcome, move: Move) -> list[int]:
        """Up to three numbers of blocks: fitting and fast by the model, or freeing most while the plan does not fit."""
        name, aspect, source, target = move
        holders = self.space.holders(plan, name, aspect).get(source, [])
        model = self.model(plan.optimizer_step)
        before = model.seconds(model.counts(plan))
        ranked: list[tuple[float, float, int]] = []
        size = 1
        while holders:
            size = min(size, len(holders))
            counts = model.counts(self.space.moved(plan, pick(holders, size, "spread"), aspect, target))
            excess = model.least_excess(counts)
            if excess <= outcome.excess and (not outcome.fits or model.seconds(counts) < before * (1 + 1e-3)):
                ranked.append((excess if not outcome.fits else 0.0, model.seconds(counts), size))
            if size == len(holders):
                break
            size *= 2
        return [size for _, _, size in sorted(ranked)[:3]]

    def _exchanges(self, plan: Plan, outcome: Outcome) -> tuple[Plan, Outcome] | None:
        """Blocks near the longest waits exchange activations, parameters or sub-group with blocks elsewhere."""
        order = self.simulator.instance.order
        n = len(order)
        changed = False
        near: list[int] = []
        for _, block in self.simulator.waits(plan)[:_WAITING]:
            near += [
                index for index in (block, block + 1, block - 1, block + 2) if 0 <= index < n and index not in near
            ]
        for block in near:
            for part in self._parts():
                others = [i for i in range(n) if order[i] == order[block] and part(plan, i) != part(plan, block)]
                for other in pick(others, min(_PARTNERS, len(others)), "spread"):
                    if self.left <= 0:
                        break
                    candidate = self._exchanged(plan, block, other, part)
                    result = self._try(candidate, outcome)
                    if result is not None:
                        plan, outcome, changed = candidate, result, True
                        break
        return (plan, outcome) if changed else None

    def _parts(self) -> list[Callable[[Plan, int], tuple[Any, ...]]]:
        parts: list[Callable[[Plan, int], tuple[Any, ...]]] = []
        if self.freedom.activations:
            parts.append(_activation_part)
        if self.freedom.placement:
            parts += [_parameter_part, _optimizer_part]
        return parts

    def _exchanged(self, plan: Plan, left: int, right: int, part: Callable[[Plan, int], tuple[Any, ...]]) -> Plan:
        blocks = list(plan.blocks)
        fields = _FIELDS[part]
        a, b = blocks[left], blocks[right]
        blocks[left] = replace(a, **{field: getattr(b, field) for field in fields})
        blocks[right] = replace(b, **{field: getattr(a, field) for field in fields})
        return replace(plan, blocks=tuple(self.space.normalize(blocks)))

    def _pairs(self, plan: Plan, outcome: Outcome) -> tuple[Plan, Outcome] | None:
        """Two moves at once, one that costs memory or time and one that pays for it; the count model proposes them."""
        if plan.block_count <= _FEW_BLOCKS:
            return self._all_pairs(plan, outcome)
        if not outcome.fits:
            return None  # time is no guide before the plan fits
        model = self.model(plan.optimizer_step)
        base = model.seconds(model.counts(plan))
        moves = self._ranked(plan, outcome)
        gaining = [item.move for item in moves if item.gain > 0][:_HALVES]
        freeing = sorted((item for item in moves if item.freed > 0), key=lambda item: item.gain / item.freed)
        paying = [item.move for item in reversed(freeing)][:_HALVES]
        ranked: list[tuple[float, int, Plan]] = []
        for index, (first, second) in enumerate(product(gaining, paying)):
            candidate: Plan | None = plan
            for name, aspect, source, target in (first, second):
                holders = self.space.holders(candidate, name, aspect).get(source, []) if candidate else []
                if not holders or candidate is None:
                    candidate = None
                    break
                candidate = self.space.moved(candidate, pick(holders, 1, "spread"), aspect, target)
            if candidate is None:
                continue
            counts = model.counts(candidate)
            if model.least_excess(counts) > outcome.excess:
                continue
            seconds = model.seconds(counts)
            if seconds < base * (1 - _LEAST_GAIN):
                ranked.append((seconds, index, candidate))
        ranked.sort(key=lambda item: item[:2])
        for _, _, candidate in ranked[:_PAIRS]:
            result = self._try(candidate, outcome)
            if result is not None:
                return candidate, result
        return None

    def _all_pairs(self, plan: Plan, outcome: Outcome) -> tuple[Plan, Outcome] | None:
        """On a short model: any two changes of one block each."""
        changes = self._changes(plan)
        for index, (block, aspect, target) in enumerate(changes):
            half = self.space.moved(plan, [block], aspect, target)
            found = self._first_gain(half, changes[index + 1 :], outcome)
            if found is not None:
                return found
        return None

    def _all_triples(self, plan: Plan, outcome: Outcome) -> tuple[Plan, Outcome] | None:
        """On a short model: activation and parameters of one block together, and any change of another block."""
        if plan.block_count > _FEW_BLOCKS:
            return None
        changes = self._changes(plan)
        doubles = [
            (block, activation, parameters)
            for block, aspect, activation in changes
            for same, other, parameters in changes
            if aspect == "activation" and other == "parameters" and same == block
        ]
        if len(doubles) * len(changes) > _TRIPLES:
            return None
        for block, activation, parameters in doubles:
            half = self.space.moved(plan, [block], "activation", activation)
            both = self.space.moved(half, [block], "parameters", parameters)
            found = self._first_gain(both, [change for change in changes if change[0] != block], outcome)
            if found is not None:
                return found
        return None

    def _changes(self, plan: Plan) -> list[tuple[int, Aspect, Any]]:
        """(block, aspect, new value): every change of one block."""
        aspects = (*self.freedom.aspects, *self.freedom.leads)
        return [
            (block, aspect, target)
            for name, aspect, source, target in self.space.pairs(plan, aspects)
            for block in self.space.holders(plan, name, aspect)[source]
        ]

    def _first_gain(
        self, plan: Plan, changes: list[tuple[int, Aspect, Any]], outcome: Outcome
    ) -> tuple[Plan, Outcome] | None:
        for block, aspect, value in changes:
            if self.left <= 0:
                return None
            candidate = self.space.moved(plan, [block], aspect, value)
            result = self._try(candidate, outcome)
            if result is not None:
                return candidate, result
        return None

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


def _activation_part(plan: Plan, block: int) -> tuple[Any, ...]:
    decided = plan.blocks[block]
    return decided.choice, decided.boundary, decided.saved_tier


def _parameter_part(plan: Plan, block: int) -> tuple[Any, ...]:
    decided = plan.blocks[block]
    return decided.parameter_tier, decided.keep_parameters


def _optimizer_part(plan: Plan, block: int) -> tuple[Any, ...]:
    return (plan.blocks[block].optimizer,)


_FIELDS: Final[dict[Callable[[Plan, int], tuple[Any, ...]], tuple[str, ...]]] = {
    _activation_part: ("choice", "boundary", "saved_tier"),
    _parameter_part: ("parameter_tier", "keep_parameters"),
    _optimizer_part: ("optimizer",),
}


def _with_step(plan: Plan, mode: StepMode) -> Plan:
    return replace(plan, optimizer_step=mode)
