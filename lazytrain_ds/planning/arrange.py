"""From counts to plans: which blocks of a group take which option.

The counts fix memory and volumes; the order decides how evenly the channels are loaded. Prefetches reach only a few
visits ahead, so what uses the link is spread over the blocks; a few alternatives are made and the simulator chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, TypeVar

from lazytrain_ds.planning.counts import ActivationOption, Key
from lazytrain_ds.planning.moves import pick
from lazytrain_ds.planning.plan import BlockPlan, Plan, SubGroupPlan
from lazytrain_ds.planning.relaxation import Relaxation

__all__ = ["ORDERS", "Order", "arrange", "interleave"]

T = TypeVar("T")

PATTERNS: Final = ("spread", "tapered", "away_first")
# (activations, residents, device-stepped sub-groups): see the functions below.
Order = tuple[str, str, str]
ORDERS: Final[tuple[Order, ...]] = tuple(
    (pattern, residents, steps)
    for pattern in PATTERNS
    for residents, steps in (("balanced", "spread"), ("spread", "spread"), ("balanced", "early"))
)


def interleave(items: list[tuple[T, int]]) -> list[T]:
    """Every item as often as it says, each spread as evenly as possible."""
    total = sum(count for _, count in items)
    marks = [
        ((position + 0.5) * total / count, order, item)
        for order, (item, count) in enumerate(items)
        for position in range(count)
    ]
    marks.sort(key=lambda mark: mark[:2])
    return [item for _, _, item in marks]


def _units(
    options: list[tuple[ActivationOption, int]], recomputed: set[str], longest: int
) -> list[tuple[tuple[ActivationOption, ...], int]]:
    """Options as units to be laid in a row: single blocks, and segments of a kept boundary and dropped ones."""
    dropped = sum(count for option, count in options if option.boundary == "dropped")
    drop = next((option for option, _ in options if option.boundary == "dropped"), None)
    kept = [(option, count) for option, count in options if option.boundary != "dropped"]
    if drop is None:
        return [((option,), count) for option, count in kept]
    starts = [option for option, count in kept if option.choice in recomputed for _ in range(count)]
    if not starts:  # no boundary is kept in this group: every so many blocks one is, at home on the device
        starts = [drop._replace(boundary="device")] * -(-dropped // longest)
        dropped -= len(starts)
    share, rest = divmod(dropped, len(starts))
    units: dict[tuple[ActivationOption, ...], int] = {}
    for index, start in enumerate(starts):
        length = min(share + (1 if index < rest else 0), longest - 1)
        unit = (start, *[drop] * length)
        units[unit] = units.get(unit, 0) + 1
    for option, count in kept:
        if option.choice not in recomputed:
            units[(option,)] = count
    return list(units.items())


def _row_of(units: list[tuple[tuple[ActivationOption, ...], int]], pattern: str) -> list[tuple[ActivationOption, ...]]:
    """Units in a row. `tapered`: those with something away from the device get rarer towards the end, where memory is
    fullest; `away_first`: they come first."""
    away = [unit for unit in units if _is_away(unit[0][0])]
    stay = [unit for unit in units if not _is_away(unit[0][0])]
    if pattern == "spread" or not away or not stay:
        return interleave(units)
    gone, kept = interleave(away), interleave(stay)
    if pattern == "away_first":
        return gone + kept
    total, count = len(gone) + len(kept), len(gone)
    places = [total * (1 - (1 - (index + 0.5) / count) ** 0.5) for index in range(count)]
    row: list[tuple[ActivationOption, ...]] = []
    for place, unit in zip(places, gone, strict=True):
        while kept and len(row) < int(place):
            row.append(kept.pop(0))
        row.append(unit)
    return row + kept


def _is_away(option: ActivationOption) -> bool:
    return option.saved != "device" or option.boundary in ("host", "nvme")


def _activations(relaxation: Relaxation, g: int, counts: dict[Key, float], pattern: str) -> list[ActivationOption]:
    group = relaxation.groups[g]
    options = [
        (option, int(counts.get(Key(g, "activation", index), 0))) for index, option in enumerate(group.activations)
    ]
    options = [(option, count) for option, count in options if count]
    block = group.blocks[0]
    recomputed = {name for name, choice in relaxation.costs.choices[block].items() if choice[4]}
    longest = relaxation.instance.allowed.longest_segment
    row = _row_of(_units(options, recomputed, longest), pattern)
    flat = [option for unit in row for option in unit]
    flat += [flat[-1]] * (group.size - len(flat))
    return flat[: group.size]


def _parameters(
    relaxation: Relaxation, g: int, counts: dict[Key, float], residents: str, activations: list[ActivationOption]
) -> list[tuple[Any, bool]]:
    group = relaxation.groups[g]
    options = [
        (option, int(counts.get(Key(g, "parameter", index), 0))) for index, option in enumerate(group.parameters)
    ]
    options = [(option, count) for option, count in options if count]
    if len(options) < 2 or residents == "spread":
        return interleave(options)
    on_device = [(option, count) for option, count in options if option[0] == "device"]
    others = [(option, count) for option, count in options if option[0] != "device"]
    return _balanced(relaxation, g, interleave(on_device), interleave(others), activations)


def _balanced(
    relaxation: Relaxation,
    g: int,
    residents: list[tuple[Any, bool]],
    fetched: list[tuple[Any, bool]],
    activations: list[ActivationOption],
) -> list[tuple[Any, bool]]:
    """In order of backward, a resident wherever the link is ahead of compute: where much else comes back."""
    costs, group = relaxation.costs, relaxation.groups[g]
    menu = costs.choices[group.blocks[0]]
    numbers = group.numbers
    fetch = costs.h2d.seconds(numbers.parameter_bytes)
    loads, lengths = [], []
    for option in activations:
        back = costs.h2d.seconds(menu[option.choice][1]) if option.saved != "device" else 0.0
        if option.boundary in ("host", "nvme"):
            back += costs.h2d.seconds(numbers.boundary_bytes)
        loads.append(back)
        lengths.append(numbers.backward_seconds + menu[option.choice][2])
    pace = (sum(loads) + fetch * len(fetched)) / (sum(lengths) or 1.0)
    result: list[tuple[Any, bool]] = []
    ahead = 0.0
    for index in reversed(range(group.size)):
        ahead += loads[index] - pace * lengths[index]
        if fetched and (not residents or ahead + fetch / 2 <= 0):
            ahead += fetch
            result.append(fetched.pop())
        else:
            result.append(residents.pop())
    return result[::-1]


def _optimizers(
    relaxation: Relaxation, g: int, counts: dict[Key, float], parameters: list[tuple[Any, bool]], steps: str
) -> list[SubGroupPlan]:
    """Device-stepped sub-groups among residents: `early`, so that the host's queue starts late, or `spread`, so that
    gradients leave evenly. The host's are interleaved."""
    group = relaxation.groups[g]
    options = [
        (option, int(counts.get(Key(g, "optimizer", index), 0))) for index, option in enumerate(group.optimizers)
    ]
    on_device = [option for option, count in options if option.step_device == "device" for _ in range(count)]
    on_host = interleave([(option, count) for option, count in options if option.step_device == "host" and count])
    residents = [index for index in range(group.size) if parameters[index][0] == "device"]
    others = [index for index in range(group.size) if parameters[index][0] != "device"]
    if steps == "spread" and len(on_device) < len(residents):
        first = pick(residents, len(on_device), "spread")
        residents = first + [index for index in residents if index not in first]
    order = residents + others
    result: list[SubGroupPlan] = [group.optimizers[0]] * group.size
    for index, option in zip(order, on_device, strict=False):
        result[index] = option
    for index, option in zip(sorted(order[len(on_device) :]), on_host, strict=False):
        result[index] = option
    return result


