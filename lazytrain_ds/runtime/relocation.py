"""From one plan to another between two optimizer steps: only what has another home moves, and no bit of it changes.

Where things are is read from what holds them (`StateHomes.tiers`, `ParameterHomes.on_nvme`,
`BlockParameters.resident`), never from the old plan. So a move that failed half-way is continued, or undone, by another
move.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lazytrain_ds.errors import PlanError
from lazytrain_ds.planning.schema import TierName
from lazytrain_ds.runtime.policy import Policy

if TYPE_CHECKING:
    from lazytrain_ds.runtime.stage3 import LazyStage3

__all__ = ["Moves", "can_move", "move"]

# The first to go are those that leave memory: so the rest finds room. (from, to) as positions in this order.
_SPEED: dict[str, int] = {"device": 0, "host": 1, "nvme": 2}


@dataclass(frozen=True)
class Moves:
    """What moved: blocks whose parameters, sub-groups whose states, and the bytes of both."""

    parameters: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    moved_bytes: int = 0

    def __str__(self) -> str:
        if not self.parameters and not self.states:
            return "nothing had to move"
        return f"parameters of {len(self.parameters)} block(s) and states of {len(self.states)} sub-group(s) moved"


def can_move(optimizer: LazyStage3) -> bool:
    """Whether nobody holds a parameter gathered (then its home must stay). Call it between steps."""
    if not optimizer._lt_one_rank:
        return False
    optimizer._lt_store.release_all()
    return all(p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in optimizer.module.parameters())


def move(optimizer: LazyStage3, policy: Policy) -> Moves:
    """Give every block's parameters and states the home that `policy` names; no update is under way.

    PlanError where that would change numerics (another state precision), or where somebody holds gathered what moves;
    SwapError, DeviceMemoryError or HostMemoryError where a home has no room: then what had moved stays moved.
    """
    setup = optimizer.lazytrain
    if not optimizer._lt_one_rank:
        raise PlanError("with more than one rank parameters and states stay where they are")
    for sub_group in optimizer._lt_layout.sub_groups:
        old, new = (each.sub_group(sub_group.block).precision for each in (setup.policy, policy))
        if old != new:
            raise PlanError(f"block {sub_group.block}: its states are {old}, and another plan cannot make them {new}")
    store, homes, states = optimizer._lt_store, optimizer._lt_homes, optimizer._lt_states
    store.nvme = homes.nvme = states.store = setup.nvme
    nobody_gathers = can_move(optimizer)
    homes.check_in_idle()
    wanted = sorted(_wanted(optimizer, policy), key=_order)
    if wanted and not nobody_gathers:
        raise PlanError("parameters are gathered at the moment; the plan can change once they are given back")
    moved: dict[str, list[int]] = {"parameters": [], "states": []}
    byte_count = 0
    for kind, index, _, tier in wanted:
        moved[kind].append(index)
        if kind == "parameters":
            store.set_resident(index, tier == "device")
            homes.move(index, tier == "nvme")
            byte_count += store.blocks[index].byte_count
            continue
        master = states.move(index, tier)
        first, last = (optimizer._lt_layout.sub_groups[index].parameters[position] for position in (0, -1))
        master.ds_id = f"{first.ds_id}_{last.ds_id}"
        optimizer.fp32_partitioned_groups_flat[index] = master
        byte_count += optimizer._lt_layout.sub_groups[index].numel * torch.float32.itemsize
    store.trim()
    homes.staging.trim()
    return Moves(tuple(moved["parameters"]), tuple(moved["states"]), byte_count)


def _wanted(optimizer: LazyStage3, policy: Policy) -> Iterator[tuple[str, int, TierName, TierName]]:
    """(what, index, present tier, tier wanted) of everything that has to move."""
    for block in optimizer._lt_store.blocks:
        here: TierName = "nvme" if block.index in optimizer._lt_homes.on_nvme else "host"
        here = "device" if block.resident else here
        tier = policy.parameter_tier(block.index)
        if tier != here:
            yield "parameters", block.index, here, tier
    for sub_group in optimizer._lt_layout.sub_groups:
        here = optimizer._lt_states.tiers[sub_group.index]
        tier = policy.sub_group(sub_group.block).tier
        if tier != here:
            yield "states", sub_group.index, here, tier


def _order(entry: tuple[str, int, TierName, TierName]) -> tuple[int, int]:
    _, _, before, tier = entry
    faster = _SPEED[before] - _SPEED[tier]
    return (faster, _SPEED[tier] if faster > 0 else -_SPEED[tier])
