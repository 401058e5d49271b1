"""Rows of the count model about gradients leaving the device: how long backward lasts because of them.

At most two gradients are on the device, so when the last block that is stepped on the host (a *sender*) begins its
backward, all gradients but those of the last two senders have left; the first one could leave no earlier than the end
of the last block's backward.
"""

from __future__ import annotations

from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.counts import Group, Key, Row

__all__ = ["paced", "remaining", "senders"]


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


def paced(costs: Costs, groups: list[Group], group_of: list[int]) -> Row:
    """Backward, sender by sender: each lasts at least as long as the gradient of the sender before it takes to leave.

    With at most two gradients on the device, a sender begins when the copy of the last but one before it has ended,
    and that copy began no earlier than the visit between them could. So a short visit saves nothing while a longer one
    makes no use of the link. The first and the last sender are let off; blocks that send nothing count as no time.
    """
    n = len(costs.blocks)
    result = Row("compute")
    inner = sorted({group_of[block] for block in range(1, n - 1)} - {group_of[0], group_of[n - 1]})
    inner = [g for g in inner if senders(groups[g], g)]
    if not inner:
        return result
    result.constant = costs.blocks[n - 1].backward_seconds + costs.blocks[0].backward_seconds
    copy = min(costs.d2h.seconds(groups[g].numbers.gradient_bytes) for g in inner)
    shortest = copy
    for g in inner:
        group = groups[g]
        menu = costs.choices[group.blocks[0]]
        longest = 0.0
        for index, option in enumerate(group.activations):
            seconds = group.numbers.backward_seconds + menu[option.choice][2]
            shortest = min(shortest, seconds)
            longest = max(longest, seconds, copy)
            result.add(Key(g, "activation", index), max(seconds, copy))
        sending = senders(group, g)
        for index in range(len(group.optimizers)):
            key = Key(g, "optimizer", index)
            if key not in sending:
                result.add(key, -longest)
    result.constant -= 2 * (copy - shortest)
    return result
