"""A frame: everything one forward pass leaves for its backward. Owned by the handles in the graph."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import Parameter

from lazytrain_ds.planning.schema import TierName
from lazytrain_ds.runtime.activations.storages import (
    BOUNDARY,
    Handle,
    KeptHandle,
    KeptStorage,
    OffloadedHandle,
    OffloadedStorage,
    storage_key,
    version_of,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lazytrain_ds.runtime.activations.blocks import BlockCall
    from lazytrain_ds.runtime.activations.mover import Mover
    from lazytrain_ds.runtime.activations.segments import OutputRecord, Segment

__all__ = ["Frame", "ParameterAccess", "ParameterHandle", "ParameterView", "unpack"]

OUTSIDE = -1
"""Block number of what is saved outside wrapped blocks."""


class ParameterView(Protocol):
    """Where a tensor lies inside a parameter."""

    def rebuild(self) -> torch.Tensor:
        """The same view of the parameter's current data, which must be present."""


class ParameterAccess(Protocol):
    """What activations need from whoever fetches and releases parameters."""

    def hold(self, index: int) -> AbstractContextManager[None]:
        """Block `index`'s parameters, its submodules' included, are present and stay for the duration; nests."""

    def backward_begins(self, index: int) -> None:
        """The re-runs that block `index`'s backward had to wait for are over: its parameters are needed now."""

    def view_of(self, tensor: torch.Tensor) -> ParameterView | None:
        """The place of `tensor` inside a parameter, if its memory may be reused or emptied before backward."""


class ParameterHandle(Handle):
    """A view of a parameter slot. The slot holds other weights by the time of backward, so only the place is kept."""

    __slots__ = ("_view",)

    def __init__(self, view: ParameterView) -> None:
        self._view = view

    def _restore(self) -> torch.Tensor:
        return self._view.rebuild()


def unpack(packed: torch.Tensor | Handle) -> torch.Tensor:
    """The other half of every pack hook here."""
    return packed if isinstance(packed, torch.Tensor) else packed.restore()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its storage and nothing else, so that the storage can be moved and put back."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


class Frame:
    """One per forward pass; two forwards before a backward have two."""

    def __init__(self, mover: Mover, parameters: ParameterAccess | None, device: torch.device,
                 minimum_offload_bytes: int) -> None:  # fmt: skip
        self.mover, self.parameters, self.device = mover, parameters, device
        self._minimum_offload_bytes = minimum_offload_bytes
        self._storages: dict[tuple[int, int, str], weakref.ref[KeptStorage | OffloadedStorage]] = {}
        self.calls: list[weakref.ref[BlockCall]] = []
        self.previous: BlockCall | None = None
        self.previous_segment: Segment | None = None
        self.outputs: list[OutputRecord] = []
        self.seen: dict[int, int] = {}

    # -- packing -----------------------------------------------------------------------------------------------
    def pack_outside(self, tensor: torch.Tensor) -> torch.Tensor | Handle:
        """Pack hook for everything outside wrapped blocks."""
        if isinstance(tensor, Parameter):
            return tensor
        return self.parameter_view(tensor) or self.keep(tensor, OUTSIDE, "saved")

    def parameter_view(self, tensor: torch.Tensor) -> ParameterHandle | None:
        """A handle for a view of a parameter that may go away; None for anything else."""
        if self.parameters is None:
            return None
        view = self.parameters.view_of(tensor)
        return None if view is None else ParameterHandle(view)

    def keep(self, tensor: torch.Tensor, block: int, role: str) -> KeptHandle:
        """The tensor stays where it is; counted once per storage."""
        if not _is_plain(tensor) or tensor.device.type != self.device.type:
            return KeptHandle(tensor, None)
        key = (storage_key(tensor), 0, "device")
        reference = self._storages.get(key)
        storage = reference() if reference is not None else None
        if storage is None:
            storage = KeptStorage(self.mover, tensor.untyped_storage().nbytes(), block, role)
            self._storages[key] = weakref.ref(storage)
        return KeptHandle(tensor, storage)

    def keep_uncounted(self, tensor: torch.Tensor) -> KeptHandle:
        """Something the block was given and does not own: a mask, rotary tables, a buffer."""
        return KeptHandle(tensor, None)

    def offload(self, tensor: torch.Tensor, block: int, role: str, tier: TierName,
                call: BlockCall | None = None) -> Handle:  # fmt: skip
        """The tensor's storage goes to `tier`, once however many views are saved of it."""
        storage = tensor.untyped_storage()
        byte_count = storage.nbytes()
        if (
            tier == "device" or not _is_plain(tensor) or tensor.device.type != self.device.type
            or byte_count < (1 if role == BOUNDARY else max(1, self._minimum_offload_bytes))
        ):  # fmt: skip
            return self.keep(tensor, block, role)
        reference = self._storages.get((storage._cdata, 0, "device"))
        if reference is not None and reference() is not None:  # someone keeps it anyway
            return self.keep(tensor, block, role)
        key = (storage._cdata, version_of(tensor), tier)
        reference = self._storages.get(key)
        moved = reference() if reference is not None else None
        if moved is None:
            moved = OffloadedStorage(self.mover, tensor, block, role, tier)
            self._storages[key] = weakref.ref(moved)
            if call is not None:
                call.offloaded.append(weakref.ref(moved))
        elif call is not None and moved.block != block:
            call.offloaded.append(weakref.ref(moved))
        return OffloadedHandle(tensor, moved)

    # -- what is there -----------------------------------------------------------------------------------------
    def living(self) -> list[KeptStorage | OffloadedStorage]:
        """Storages that the graph still holds."""
        return [storage for reference in list(self._storages.values()) if (storage := reference()) is not None]

    def held_bytes(self) -> tuple[dict[int, int], dict[int, int]]:
        """Device bytes by block: (saved inside, boundaries)."""
        saved: dict[int, int] = {}
        boundary: dict[int, int] = {}
        for storage in self.living():
            table = boundary if storage.role == BOUNDARY else saved
            table[storage.block] = table.get(storage.block, 0) + storage.device_bytes
        return saved, boundary

    # -- backward ----------------------------------------------------------------------------------------------
    def prefetch(self, block: int) -> None:
        """Backward has reached `block`: start bringing back what is needed within each block's lead."""
        self.mover.advance()
        for reference in reversed(self.calls):
            call = reference()
            if call is None or call.fetched or call.needed_at > block:
                continue
            if call.needed_at + call.action.lead < block:
                continue
            if not call.prefetch():
                return

    def drop_copies(self) -> None:
        """A backward is over: what is still held (another backward may come) goes home."""
        for storage in self.living():
            if isinstance(storage, OffloadedStorage):
                storage.drop_copy()
        self._forget_remade()

    def _forget_remade(self) -> None:
        for reference in self.calls:
            call = reference()
            if call is not None:
                call.fetched = False
                if (segment := call.segment()) is not None:
                    segment.forget()

    def left(self) -> None:
        """The forward is over: let go of what only the next block would have asked for."""
        self.previous = self.previous_segment = None
        self.outputs = []
        self.seen.clear()

    def close(self) -> None:
        """Give the pass up: everything is released, and a backward through it raises. Never raises itself."""
        self._forget_remade()
        for storage in self.living():
            storage.close()
        self.left()