def arrange(
    relaxation: Relaxation, counts: dict[Key, float], base: Plan, orders: tuple[Order, ...] = ORDERS
) -> Iterator[tuple[Order, Plan]]:
    """(order, plan) with these counts in each of `orders`; what counts do not cover (leads) is as in `base`.

    With a fixed placement every block's parameters and optimizer are those of `base`: counts would let blocks of a
    class change places, but what they own lies where it lies.
    """
    fixed = relaxation.fixed is not None
    if fixed:
        orders = tuple({order[0]: order for order in reversed(orders)}.values())[::-1]  # the rest would repeat them
    for pattern, residents, steps in orders:
        blocks: list[BlockPlan] = list(base.blocks)
        for g, group in enumerate(relaxation.groups):
            activations = _activations(relaxation, g, counts, pattern)
            if fixed:
                parameters = [relaxation.parameter_of(base.blocks[block]) for block in group.blocks]
            else:
                parameters = _parameters(relaxation, g, counts, residents, activations)
            trainable = group.numbers.trainable and not fixed
            optimizers = _optimizers(relaxation, g, counts, parameters, steps) if trainable else []
            for index, block in enumerate(group.blocks):
                option, (tier, keep) = activations[index], parameters[index]
                blocks[block] = replace(
                    blocks[block],
                    choice=option.choice,
                    saved_tier=option.saved,
                    boundary=option.boundary,  # type: ignore[arg-type]
                    parameter_tier=tier,
                    keep_parameters=keep,
                    optimizer=optimizers[index] if optimizers else blocks[block].optimizer,
                )
        blocks = relaxation.space.normalize(blocks)
        yield (pattern, residents, steps), replace(base, blocks=tuple(blocks), optimizer_step=relaxation.mode)
