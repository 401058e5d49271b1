"""How parameters lie in flat host buffers: per block and dtype one for what is trained and one for what is frozen.

A *sub-group* is ZeRO-3's optimizer unit: the trainable parameters of one (parameter group, block). Inside the block's
buffer every sub-group is contiguous and starts at a 256-byte boundary. So one copy brings all of them, an update writes
its sub-group in place, and a block on NVMe goes home without the frozen weights, which nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from lazytrain_ds.runtime.parameters import BlockParameters, Part

__all__ = ["ALIGNMENT_BYTES", "BlockLayout", "SubGroup", "build_layout"]

ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class SubGroup:
    """Trainable parameters of one (parameter group, block), contiguous in the block's buffer."""

    index: int
    group: int
    block: int
    parameters: tuple[Parameter, ...]
    part: Part
    offset: int
    numel: int

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its place in a buffer of its part."""
        return buffer.narrow(0, self.offset, self.numel)


@dataclass(frozen=True)
class BlockLayout:
    """Everything DeepSpeed and the parameter store need to know about where parameters lie."""

    blocks: tuple[BlockParameters, ...]
    sub_groups: tuple[SubGroup, ...]

    def of_block(self, block: int) -> tuple[SubGroup, ...]:
        """The sub-groups of one block."""
        return tuple(sub_group for sub_group in self.sub_groups if sub_group.block == block)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def build_layout(
    parameters_of_block: Sequence[Sequence[Parameter]],
    groups: Sequence[Sequence[Sequence[Parameter]]],
    numel_of: Callable[[Parameter], int],
) -> BlockLayout:
    """Assign places; nothing is allocated or copied yet.

    `parameters_of_block[b]`: all parameters that block b owns. `groups[g][k]`: parameters of the k-th sub-group of
    parameter group g. `numel_of`: elements of a parameter that this rank holds. Sub-groups are numbered group by group,
    which is DeepSpeed's order.
    """
    block_of = {id(p): block for block, owned in enumerate(parameters_of_block) for p in owned}
    numbered: list[tuple[int, int, Sequence[Parameter]]] = []
    for group, sub_groups in enumerate(groups):
        for members in sub_groups:
            numbered.append((len(numbered), group, members))
    by_block: dict[int, list[tuple[int, int, Sequence[Parameter]]]] = {}
    for entry in numbered:
        by_block.setdefault(block_of[id(entry[2][0])], []).append(entry)
    blocks: list[BlockParameters] = []
    placed: dict[int, SubGroup] = {}
    for block, owned in enumerate(parameters_of_block):
        in_groups = {id(p) for _, _, members in by_block.get(block, []) for p in members}
        units: list[tuple[int | None, int | None, Sequence[Parameter]]] = list(by_block.get(block, []))
        units += [(None, None, (p,)) for p in owned if id(p) not in in_groups]
        by_kind: dict[tuple[torch.dtype, bool], list[tuple[int | None, int | None, Sequence[Parameter], int]]] = {}
        ends: dict[tuple[torch.dtype, bool], int] = {}
        for index, group, members in units:
            dtype = members[0].ds_tensor.dtype
            kind = (dtype, index is None)
            step = max(1, ALIGNMENT_BYTES // dtype.itemsize)
            start = _round_up(ends.get(kind, 0), step)
            by_kind.setdefault(kind, []).append((index, group, members, start))
            ends[kind] = start + sum(numel_of(p) for p in members)
        parts: list[Part] = []
        for (dtype, frozen), places in by_kind.items():
            entries: list[tuple[Parameter, int, int]] = []
            part = Part(dtype, ends[dtype, frozen], entries, key=f"parameters/{block}/{len(parts)}")
            for index, group, members, start in places:
                at = start
                for p in members:
                    entries.append((p, at, numel_of(p)))
                    at += numel_of(p)
                if index is not None and group is not None:
                    placed[index] = SubGroup(index, group, block, tuple(members), part, start, at - start)
            parts.append(part)
        blocks.append(BlockParameters(block, parts))
    return BlockLayout(tuple(blocks), tuple(placed[index] for index, _, _ in numbered))
