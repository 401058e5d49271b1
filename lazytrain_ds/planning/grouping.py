"""Which blocks count as equal, and what each group of them may choose."""

from __future__ import annotations

from typing import Any, Final

from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.counts import ActivationOption, Group
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.moves import Space
from lazytrain_ds.planning.plan import SubGroupPlan

__all__ = ["make_groups"]

# Positions from either end that get a group of their own: what happens there is exposed or sets the peak.
_HEAD: Final = 1
_TAIL: Final = 2


def make_groups(instance: Instance, costs: Costs, space: Space) -> tuple[list[Group], list[int]]:
    """The groups, and each block's group: by class, but for the ends and owners of shared parameters."""
    n = instance.block_count
    owners = {owner for _, owner in instance.borrows}
    groups: list[Group] = []
    group_of: list[int] = []
    found: dict[tuple[Any, ...], int] = {}
    for block, name in enumerate(instance.order):
        alone = block < _HEAD or block >= n - _TAIL or block in owners
        key = (name, block if alone else -1)
        if key not in found:
            found[key] = len(groups)
            groups.append(
                Group(
                    [],
                    costs.blocks[block],
                    _activation_options(instance, costs, space, block, alone),
                    list(space.values[name, "parameters"]) or [("host", False)],
                    list(space.values[name, "optimizer"]) or [SubGroupPlan()],
                )
            )
        groups[found[key]].blocks.append(block)
        group_of.append(found[key])
    return groups, group_of


def _activation_options(
    instance: Instance, costs: Costs, space: Space, block: int, alone: bool
) -> list[ActivationOption]:
    name = instance.order[block]
    result: list[ActivationOption] = []
    for choice in space.values[name, "choice"]:
        _, offloadable, _, needs_input, is_boundary = costs.choices[block][choice]
        saved = space.values[name, "saved"] if offloadable else ()
        if needs_input:
            homes = [home for home in space.values[name, "boundary"] if home != "dropped"]
            if is_boundary and "dropped" in space.values[name, "boundary"] and (block > 0 or not alone):
                homes.append("dropped")
        else:
            homes = ["device"]
        for tier in saved or ("device",):
            result.extend(ActivationOption(choice, tier, home) for home in homes)
    return result
