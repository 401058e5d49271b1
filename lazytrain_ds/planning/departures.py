"""Rows of the count model about gradients leaving the device: how long backward lasts because of them.

At most two gradients are on the device, so when the last block that is stepped on the host (a *sender*) begins its
backward, all gradients but those of the last two senders have left; the first one could leave no earlier than the end
of the last block's backward.
"""

from __future__ import annotations

from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.counts import Group, Key, Row

__all__ = ["remaining", "senders"]


def senders(group: Group, g: int) -> list[Key]:
    """The optimizer options of group `g` whose gradients leave the device."""
    if not group.numbers.trainable:
        return []
    return [Key(g, "optimizer", i) for i, option in enumerate(group.optimizers) if option.step_device == "host"]


def remaining(costs: Costs, groups: list[Group], group_of: list[int], *, last: bool) -> Row:
    """At most so many D2H seconds of gradients are left when the last sender's backward begins, its own included.

    These are two blocks of the body, or block 0 and one of the body; the last block's is among them only where fewer
    than two others send (`last` False: it is not counted anyway).
    """
    n = len(costs.blocks)
    result = Row("remaining gradients")

    def seconds(block: int) -> float:
        return costs.d2h.seconds(costs.blocks[block].gradient_bytes)

    body = [block for block in range(1, n - 1) if costs.blocks[block].trainable]
    largest = max((seconds(block) for block in body), default=0.0)
    result.constant = 2 * largest
    if last:
        own = seconds(n - 1)
        # Gone once two of the body send; a straight line from one sender to all of them is no less than that.
        result.constant += own
        if len(body) > 1:
            share = own / (len(body) - 1)
            result.constant += share
            for block in body:
                g = group_of[block]
                for key in senders(groups[g], g):
                    result.add(key, -share / groups[g].size)
    if n > 1:
        for key in senders(groups[group_of[0]], group_of[0]):
            result.add(key, seconds(0) - largest)
    return result
