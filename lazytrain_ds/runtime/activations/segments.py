"""Dropped boundaries: blocks whose inputs are made again, in backward, from the last input that was kept."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lazytrain_ds.errors import LazyTrainError
from lazytrain_ds.runtime.activations.storages import REMADE, Handle, KeptAccount, KeptHandle, storage_key, version_of

if TYPE_CHECKING:
    from lazytrain_ds.runtime.activations.blocks import BlockCall

__all__ = ["DroppedHandle", "OutputRecord", "Segment", "links_between"]


@dataclass
class OutputRecord:
    """One output tensor of a block as it left: enough to recognise it as a later block's input, without holding it."""

    storage: StorageWeakRef
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> OutputRecord | None:
        """Record `tensor`; None for a sparse one, which is never recognised."""
        if tensor.layout is not torch.strided:
            return None
        return cls(StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.size(),
                   tuple(tensor.stride()), tensor.dtype, version_of(tensor))  # fmt: skip

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is that output, unchanged. ZeRO-3 re-wraps tensors between blocks: same storage, other id.

        The weak reference keeps the storage's address from being given to another one, so equal means the same.
        """
        return (
            storage_key(tensor) == self.storage.cdata
            and tensor.storage_offset() == self.offset
            and tensor.size() == self.size
            and tuple(tensor.stride()) == self.stride
            and tensor.dtype == self.dtype
            and version_of(tensor) == self.version
        )


def links_between(outputs: list[OutputRecord | None], inputs: list[torch.Tensor]) -> dict[int, int]:
    """{position in `inputs`: position in `outputs`} for inputs that are the previous block's outputs."""
    links = {}
    for position, tensor in enumerate(inputs):
        for index, record in enumerate(outputs):
            if record is not None and record.matches(tensor):
                links[position] = index
                break
    return links


class Segment:
    """A run of blocks of which only the first one's input was kept. Owned by the handles of the dropped inputs.

    `remade[p]`: inputs of the segment's p-th call that were made again and not used yet, by position.
    """

    def __init__(self, start: BlockCall) -> None:
        self.calls: list[BlockCall] = [start]
        self._remade: dict[int, dict[int, KeptHandle]] = {}
        self._prepared: set[int] = set()
        start.segment = weakref.ref(self)

    def extend(self, call: BlockCall) -> int:
        """Add the next block; returns its place in the segment."""
        self.calls.append(call)
        call.segment = weakref.ref(self)
        # All of the segment's inputs are needed when its last block is: that is when the first one must be back.
        self.calls[0].needed_at = call.block
        return len(self.calls) - 1

    def prepare(self, place: int) -> None:
        """Make the inputs of the call at `place` again, once per backward, unless they are there."""
        if place in self._prepared:
            return
        self._prepared.add(place)
        if set(self._remade.get(place, {})) != set(self.calls[place].links):
            self._remake(place)

    def take(self, place: int, position: int) -> torch.Tensor:
        """Input number `position` of the call at `place`, made again if need be; given out once."""
        if position not in self._remade.get(place, {}):
            self._remake(place)
        inputs = self._remade[place]
        tensor = inputs.pop(position).restore()
        if not inputs:
            del self._remade[place]
        return tensor

    def _remake(self, place: int) -> None:
        """Re-run from the last materialised input before `place`; the inputs on the way are kept for their blocks."""
        known = [p for p, inputs in self._remade.items()
                 if p < place and set(inputs) == set(self.calls[p].links)]  # fmt: skip
        start = max(known, default=0)
        if start:
            inputs = {position: handle.restore() for position, handle in self._remade[start].items()}
        else:
            inputs = self.calls[0].boundary()
        for p in range(start, place):
            call, following = self.calls[p], self.calls[p + 1]
            started = time.perf_counter()
            outputs = call.rerun(inputs)
            call.frame.mover.report("recompute", call.block, "compute", started, 0)
            inputs = {}
            kept: dict[int, KeptHandle] = {}
            account = KeptAccount(following.block, REMADE)
            for position, index in following.links.items():
                if index >= len(outputs):
                    raise LazyTrainError(
                        f"block {call.block}: its second run returned {len(outputs)} tensors, the first one more. Its "
                        "forward is not deterministic; keep its activations."
                    )
                tensor = outputs[index].detach()
                inputs[position] = tensor
                kept[position] = account.keep(tensor)
            account.settle(call.frame.mover)
            self._remade[p + 1] = kept

    def forget(self) -> None:
        """Drop what was made again and not used."""
        self._remade.clear()
        self._prepared.clear()


class DroppedHandle(Handle):
    """An input of a block that was not kept."""

    __slots__ = ("_place", "_position", "_segment")

    def __init__(self, segment: Segment, place: int, position: int) -> None:
        self._segment, self._place, self._position = segment, place, position

    def restore(self) -> torch.Tensor:
        return self._segment.take(self._place, self._position)
