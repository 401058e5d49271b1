"""A frame: everything one forward pass leaves for its backward. Owned by the handles in the graph."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import Parameter

from lazytrain_ds.planning.schema import TierName
from lazytrain_ds.runtime.activations.storages import (
    BOUNDARY,
    SAVED,
    Handle,
    KeptAccount,
    KeptHandle,
    OffloadedHandle,
    OffloadedStorage,
    version_of,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lazytrain_ds.runtime.activations.blocks import BlockCall
    from lazytrain_ds.runtime.activations.mover import Mover
    from lazytrain_ds.runtime.activations.segments import OutputRecord, Segment

__all__ = ["OUTSIDE", "Frame", "ParameterAccess", "ParameterHandle", "ParameterView", "unpack"]

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

    def restore(self) -> torch.Tensor:
        return self._view.rebuild()


def unpack(packed: torch.Tensor | Handle) -> torch.Tensor:
    """The other half of every pack hook here."""
    return packed if type(packed) is Parameter else packed.restore() if isinstance(packed, Handle) else packed


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
        self._offloaded: dict[tuple[int, int, str], weakref.ref[OffloadedStorage]] = {}
        self._accounts: list[weakref.ref[KeptAccount]] = []
        self._outside = KeptAccount(OUTSIDE, SAVED)
        self.calls: list[weakref.ref[BlockCall]] = []
        self.previous: BlockCall | None = None
        self.previous_segment: Segment | None = None
        self.outputs: list[OutputRecord | None] = []
        self.seen: dict[int, int] = {}

    # -- packing -----------------------------------------------------------------------------------------------
    def keeper(self, account: KeptAccount, boundary: KeptAccount | None = None,
               boundary_keys: frozenset[int] = frozenset(), given_keys: frozenset[int] = frozenset(),
               ) -> Callable[[torch.Tensor], torch.Tensor | Handle]:  # fmt: skip
        """A pack hook that keeps everything where it is; short, because it runs for every saved tensor.

        `boundary_keys`, `given_keys`: storages that are the block's input, and that it was given and does not own.
        """
        view_of = self.parameters.view_of if self.parameters is not None else None

        def pack(tensor: torch.Tensor) -> torch.Tensor | Handle:
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
                return self.keep_special(tensor)
            if view_of is not None and (view := view_of(tensor)) is not None:
                return ParameterHandle(view)
            storage = tensor.untyped_storage()
            if boundary is not None:
                key = storage._cdata
                if key in boundary_keys:
                    return boundary.keep_storage(tensor, storage)
                if key in given_keys:
                    return KeptHandle(tensor)
            return account.keep_storage(tensor, storage)

        return pack

    def keep_special(self, tensor: torch.Tensor) -> torch.Tensor | Handle:
        """Parameters as they are (never packed); subclasses and sparse tensors stay, uncounted."""
        if isinstance(tensor, Parameter):
            return tensor
        view = None
        if self.parameters is not None:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a subclass may have no storage to ask about
                view = self.parameters.view_of(tensor)
        return KeptHandle(tensor) if view is None else ParameterHandle(view)

    def keep_outside(self, tensor: torch.Tensor) -> torch.Tensor | Handle:
        """Pack hook for what is saved outside wrapped blocks: it stays where it is."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return self.keep_special(tensor)
        if self.parameters is not None and (view := self.parameters.view_of(tensor)) is not None:
            return ParameterHandle(view)
        return self._outside.keep_storage(tensor, tensor.untyped_storage())

    def settle_outside(self) -> None:
        """Count what was saved outside blocks since the last one: in parts, as an account goes as a whole."""
        account, self._outside = self._outside, KeptAccount(OUTSIDE, SAVED)
        self.settle(account)

    def settle(self, account: KeptAccount) -> None:
        """A block has ended: its account counts from now on."""
        account.settle(self.mover)
        if account.byte_count:
            self._accounts.append(weakref.ref(account))

    def offload(self, tensor: torch.Tensor, account: KeptAccount, tier: TierName, call: BlockCall) -> Handle:
        """The tensor's storage goes to `tier`, once however many views are saved of it."""
        if tier == "device":
            return account.keep(tensor)
        if not _is_plain(tensor) or tensor.device.type != self.device.type:
            return KeptHandle(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < (1 if account.role == BOUNDARY else max(1, self._minimum_offload_bytes)):
            return account.keep(tensor)
        key = (storage._cdata, version_of(tensor), tier)
        reference = self._offloaded.get(key)
        moved = reference() if reference is not None else None
        if moved is None:
            moved = OffloadedStorage(self.mover, tensor, account.block, account.role, tier)
            self._offloaded[key] = weakref.ref(moved)
            call.offloaded.append(weakref.ref(moved))
        elif moved.block != account.block:
            call.offloaded.append(weakref.ref(moved))
        return OffloadedHandle(tensor, moved)

    # -- what is there -----------------------------------------------------------------------------------------
    def living(self) -> list[KeptAccount | OffloadedStorage]:
        """What the graph still holds."""
        references = (*self._accounts, *self._offloaded.values())
        return [storage for reference in references if (storage := reference()) is not None]

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
