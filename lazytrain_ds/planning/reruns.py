"""Rows of the count model about re-running blocks of a segment: their parameters are needed once more.

A re-run block's parameters are fetched again for it unless they are resident, kept since the forward, or held from the
re-run to the backward, which the longest lead allows to the last few blocks of each segment only.
"""

from __future__ import annotations

from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.counts import Group, Key, Row

__all__ = ["refetches"]


def refetches(costs: Costs, groups: list[Group], longest_lead: int) -> tuple[Row, int]:
    """At least so many re-run blocks fetch their parameters once more; and the group for which that is cheapest."""
    result = Row("refetches")
    able: list[int] = []
    # What a borrower fetched may still be there.
    result.constant -= len({owner for owned in costs.borrowed.values() for owner in owned})
    for g, group in enumerate(groups):
        menu = costs.choices[group.blocks[0]]
        for index, option in enumerate(group.activations):
            if option.boundary == "dropped":
                result.add(Key(g, "activation", index), 1.0)
            elif menu[option.choice][4]:
                # From a re-run to the backward it is an even number of visits.
                result.add(Key(g, "activation", index), -float(longest_lead // 2))
        if not any(choice[4] for choice in menu.values()):
            continue
        if not group.numbers.parameter_bytes:
            result.constant -= group.size
            continue
        able.append(g)
        for index, (tier, keep) in enumerate(group.parameters):
            if tier == "device" or keep:
                result.add(Key(g, "parameter", index), -1.0)
    return result, min(able, key=lambda g: groups[g].numbers.parameter_bytes, default=0)
