"""The choices a block has for what autograd keeps inside it, read off its operator trace.

Note [Selective choices]
A selective choice keeps the outputs of some operators from the forward and runs the others again in backward, all
of them up to where everything autograd packed is there again (a non-reentrant checkpoint stops then). What it
keeps are the outputs' storages; an output that a later operator of the block changes in place cannot be kept and
is run again (runtime/selective.py does the same). Operators are chosen by name, so a choice keeps all outputs of
an operator or none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lazytrain_ds.planning.instance import ActivationChoice
from lazytrain_ds.workload.operators import Operator
from lazytrain_ds.workload.trace import BlockTrace

Seconds = Callable[[Sequence[Operator]], float]

# Smaller storages stay on the device (runtime/activations: a transfer costs more than it saves).
MINIMUM_OFFLOAD_BYTES = 1 << 16
LARGEST_MENU = 8


def activation_menu(
    trace: BlockTrace, seconds: Seconds, *, droppable: bool, also: Iterable[str] = ()
) -> tuple[ActivationChoice, ...]:
    """From "keep everything" over selective choices to "keep the boundary only"; at most `LARGEST_MENU` entries.

    `seconds` times a list of operators. `droppable`: whether the block's input may be re-made by the block before
    it; where not, the last choice keeps just as little but is of kind `selective` without operators, which
    excludes it from segments. No entry is both larger and slower than another.

    `also`: names of further entries, of a plan made with other times; those that the block has the operators for are
    added, whatever they take.
    """
    keep = ActivationChoice(
        name="keep",
        kind="keep",
        kept_bytes=trace.kept_bytes,
        offloadable_bytes=offloadable(trace.kept),
        recompute_seconds=0.0,
        needs_input=trace.needs_input,
    )
    last = _choice(trace, seconds, ())
    last = ActivationChoice(
        name="boundary" if droppable else "recompute",
        kind="boundary" if droppable else "selective",
        kept_bytes=0,
        offloadable_bytes=0,
        recompute_seconds=last.recompute_seconds,
        recompute_flops=last.recompute_flops,
    )
    candidates = [_choice(trace, seconds, names) for names in _candidate_sets(trace, seconds)]
    chosen = _efficient(candidates, keep, last)
    named = {choice.name: choice for choice in (_named(trace, seconds, name) for name in also) if choice is not None}
    added = [choice for name, choice in named.items() if name not in {each.name for each in (keep, *chosen, last)}]
    return (keep, *sorted((*chosen, *added), key=lambda choice: -choice.kept_bytes), last)


def _named(trace: BlockTrace, seconds: Seconds, name: str) -> ActivationChoice | None:
    """The selective choice that is called so; None where the block runs no such operators."""
    rerun = trace.forward[: trace.rerun_operators]
    operators = sorted({operator.name for operator in rerun if operator.keepable})
    wanted = [[operator for operator in operators if _short(operator) == part] for part in name.split("+")]
    if not all(wanted):
        return None
    choice = _choice(trace, seconds, tuple(dict.fromkeys(itertools.chain(*wanted))))
    return replace(choice, name=name) if choice.kept_bytes else None


def offloadable(sizes: Iterable[int]) -> int:
    """The part of kept storages that is worth a transfer."""
    return sum(size for size in sizes if size >= MINIMUM_OFFLOAD_BYTES)


def kept_storages(trace: BlockTrace, names: Iterable[str]) -> dict[int, int]:
    """Storages (number -> bytes) that a selective choice keeps: outputs of the named operators that nothing
    overwrites.
    """
    wanted = set(names)
    kept: dict[int, int] = {}
    for position, operator in enumerate(trace.forward):
        for serial in operator.written:
            kept.pop(serial, None)
        # Later ones a second run would never ask for, so the runtime lets them go.
        if position < trace.rerun_operators and operator.keepable and operator.name in wanted:
            kept.update(zip(operator.made, operator.made_bytes, strict=True))
    return kept


def _choice(trace: BlockTrace, seconds: Seconds, names: tuple[str, ...]) -> ActivationChoice:
    kept = kept_storages(trace, names)
    rerun = [
        operator
        for operator in trace.forward[: trace.rerun_operators]
        if not (operator.name in names and operator.keepable and all(serial in kept for serial in operator.made))
    ]
    return ActivationChoice(
        name="+".join(_short(name) for name in names) or "none",
        kind="selective",
        kept_bytes=sum(kept.values()),
        offloadable_bytes=offloadable(kept.values()),
        recompute_seconds=seconds(rerun),
        recompute_flops=sum(operator.flops for operator in rerun),
        ops=names,
    )


def _short(name: str) -> str:
    """`aten.mm.default` -> `mm`, any attention -> `attention`; other overloads keep theirs, as they must differ."""
    _, _, rest = name.partition(".")
    if "attention" in rest:
        return "attention"
    return rest.removesuffix(".default").lstrip("_") or name


def _candidate_sets(trace: BlockTrace, seconds: Seconds) -> list[tuple[str, ...]]:
    """Sets of operator names worth a look: those with arithmetic together and alone, and best-first by time saved
    per byte.
    """
    rerun = trace.forward[: trace.rerun_operators]
    names = sorted({operator.name for operator in rerun if operator.keepable})
    saved: dict[str, float] = {}
    size: dict[str, int] = {}
    for name in names:
        kept = kept_storages(trace, (name,))
        # Kept after the last point that a recompute reaches: bytes for nothing.
        saved[name] = seconds([o for o in rerun if o.name == name and all(serial in kept for serial in o.made)])
        size[name] = sum(kept.values())
    useful = [name for name in names if size[name] > 0 and saved[name] > 0]
    useful.sort(key=lambda name: (-saved[name] / size[name], name))
    heavy = tuple(sorted(name for name in useful if any(o.flops for o in rerun if o.name == name)))
    attention = tuple(name for name in heavy if "attention" in name)
    sets = [heavy, attention, *((name,) for name in heavy)]
    sets += [tuple(useful[:count]) for count in range(1, len(useful) + 1)]
    rest = [name for name in useful if name not in heavy]
    sets += [(*heavy, *rest[:count]) for count in range(1, len(rest) + 1)]
    rank = {name: (name not in heavy, name) for name in useful}
    return list(dict.fromkeys(tuple(sorted(names, key=rank.__getitem__)) for names in sets if names))


def _efficient(
    candidates: list[ActivationChoice], keep: ActivationChoice, last: ActivationChoice
) -> tuple[ActivationChoice, ...]:
    """Those that no other entry beats in both bytes and time, largest first, thinned out to the menu's size."""
    front: list[ActivationChoice] = []
    slowest = last.recompute_seconds
    for choice in sorted(candidates, key=lambda choice: (choice.kept_bytes, choice.recompute_seconds)):
        if choice.kept_bytes < keep.kept_bytes and choice.recompute_seconds < slowest:
            front.append(choice)
            slowest = choice.recompute_seconds
    while len(front) > LARGEST_MENU - 2:
        bounds = [last, *front, keep]
        losses = [
            (bounds[at - 1].recompute_seconds - bounds[at].recompute_seconds)
            * (bounds[at + 1].kept_bytes - bounds[at].kept_bytes)
            for at in range(1, len(bounds) - 1)
        ]
        del front[losses.index(min(losses))]
    return tuple(reversed(front))
