"""The lasting home of each block's low-precision parameters: a flat host buffer, or NVMe.

DeepSpeed and the user's code read a parameter through `ds_tensor` (gathering, saving, exporting). For a block on NVMe
that is an empty shell; whoever gathers one of its parameters first has the block *checked out* to host memory, and it
is checked in again (written back only if something changed it) before the next fetch from NVMe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Parameter

from lazytrain_ds.errors import PlanError
from lazytrain_ds.runtime.layout import BlockLayout, SubGroup
from lazytrain_ds.runtime.parameters import Part, StagingPool

__all__ = ["UPDATE_BUFFERS", "GroupBuffers", "NewWeights", "ParameterHomes"]

UPDATE_BUFFERS = 2


class ParameterHomes:
    """`flats` is DeepSpeed's list of low-precision sub-group buffers; entries of blocks on NVMe are empty."""

    def __init__(
        self,
        layout: BlockLayout,
        on_nvme: Callable[[int], bool],
        empty_host: Callable[[int, torch.dtype], torch.Tensor],
        nvme: object = None,
    ) -> None:
        self.layout = layout
        self.nvme = nvme
        self.staging = StagingPool()
        self.on_nvme = frozenset(block.index for block in layout.blocks if on_nvme(block.index))
        self.flats: list[torch.Tensor] | None = None
        self.wait_for_update: Callable[[int], None] = lambda block: None
        self._empty_host = empty_host
        self._checked_out: dict[int, bool] = {}
        self._behind: deque[tuple[list[Any], tuple[torch.Tensor, ...]]] = deque()
        for block in layout.blocks:
            if block.index not in self.on_nvme:
                for part in block.parts:
                    part.host = empty_host(part.numel, part.dtype)

    # -- construction ------------------------------------------------------------------------------------------
    def place(self, sub_group: SubGroup) -> torch.Tensor:
        """Where DeepSpeed is to move a sub-group: its place in host memory, or an empty tensor for NVMe."""
        if sub_group.part.host is None:
            return torch.empty(0, dtype=sub_group.part.dtype)
        return sub_group.within(sub_group.part.host)

    def settle(self) -> None:
        """Move what DeepSpeed has not: frozen parameters into their buffers, whole blocks to NVMe, one at a time."""
        moved = {id(p) for group in self.layout.sub_groups if group.part.host is not None for p in group.parameters}
        for block in self.layout.blocks:
            for part in block.parts:
                buffer = part.host if part.host is not None else self.staging.take(part.numel, part.dtype)
                for parameter, offset, numel in part.entries:
                    if id(parameter) not in moved:
                        place = buffer.narrow(0, offset, numel)
                        place.copy_(parameter.ds_tensor.data.reshape(-1)[:numel])
                        parameter.ds_tensor.data = place if part.host is not None else buffer.new_empty(0)
                        parameter.ds_tensor.final_location = "not-nvme"
                if part.host is None:
                    self.nvme.write(part.key, buffer).wait()
                    self.staging.give(buffer)

    @contextmanager
    def at_hand(self, sub_group: SubGroup) -> Iterator[torch.Tensor]:
        """The sub-group's values for reading, wherever they live."""
        part = sub_group.part
        if part.host is not None:
            yield sub_group.within(part.host)
            return
        buffer = self.staging.take(part.numel, part.dtype)
        self.nvme.read(part.key, buffer).wait()
        try:
            yield sub_group.within(buffer)
        finally:
            self.staging.give(buffer)

    # -- updates -----------------------------------------------------------------------------------------------
    @contextmanager
    def open_for_update(
        self, block: int, sub_groups: tuple[SubGroup, ...], whole: bool, *, behind: bool = False
    ) -> Iterator[NewWeights]:
        """Gives where each sub-group's new weights are to be written; a block on NVMe goes home at the end.

        `whole`: the updates write all of these sub-groups; what they leave out (frozen parameters) is read first.
        `behind`: writes go on after the end, from `UPDATE_BUFFERS` staging buffers; a part's begins once `written` was
        said of all its sub-groups. `settle_writes` waits for them.
        Runs on the worker: what the main thread sees of a block on NVMe (`part.host` is None) does not change.
        """
        self.changed(block)
        parts = {id(group.part): group.part for group in sub_groups if group.part.host is None}
        possible_at = self.settle_writes(but=UPDATE_BUFFERS - 1) if parts else 0.0
        buffers: dict[int, torch.Tensor] = {}
        for key, part in parts.items():
            buffers[key] = self.staging.take(part.numel, part.dtype)
            written = sum(group.numel for group in sub_groups if group.part is part)
            if not whole or written < sum(numel for _, _, numel in part.entries):
                self.nvme.read(part.key, buffers[key]).wait()
        weights = NewWeights(self.nvme, sub_groups, parts, buffers, possible_at)
        yield weights
        weights.send_rest()
        if parts:
            # The store keeps the order of a key: the next fetch reads what is written here.
            self._behind.append((weights.tickets, tuple(buffers.values())))
        if not behind:
            self.settle_writes()

    def settle_writes(self, but: int = 0) -> float:
        """Wait for writes of updated blocks, oldest first, until `but` blocks' are under way; raise what went wrong.

        Returns when the last one ended (time.perf_counter(); 0 if there was none).
        """
        ended = 0.0
        while len(self._behind) > but:
            tickets, buffers = self._behind.popleft()
            for ticket in tickets:
                ticket.wait()
                ended = max(ended, ticket.end_seconds)
            for buffer in buffers:
                self.staging.give(buffer)
        return ended

    # -- another plan ------------------------------------------------------------------------------------------
    def move(self, block: int, to_nvme: bool) -> None:
        """Give a block another home, with no update under way and none of its parameters gathered.

        Where that fails (no space, no memory) the block stays where it is, whole.
        """
        if to_nvme == (block in self.on_nvme):
            return
        self.check_in_idle()
        parts = self.layout.blocks[block].parts
        if block in self._checked_out:
            raise PlanError(f"block {block} cannot be moved while its parameters are gathered")
        if to_nvme:
            try:
                for part in parts:
                    self.nvme.write(part.key, part.host).wait()
            except BaseException:
                self._forget_keys(parts)
                raise
            for part in parts:
                empty, part.host = part.host.new_empty(0), None
                for parameter, _, _ in part.entries:
                    parameter.ds_tensor.data = empty
            self.on_nvme |= {block}
        else:
            buffers = [self._empty_host(part.numel, part.dtype) for part in parts]
            for part, buffer in zip(parts, buffers, strict=True):
                self.nvme.read(part.key, buffer).wait()
            for part, buffer in zip(parts, buffers, strict=True):
                part.host = buffer
                for parameter, offset, numel in part.entries:
                    parameter.ds_tensor.data = buffer.narrow(0, offset, numel)
            self.on_nvme -= {block}
            self._forget_keys(parts)
        self._point_flats(block)

    def _forget_keys(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.key in self.nvme:
                self.nvme.delete(part.key)

    # -- for DeepSpeed and the user ------------------------------------------------------------------------------
    def check_out(self, blocks: Iterable[int], *, changing: bool = False) -> None:
        """Bring blocks from NVMe to host memory and point `ds_tensor` and `flats` at them; others may go home."""
        wanted = [block for block in blocks if block in self.on_nvme]
        if not wanted:
            return
        self.check_in_idle(keep=wanted)
        for block in wanted:
            if block not in self._checked_out:
                for part in self.layout.blocks[block].parts:
                    part.host = self.staging.take(part.numel, part.dtype)
                    self.nvme.read(part.key, part.host).wait()
                    for parameter, offset, numel in part.entries:
                        parameter.ds_tensor.data = part.host.narrow(0, offset, numel)
                self._point_flats(block)
                self._checked_out[block] = False
            if changing:
                self._checked_out[block] = True

    def changed(self, block: int) -> None:
        """Somebody wrote to a checked-out block: it must be written back."""
        if block in self._checked_out:
            self._checked_out[block] = True

    def check_in_idle(self, keep: Sequence[int] = ()) -> None:
        """Send checked-out blocks home, except those in `keep` and those with a parameter still gathered."""
        idle = [
            block
            for block in self._checked_out
            if block not in keep
            and all(p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in self.layout.blocks[block].parameters())
        ]
        for block in idle:
            self.wait_for_update(block)
            dirty = self._checked_out.pop(block)
            for part in self.layout.blocks[block].parts:
                self._send_home(part, dirty)
            self._point_flats(block)

    def _send_home(self, part: Part, dirty: bool) -> None:
        buffer, part.host = part.host, None
        for parameter, _, _ in part.entries:
            parameter.ds_tensor.data = buffer.new_empty(0)
        if dirty:
            self.nvme.write(part.key, buffer).wait()
        self.staging.forget(buffer)  # an exported state dict may hold views of it

    def _point_flats(self, block: int) -> None:
        if self.flats is not None:
            for sub_group in self.layout.of_block(block):
                self.flats[sub_group.index] = self.place(sub_group)

    @contextmanager
    def frozen_shown(self) -> Iterator[None]:
        """`ds_tensor` of frozen parameters on NVMe shows the swap file, for reading through once (a checkpoint)."""
        self.check_in_idle()
        shown: list[Parameter] = []
        try:
            for part, entries in self._frozen_on_nvme():
                content = self.nvme.mapped(part.key)
                for parameter, offset, numel in entries:
                    parameter.ds_tensor.data = content.narrow(0, offset, numel)
                    shown.append(parameter)
            yield
        finally:
            for parameter in shown:
                parameter.ds_tensor.data = parameter.ds_tensor.new_empty(0)

    def load_frozen(self, values: Callable[[Parameter], torch.Tensor]) -> None:
        """Replace frozen parameters on NVMe by `values(parameter)`, one block at a time."""
        self.check_in_idle()
        for part, entries in self._frozen_on_nvme():
            buffer = self.staging.take(part.numel, part.dtype)
            self.nvme.read(part.key, buffer).wait()
            for parameter, offset, numel in entries:
                buffer.narrow(0, offset, numel).copy_(values(parameter).reshape(-1))
            self.nvme.write(part.key, buffer).wait()
            self.staging.give(buffer)

    def frozen_on_nvme(self) -> list[Parameter]:
        """Parameters on NVMe that no sub-group owns."""
        return [parameter for _, entries in self._frozen_on_nvme() for parameter, _, _ in entries]

    def _frozen_on_nvme(self) -> Iterator[tuple[Part, list[tuple[Parameter, int, int]]]]:
        trained = {id(parameter) for group in self.layout.sub_groups for parameter in group.parameters}
        for block in sorted(self.on_nvme - self._checked_out.keys()):
            for part in self.layout.blocks[block].parts:
                entries = [entry for entry in part.entries if id(entry[0]) not in trained]
                if entries:
                    yield part, entries


class NewWeights:
    """Where the new weights of a block's sub-groups go; called with a sub-group it gives its place."""

    def __init__(
        self,
        nvme: Any,
        sub_groups: Sequence[SubGroup],
        parts: dict[int, Part],
        buffers: dict[int, torch.Tensor],
        possible_at: float,
    ) -> None:
        self._nvme, self._parts, self._buffers = nvme, parts, buffers
        self.possible_at = possible_at  # when the last staging buffer waited for came free; 0 if none was
        self._missing = {key: sum(id(group.part) == key for group in sub_groups) for key in parts}
        self.tickets: list[Any] = []

    def __call__(self, sub_group: SubGroup) -> torch.Tensor:
        part = sub_group.part
        return sub_group.within(self._buffers[id(part)] if part.host is None else part.host)

    def written(self, sub_group: SubGroup) -> None:
        """The place is filled: a part on NVMe whose sub-groups all are goes home, ahead of the states just stepped."""
        key = id(sub_group.part)
        if key in self._missing:
            self._missing[key] -= 1
            if not self._missing[key]:
                self._send(key)

    def send_rest(self) -> None:
        """Start the writes of parts not all of whose sub-groups were said to be written."""
        for key in list(self._missing):
            self._send(key)

    def _send(self, key: int) -> None:
        del self._missing[key]
        self.tickets.append(self._nvme.write(self._parts[key].key, self._buffers[key]))


class GroupBuffers:
    """Stands where upstream expects one flat buffer per parameter group: hands out each sub-group's place."""

    def __init__(self, sub_groups: Sequence[SubGroup], homes: ParameterHomes) -> None:
        self._places: dict[int, tuple[int, torch.Tensor]] = {}
        at = 0
        for sub_group in sub_groups:
            self._places[at] = (sub_group.numel, homes.place(sub_group))
            at += sub_group.numel
        self._numel = at

    def numel(self) -> int:
        return self._numel

    def narrow(self, dimension: int, start: int, length: int) -> torch.Tensor:
        numel, place = self._places[start]
        assert numel == length
        return place
