"""One object per storage that autograd needs in backward, wherever its bytes are, and the handles that view it.

A *handle* is what autograd keeps instead of a tensor. Handles own their storage object, graphs own handles: when a
graph goes, for whatever reason, device bytes, host buffers and files go with it. Nothing here points back at a graph.

Note [In-place changes]
Autograd does not check versions of tensors that went through pack hooks, so the handles do. An offloaded tensor's
check needs its version counter but not its memory: `_witness` keeps the one without the other.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lazytrain_ds.errors import LazyTrainError
from lazytrain_ds.planning.schema import ChannelName, TierName

if TYPE_CHECKING:
    from lazytrain_ds.runtime.activations.mover import Mover
    from lazytrain_ds.runtime.device.base import Event

__all__ = [
    "BOUNDARY",
    "PASSED",
    "REMADE",
    "SAVED",
    "Handle",
    "KeptAccount",
    "KeptHandle",
    "OffloadedHandle",
    "OffloadedStorage",
    "storage_key",
    "version_of",
]  # fmt: skip

SAVED, BOUNDARY, REMADE, PASSED = "saved", "boundary", "remade", "passed"
"""Roles: inside a block, a block's input, a dropped input made again, and what a block is given but does not own."""


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, unique while it or a `StorageWeakRef` to it lives; 0 for one without (sparse)."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def version_of(tensor: torch.Tensor) -> int:
    """The in-place version of a tensor (0 for inference tensors, which have none)."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _changed_in_place(shape: torch.Size, dtype: torch.dtype, now: int, then: int) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: a saved "
        f"{dtype} tensor of shape {list(shape)} is at version {now}; expected version {then} instead. Hint: make the "
        "operation out of place, or clone the tensor before it."
    )


def _witness(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares `tensor`'s version counter but not its memory; see Note [In-place changes]."""
    alias = tensor.detach()
    alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias


class Handle:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__",)

    def restore(self) -> torch.Tensor:
        """The tensor, bit for bit, with its size, strides and offset."""
        raise NotImplementedError

    def replace(self, tensor: torch.Tensor) -> None:
        """From now on restore copies of `tensor`: what was packed has been overwritten since."""
        raise NotImplementedError


