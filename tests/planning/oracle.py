"""Exhaustive search with the simulator on small random instances: what the planner must match."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from lazytrain_ds.errors import PlanError, SchemaError
from lazytrain_ds.planning import instance as I
from lazytrain_ds.planning.moves import Space
from lazytrain_ds.planning.plan import BlockPlan, Plan
from lazytrain_ds.planning.schema import TRANSFER_CHANNELS
from lazytrain_ds.planning.simulator import Outcome, Simulator

LIMIT = 6_000

# What a random instance leaves open; together they cover every dimension of the plan space.
PROFILES = (
    dict(),
    dict(parameter_tiers=("host",), optimizer_tiers=("host",)),
    dict(boundary_tiers=("device", "host"), saved_tiers=("device", "host"), drop_boundaries=False),
    dict(parameter_tiers=("host", "device"), saved_tiers=("device",), boundary_tiers=("device",)),
    dict(optimizer_tiers=("device", "host", "nvme"), choice_kinds=("boundary",), boundary_tiers=("device",)),
    dict(parameter_tiers=("nvme", "host"), saved_tiers=("nvme", "device"), boundary_tiers=("device", "nvme")),
)


def random_instance(seed: int) -> I.Instance:
    """2 to 5 blocks of 1 or 2 classes; restricted until at most LIMIT plans are left."""
    rng = random.Random(seed)
    count = rng.randint(2, 5)
    micro_batches = rng.choice(((1,), (1,), (1, 2)))
    classes = []
    for name in ("a", "b")[: rng.randint(1, 2)]:
        parameters = rng.randint(5, 40)
        costs = []
        shape = [rng.uniform(0.5, 3.0) for _ in range(8)]
        for size in micro_batches:
            scale = 10 * size**0.9
            kept = int(12 * shape[2] * size)
            menu = [
                I.ActivationChoice("keep", "keep", kept, rng.choice((kept, kept // 2)), 0.0),
                I.ActivationChoice("part", "selective", kept // 2, kept // 2, 0.15 * scale * shape[0]),
                I.ActivationChoice("boundary", "boundary", 0, 0, scale * shape[0]),
            ]
            costs.append(
                I.BlockCosts(
                    size,
                    int(3 * shape[3] * size) + 1,
                    scale * shape[0],
                    2 * scale * shape[0],
                    100,
                    int(4 * shape[4] * size),
                    int(6 * shape[5] * size),
                    tuple(menu),
                )
            )
        classes.append(
            I.BlockClass(name, parameters, parameters, parameters, 2 * parameters, 2 * parameters, "bf16", tuple(costs))
        )
    order = tuple(rng.choice([c.name for c in classes]) for _ in range(count))
    used = [c for c in classes if c.name in order]
    modes = [I.OptimizerMode("host", "fp32", rng.uniform(0.0, 0.4), 12.0)]
    if rng.random() < 0.3:
        modes.append(I.OptimizerMode("host", "8bit", rng.uniform(0.0, 0.3), 6.0))
    if rng.random() < 0.4:
        modes.append(I.OptimizerMode("device", "fp32", 0.01, 12.0))
    rate = rng.choice((2.0, 4.0, 8.0, 20.0))
    profile = dict(rng.choice(PROFILES))
    value = I.Instance(
        name=f"random-{seed}",
        tiers=(
            I.Tier("device", rng.randint(60, 700)),
            I.Tier("host", rng.choice((800, 2500, 10_000))),
            I.Tier("nvme", rng.choice((0, 5000))),
        ),
        channels=tuple(
            I.Channel(name, rate / (3 if name.startswith("nvme") else 1), rng.choice((0.0, 0.1)))
            for name in TRANSFER_CHANNELS
        ),
        classes=tuple(used),
        order=order,
        optimizer_modes=tuple(modes),
        micro_batches=micro_batches,
        global_batch=rng.choice((2, 4, 8)),
        sequence_length=8,
        accumulation_bytes_per_parameter=2.0,
        host_accumulate_seconds_per_parameter=rng.choice((0.0, 0.02)),
        borrows=((count - 1, 0),) if rng.random() < 0.2 else (),
        allowed=I.Allowed(longest_lead=rng.choice((0, 1, 1)), longest_segment=rng.randint(1, 4), **profile),
    )
    for field, narrow in _narrowings(rng):
        if size_of(value) <= LIMIT:
            break
        kept = tuple(item for item in getattr(value.allowed, field) if item in narrow) if narrow else None
        if field == "longest_lead":
            value = replace(value, allowed=replace(value.allowed, longest_lead=0))
        elif field == "drop_boundaries":
            value = replace(value, allowed=replace(value.allowed, drop_boundaries=False))
        elif field == "order":
            pass
        elif kept:
            value = replace(value, allowed=replace(value.allowed, **{field: kept}))
    while size_of(value) > LIMIT and len(value.order) > 2:
        value = replace(value, order=value.order[:-1], borrows=())
        names = set(value.order)
        value = replace(value, classes=tuple(c for c in value.classes if c.name in names))
    return value


def _narrowings(rng: random.Random) -> list[tuple[str, tuple[str, ...]]]:
    steps: list[tuple[str, tuple[str, ...]]] = [
        ("saved_tiers", ("device", "host")),
        ("boundary_tiers", ("device", "host")),
        ("optimizer_tiers", ("host", "device")),
        ("parameter_tiers", ("host", "device")),
        ("optimizer_tiers", ("host",)),
        ("longest_lead", ()),
        ("boundary_tiers", ("device",)),
        ("saved_tiers", ("device",)),
        ("drop_boundaries", ()),
        ("parameter_tiers", ("host",)),
        ("choice_kinds", ("keep", "boundary")),
    ]
    rng.shuffle(steps)
    return steps


def _options(instance: I.Instance, micro_batch: int) -> list[list[BlockPlan]]:
    """Every block's decisions that differ in effect (before segments are checked)."""
    space = Space(instance, micro_batch)
    lead_values = range(instance.allowed.longest_lead + 1)
    result = []
    for block, name in enumerate(instance.order):
        options: dict[BlockPlan, None] = {}
        for choice in space.values[name, "choice"]:
            info = space.choices[name][choice]
            homes = [h for h in space.values[name, "boundary"] if h != "dropped" or (info.kind == "boundary" and block)]
            for home in homes if info.needs_input else ["device"]:
                for saved in space.values[name, "saved"] if info.offloadable_bytes else ("device",):
                    away = saved != "device" or home in ("host", "nvme")
                    for tier, keep in space.values[name, "parameters"]:
                        for group in space.values[name, "optimizer"]:
                            for lead in lead_values if tier != "device" or group.tier != "device" else (0,):
                                for back in lead_values if away else (0,):
                                    options[BlockPlan(choice, home, saved, tier, keep, lead, back, group)] = None
        result.append(list(options))
    return result


def size_of(instance: I.Instance) -> int:
    """Number of plans before those outside the space are left out."""
    total = 0
    for micro_batch in instance.micro_batches:
        count = len(instance.allowed.step_modes)
        for options in _options(instance, micro_batch):
            count *= len(options)
        total += count
    return total


def plans(instance: I.Instance) -> Iterator[Plan]:
    """Every plan of the space."""
    for micro_batch in instance.micro_batches:
        for blocks in product(*_options(instance, micro_batch)):
            for mode in instance.allowed.step_modes:
                try:
                    plan = Plan(blocks, micro_batch, instance.rounds(micro_batch), mode)
                    plan.check(instance)
                except (PlanError, SchemaError):
                    continue
                yield plan


def optimum(instance: I.Instance) -> tuple[Plan, Outcome] | None:
    """The fastest plan that fits, or None."""
    simulator = Simulator(instance)
    best: tuple[Plan, Outcome] | None = None
    for plan in plans(instance):
        outcome = simulator.run(plan)
        if outcome.fits and (best is None or outcome.step_seconds < best[1].step_seconds):
            best = plan, outcome
    return best
