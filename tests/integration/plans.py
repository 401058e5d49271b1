"""Seeded random plans over a real run's Instance: any decision that the plan space and this runtime allow."""

from __future__ import annotations

import random

from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import BlockPlan, Plan, SubGroupPlan


def random_plan(instance: Instance, seed: int) -> Plan:
    """The plan of `seed`. Half of the blocks, on average, lie in segments or hold something outside the device."""
    draw = random.Random(seed)
    allowed = instance.allowed
    micro_batch = instance.micro_batches[0]
    longest_lead = min(3, allowed.longest_lead)
    blocks: list[BlockPlan] = []
    segment = 0
    groups = [
        SubGroupPlan(tier, mode.precision, mode.step_device)
        for tier in allowed.optimizer_tiers
        for mode in instance.optimizer_modes
        if (mode.step_device == "device") == (tier == "device")
    ]
    for index in range(instance.block_count):
        menu = instance.costs(index, micro_batch).menu
        # Recomputed blocks come in runs, or segments would be rare.
        before = blocks[-1].choice if blocks else ""
        choice = menu[-1] if before == menu[-1].name and draw.random() < 0.5 else draw.choice(menu)
        homes: list[str] = list(allowed.boundary_tiers)
        follows = choice.kind == "boundary" and before == choice.name
        if follows and allowed.drop_boundaries and segment < allowed.longest_segment:
            homes += ["dropped"] * len(homes)
        boundary = draw.choice(homes)
        segment = segment + 1 if boundary == "dropped" else 1
        blocks.append(
            BlockPlan(
                choice=choice.name,
                boundary=boundary,  # type: ignore[arg-type]
                saved_tier=draw.choice(allowed.saved_tiers) if choice.offloadable_bytes else "device",
                parameter_tier=draw.choice(allowed.parameter_tiers),
                keep_parameters=draw.random() < 0.4,
                parameter_lead=draw.randint(0, longest_lead),
                activation_lead=draw.randint(0, longest_lead),
                optimizer=draw.choice(groups),
            )
        )
    plan = Plan(
        tuple(blocks),
        micro_batch,
        instance.rounds(micro_batch),
        optimizer_step=draw.choice(allowed.step_modes),
        origin=f"random {seed}",
    )
    plan.check(instance)
    return plan
