"""Random plans of an instance: every plan draws its own mixture of options, so that plans differ as wholes."""

from __future__ import annotations

import random

from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.moves import Space
from lazytrain_ds.planning.plan import BlockPlan, Plan


def random_plan(instance: Instance, rng: random.Random) -> Plan:
    """A valid plan (it may exceed the caps)."""
    micro_batch = rng.choice(instance.micro_batches)
    space = Space(instance, micro_batch)
    weights: dict[object, float] = {}

    def draw(kind: str, values: tuple) -> object:
        if not values:
            return None
        mixture = [weights.setdefault((kind, value), rng.expovariate(1.0) ** 3) for value in values]
        return rng.choices(values, mixture)[0]

    lead, back = (rng.randint(0, instance.allowed.longest_lead) for _ in range(2))
    blocks = []
    for index, name in enumerate(instance.order):
        choice, saved, boundary = draw(name + "a", space.values[name, "activation"])
        parameters = draw(name + "p", space.values[name, "parameters"]) or ("host", False)
        group = draw(name + "o", space.values[name, "optimizer"])
        block = BlockPlan(choice, boundary, saved, *parameters, lead, back)
        if group is not None:
            block = space.put(block, "optimizer", group)
        if index == 0 and block.boundary == "dropped":
            block = space.put(block, "boundary", next(h for h in space.values[name, "boundary"] if h != "dropped"))
        blocks.append(block)
    mode = rng.choice(instance.allowed.step_modes)
    return Plan(tuple(space.normalize(blocks)), micro_batch, instance.rounds(micro_batch), mode)
