"""Choices between keeping everything and keeping the boundary: which operators' outputs to keep, read off the trace.

A choice names operators; every output of theirs that a second run would need is kept, the rest is run again. The
candidates are sets of operators; only those that no other one beats in both bytes and seconds are offered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazytrain_ds.workload.operators import Operator

__all__ = ["KeptSet", "can_be_kept", "efficient_sets", "resolve_operator"]

MOST_OPERATORS = 10
"""Sets are drawn from this many operator names, those that take the most time: 1,024 sets at most."""


@dataclass(frozen=True)
class KeptSet:
    """Keep the outputs of `ops`: `kept` are the sizes of their storages, `rerun` the operators still run again."""

    ops: tuple[str, ...]
    kept: tuple[int, ...]
    rerun: tuple[Operator, ...]
    seconds: float


def resolve_operator(name: str) -> Any | None:
    """The operator overload called `name` ("aten.mm.default"), None where this PyTorch has none."""
    target: Any = torch.ops
    for part in name.split("."):
        target = getattr(target, part, None)
        if target is None:
            return None
    return target if isinstance(target, torch._ops.OpOverload) else None


def can_be_kept(operator: Any) -> bool:
    """Whether an operator's outputs are its own: neither views nor written in place."""
    aliases = any(value.alias_info is not None for value in operator._schema.returns)
    return not aliases and not operator._schema.is_mutable


def efficient_sets(
    forward: Sequence[Operator], rerun_operators: int, seconds: Callable[[Sequence[Operator]], float],
    most_bytes: int, most_sets: int,
) -> list[KeptSet]:  # fmt: skip
    """Pareto-efficient sets, fewest seconds first; at most `most_sets`, each keeping fewer than `most_bytes`.

    `forward`: the block's operators, of which a recomputation runs the first `rerun_operators` when nothing is kept.
    `seconds` times a list of operators and is additive. An operator whose output is changed in place later cannot be
    kept: what a second run needs is what it returned.
    """
    rerun = forward[:rerun_operators]
    changed = {serial for operator in forward for serial in operator.written}
    spoilt = {operator.name for operator in forward if changed.intersection(operator.made)}
    by_name: dict[str, list[Operator]] = {}
    for operator in rerun:
        by_name.setdefault(operator.name, []).append(operator)
    cost = {name: seconds(operators) for name, operators in by_name.items()}
    size = {name: sum(sum(operator.made_bytes) for operator in operators) for name, operators in by_name.items()}
    usable = [
        name for name in by_name
        if name not in spoilt and cost[name] > 0 and 0 < size[name] < most_bytes
        and (operator := resolve_operator(name)) is not None and can_be_kept(operator)
    ]  # fmt: skip
    usable = sorted(usable, key=lambda name: (-cost[name], name))[:MOST_OPERATORS]
    everything = sum(cost.values())
    points: list[tuple[int, float, tuple[str, ...]]] = []
    for count in range(1, len(usable) + 1):
        for names in itertools.combinations(usable, count):
            kept = sum(size[name] for name in names)
            if kept < most_bytes:
                points.append((kept, everything - sum(cost[name] for name in names), names))
    frontier: list[tuple[int, float, tuple[str, ...]]] = []
    for point in sorted(points):
        if not frontier or point[1] < frontier[-1][1]:
            frontier.append(point)
    chosen = _spread(frontier, most_sets)
    return [
        KeptSet(
            ops=tuple(sorted(names)),
            kept=tuple(made for operator in rerun if operator.name in names for made in operator.made_bytes),
            rerun=tuple(operator for operator in rerun if operator.name not in names),
            seconds=max(0.0, time),
        )
        for _, time, names in reversed(chosen)
    ]


def _spread(frontier: list[tuple[int, float, tuple[str, ...]]], most: int) -> list[tuple[int, float, tuple[str, ...]]]:
    """At most `most` points of a frontier: repeatedly drop the one whose absence costs least.

    Without a point, a planner that has room for it falls back to the one before it: that costs the difference in
    seconds, times the range of room for which this happens.
    """
    points = list(frontier)
    while len(points) > most:
        ends = [point[0] for point in points[1:]] + [points[-1][0] + 1]
        before = [float("inf")] + [point[1] for point in points[:-1]]
        losses = [(before[index] - point[1]) * (ends[index] - point[0]) for index, point in enumerate(points)]
        losses[0] = (points[0][1] * 0.1 + 1e-12) * (ends[0] - points[0][0])
        points.pop(losses.index(min(losses)))
    return points