class KeptHandle(Handle):
    """A tensor that stays. Detached if it is part of a graph: a node's own output would otherwise keep itself alive."""

    __slots__ = ("_account", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, account: KeptAccount | None = None) -> None:
        self._account = account
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        try:  # not `version_of`: this runs for every saved tensor
            self._version: int | None = tensor._version
        except RuntimeError:
            self._version = 0

    def restore(self) -> torch.Tensor:
        tensor = self._tensor
        try:
            if tensor._version == self._version:
                return tensor
        except RuntimeError:
            pass
        if self._version is None:
            return tensor.clone()
        if version_of(tensor) != self._version:
            raise _changed_in_place(tensor.shape, tensor.dtype, version_of(tensor), self._version)
        return tensor

    def replace(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, None


class KeptAccount:
    """Counts what one block keeps on the device: unique storages, from the block's end until its last handle goes.

    The memory itself belongs to the tensors. One entry in the ledger per block and role, not per tensor: this runs for
    every tensor that autograd saves.
    """

    __slots__ = ("__weakref__", "_mover", "_seen", "block", "byte_count", "role")

    def __init__(self, block: int, role: str) -> None:
        self._mover: Mover | None = None
        self._seen: list[tuple[weakref.ref[KeptHandle], int, int]] = []
        self.block, self.role, self.byte_count = block, role, 0

    def keep(self, tensor: torch.Tensor) -> KeptHandle:
        """A handle for `tensor`, whose storage is to be counted."""
        return self.keep_storage(tensor, tensor.untyped_storage())

    def keep_storage(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> KeptHandle:
        """The same where the storage is at hand."""
        handle = KeptHandle(tensor, self)
        self._seen.append((weakref.ref(handle), storage._cdata, storage.nbytes()))
        return handle

    def settle(self, mover: Mover) -> None:
        """The block has ended: count what is still held. DeviceMemoryError where that exceeds the cap."""
        seen, self._seen = self._seen, []
        byte_count = sum({key: size for handle, key, size in seen if handle() is not None}.values())
        if byte_count:
            mover.device.charge(byte_count, f"activations ({self.role})")
            self.byte_count, self._mover = byte_count, mover

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return self.byte_count if self._mover is not None else 0

    def close(self) -> None:
        """Uncount."""
        mover, self._mover = self._mover, None
        if mover is not None:
            mover.device.ledger.discharge(self.byte_count, f"activations ({self.role})")

    __del__ = close


# Where an offloaded storage is. LEAVING: the copy to the host is under way. WRITING: host to NVMe. AWAY: at home.
# READING: NVMe to host. ARRIVING: the copy to the device was issued. CLOSED: given up.
LEAVING, WRITING, AWAY, READING, ARRIVING, CLOSED = "leaving", "writing", "away", "reading", "arriving", "closed"


class OffloadedStorage:
    """A storage whose home between forward and backward is host memory or NVMe.

    Every method runs on the thread that runs the block; `close` may run on any. Device bytes are counted while the
    source has not left and while a copy is back.
    """

    __slots__ = ("__weakref__", "_arrival", "_arrived", "_back", "_departure", "_host", "_key", "_last_copy", "_mover",
                 "_source", "_started", "_ticket", "_uses", "_uses_left", "_weak_source", "block", "byte_count", "role",
                 "state", "tier")  # fmt: skip

    def __init__(self, mover: Mover, tensor: torch.Tensor, block: int, role: str, tier: TierName) -> None:
        self.state = CLOSED  # until everything below is in place: __del__ must be safe
        storage = tensor.untyped_storage()
        self._mover, self.block, self.role, self.tier = mover, block, role, tier
        self.byte_count = storage.nbytes()
        self._weak_source = StorageWeakRef(storage)  # keeps the key unique after the storage's death
        self._uses = self._uses_left = 0
        self._back: torch.Tensor | None = None
        self._arrival: Event | None = None
        self._arrived: Event | None = None
        self._last_copy: Event | None = None
        self._ticket: Any = None
        self._key: str | None = None
        self._host: torch.Tensor | None = None
        self._source: torch.Tensor | None = None
        mover.device.charge(self.byte_count, "activations (leaving)")
        try:
            self._host = mover.take_host(self.byte_count, tier)
            self._source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                storage, 0, (self.byte_count,), (1,)
            )
            self._started = time.perf_counter()
            self._departure = mover.copy(
                self._host[: self.byte_count], self._source, "d2h", "activation_offload", block, made=role == SAVED
            )
        except BaseException:
            mover.device.ledger.discharge(self.byte_count, "activations (leaving)")
            if self._host is not None:
                mover.give_host(self._host, tier)
            raise
        self.state = LEAVING
        mover.counters.offloaded(tier, self.byte_count)
        mover.track(self)
        self.advance()

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now: not yet left, or back already."""
        return (self.byte_count if self.state == LEAVING else 0) + (self.byte_count if self._back is not None else 0)

    def view_added(self) -> None:
        """One more handle; its copy on the device goes when each handle was restored once."""
        self._uses += 1
        self._uses_left += 1

    # -- forward: away ---------------------------------------------------------------------------------------------
    def advance(self, block: bool = False) -> bool:
        """Move on as far as finished transfers allow; with `block`, wait for the present one. True when at rest."""
        if self.state == LEAVING and (block or self._departure.done()):
            if block:
                self._mover.wait_event(self._departure)
            self._departure.wait()  # over; raises what went wrong
            self._source = None
            self._mover.device.ledger.discharge(self.byte_count, "activations (leaving)")
            self._mover.report("activation_offload", self.block, "d2h", self._started, self.byte_count)
            self.state = AWAY
            if self.tier == "nvme":
                self._started = time.perf_counter()
                self._key = self._mover.take_key()
                self._ticket = self._mover.store.write(self._key, self._host[: self.byte_count])
                self.state = WRITING
        elif self.state == WRITING and (block or self._ticket.done()):
            self._settle_ticket("nvme_write", block)
            self._mover.report("activation_offload", self.block, "nvme_write", self._started, self.byte_count)
            self._ticket = None
            if self._back is None and self._arrival is None:
                self._mover.give_host(self._host, self.tier)
                self._host = None
            self.state = AWAY
        elif self.state == READING and (block or self._ticket.done()):
            self._settle_ticket("nvme_read", block)
            self._mover.report("activation_prefetch", self.block, "nvme_read", self._started, self.byte_count)
            self._ticket = None
            self.state = AWAY
            self._send(must=block)
        elif self.state == ARRIVING and (block or self._arrival.done()):
            self._arrived = self._arrival  # compute waits for it when it asks for the bytes, not before
            self._landed()
        return self.state in (AWAY, CLOSED)

    def _settle_ticket(self, channel: ChannelName, block: bool) -> None:
        if block:
            self._mover.wait_ticket(self._ticket, channel)
        else:
            self._ticket.wait()  # over; raises what went wrong

    # -- backward: back --------------------------------------------------------------------------------------------
    def fetch(self, must: bool = False) -> bool:
        """Start the way back. Optional fetches return False where device or staging memory is short."""
        if self.state == CLOSED:
            raise LazyTrainError(
                "a saved activation was asked for after its micro-step was given up (an exception in forward or "
                "backward). Run the forward again."
            )
        if self._back is not None or self.state in (READING, ARRIVING):
            return True
        if self.state == LEAVING:
            self.advance(block=True)
        if self._host is not None:  # in host memory, or still in the staging buffer of its write
            return self._send(must)
        self._host = self._mover.take_host(self.byte_count, self.tier, must=must)
        if self._host is None:
            return False
        self._started = time.perf_counter()
        self._ticket = self._mover.store.read(self._key, self._host[: self.byte_count])
        self.state = READING
        self._mover.track(self)
        return True

    def _send(self, must: bool) -> bool:
        """Issue the copy from host to device; False where an optional one finds no device memory."""
        back = self._mover.try_allocate(self.byte_count, must)
        if back is None:
            return False
        writing, self._back = self.state == WRITING, back
        started = time.perf_counter()
        # The allocator may hand out memory that queued compute still uses: the copy waits for what was issued so far.
        self._arrival = self._mover.copy(back, self._host[: self.byte_count], "h2d", "activation_prefetch", self.block)
        self._last_copy = self._arrival
        self._mover.prefetched(self.byte_count)
        if writing:  # an NVMe write that the backward overtook: it ends by itself
            self._mover.compute_waits(self._arrival)
            self._mover.report("activation_prefetch", self.block, "h2d", started, self.byte_count)
            self._arrival = None
        else:
            self._started = started
            self.state = ARRIVING
            self._mover.track(self)
        return True

    def _landed(self) -> None:
        self._mover.report("activation_prefetch", self.block, "h2d", self._started, self.byte_count)
        self._arrival = None
        self.state = AWAY
        self._return_staging()

    def _return_staging(self) -> None:
        """The staging buffer of a read serves others once the copy out of it is over (no stream orders a disk)."""
        if self.tier == "nvme" and self._host is not None:
            self._mover.bury(self._last_copy, self._host, None, None, self.tier, None)
            self._host = None

    def obtain(self) -> torch.Tensor:
        """The bytes on the device, ordered before later compute; waiting counts as stall."""
        if self._mover.moving:
            self._mover.advance()
        if self._back is None:
            self.fetch(must=True)
            while self.state == READING:
                self.advance(block=True)
        if self.state == ARRIVING:
            self.advance(block=True)
        back, arrived, self._arrived = self._back, self._arrived, None
        assert back is not None
        if arrived is not None:
            self._mover.compute_waits(arrived)
        self._uses_left -= 1
        if self._uses_left <= 0:
            self.drop_copy()
        return back

    def drop_copy(self) -> None:
        """Uncount the copy on the device; the home copy stays, so another backward can fetch again."""
        if self.state == READING:
            self._mover.wait_ticket(self._ticket, "nvme_read")
            self._ticket = None
            self.state = AWAY
        if self.state == ARRIVING:
            self.advance(block=True)
        if self._back is not None:
            self._mover.device.free(self._back, "activations (back)")
            self._back = None
            self._uses_left = self._uses
        if self.state == AWAY:
            self._return_staging()

    def close(self) -> None:
        """Give everything back; buffers that a transfer still uses follow when it ends."""
        if self.state == CLOSED:
            return
        mover, state = self._mover, self.state
        self.state = CLOSED
        if self._back is not None:
            mover.device.free(self._back, "activations (back)")
        pending = self._departure if state == LEAVING else self._arrival if state == ARRIVING else self._ticket
        if pending is None and self.tier == "nvme":
            pending = self._last_copy
        if state == LEAVING:
            mover.device.ledger.discharge(self.byte_count, "activations (leaving)")
        mover.bury(pending, self._host, self._source, self._back, self.tier, self._key)
        self._back = self._host = self._source = self._ticket = self._arrival = None
        self._key = None

    __del__ = close


class OffloadedHandle(Handle):
    """A view of an offloaded storage."""

    __slots__ = (
        "_conjugate",
        "_dtype",
        "_negative",
        "_offset",
        "_replacement",
        "_size",
        "_storage",
        "_stride",
        "_version",
        "_witness",
    )

    def __init__(self, tensor: torch.Tensor, storage: OffloadedStorage) -> None:
        self._storage = storage
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()
        self._conjugate, self._negative = tensor.is_conj(), tensor.is_neg()
        self._version = version_of(tensor)
        self._witness = None if tensor.is_inference() else _witness(tensor)
        self._replacement: torch.Tensor | None = None
        storage.view_added()

    def replace(self, tensor: torch.Tensor) -> None:
        self._replacement = tensor

    def restore(self) -> torch.Tensor:
        if self._replacement is not None:
            return self._replacement.clone()
        if self._witness is not None and self._witness._version != self._version:
            raise _changed_in_place(self._size, self._dtype, self._witness._version, self._version)
        back = self._storage.obtain()
        tensor = torch.empty(0, dtype=self._dtype, device=back.device).set_(
            back.untyped_storage(), self._offset, self._size, self._stride
        )
        if self._conjugate:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self._negative else tensor
