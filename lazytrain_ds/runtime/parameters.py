"""Parameters of blocks: flat host buffers, device slots, fetch and release. One copy per block, events, no trace.

Life of a block's parameters: *absent* -> `issue` takes a slot and queues the copy -> *in flight* -> `wait` points the
parameters at the slot -> *present* -> `release` empties them and gives the slot back. A resident block keeps its slot,
and so does one that evaluation keeps until the next training step; it is copied again only after an optimizer update
made it stale.

Invariants (tests/runtime/test_parameters.py names each):
* a parameter has its full shape from the block's fetch until its gradient is accumulated (DeepSpeed's post-backward);
* a slot is reused only after the compute that read it, which `free_after` carries into the channel;
* a copy waits, inside the channel, for the block's own optimizer update and for nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Parameter

from lazytrain_ds.errors import DeviceMemoryError, LazyTrainError, PlanError
from lazytrain_ds.planning.schema import ChannelName
from lazytrain_ds.runtime.device.base import Device, Event
from lazytrain_ds.runtime.swap import aligned_empty

__all__ = ["BlockParameters", "ParameterStore", "Part", "SlotView", "StagingPool"]

PURPOSE = "parameters"


@dataclass(frozen=True)
class SlotView:
    """Where a tensor lies inside a parameter: enough to rebuild the view on the parameter's current data."""

    parameter: Parameter
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def rebuild(self) -> torch.Tensor:
        """The same view of the parameter's current data (which must be present)."""
        data = self.parameter.data
        return data.as_strided(self.size, self.stride, data.storage_offset() + self.offset)


@dataclass
class Part:
    """The parameters of one dtype of a block; `entries` are (parameter, offset, numel).

    `host` is their flat home, None while they live on NVMe (under `key`); then `staging` holds a copy on its way up.
    """

    dtype: torch.dtype
    numel: int
    entries: list[tuple[Parameter, int, int]]
    host: torch.Tensor | None = None
    key: str = ""
    slot: torch.Tensor | None = None
    event: Event | None = None
    updates: tuple[Event, ...] = ()
    read: Event | None = None
    staging: torch.Tensor | None = None

    @property
    def byte_count(self) -> int:
        """Bytes of one copy."""
        return self.numel * self.dtype.itemsize


@dataclass
class BlockParameters:
    """One block's parameters and where they are now."""

    index: int
    parts: list[Part]
    resident: bool = False
    kept: bool = False
    pooled: bool = True
    state: str = "absent"
    stale: bool = True
    holds: int = 0
    in_use: bool = False

    @property
    def byte_count(self) -> int:
        """Bytes of one copy."""
        return sum(part.byte_count for part in self.parts)

    @property
    def stays(self) -> bool:
        """Whether its slot outlives a release: by the plan, or for the evaluation under way."""
        return self.resident or self.kept

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter of the block."""
        for part in self.parts:
            for parameter, _, _ in part.entries:
                yield parameter


class _LateRead(Event):
    """A read from NVMe handed in once the block's update is: by the worker, or by whoever waits.

    The store then lets it wait for the write of that update.
    """

    def __init__(self, nvme: Any, key: str, into: torch.Tensor, after: Sequence[Event]) -> None:
        self._nvme, self._key, self._into, self._after = nvme, key, into, after
        self._lock = threading.Lock()
        self._ticket: Any = None
        if all(event.done() for event in after):
            self.start()

    @property
    def at(self) -> float | None:  # type: ignore[override]
        return None if self._ticket is None else self._ticket.end_seconds

    @property
    def ready_at(self) -> float | None:
        """When the write of what is read had ended; None if it was there before."""
        return None if self._ticket is None else self._ticket.ready_seconds

    @property
    def started(self) -> bool:
        return self._ticket is not None

    def start(self) -> None:
        with self._lock:
            if self._ticket is None:
                self._ticket = self._nvme.read(self._key, self._into)

    def done(self) -> bool:
        if not self.started and all(event.done() for event in self._after):
            self.start()
        return self.started and bool(self._ticket.done())

    def wait(self) -> None:
        for event in self._after:
            event.wait()
        self.start()
        self._ticket.wait()


class StagingPool:
    """Host buffers that NVMe is read into or written from, by size; as many as are in use at once. Thread-safe."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, Event | None]]] = {}
        self._lock = threading.Lock()
        self.allocated_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An aligned buffer of exactly this size."""
        with self._lock:
            free = self._free.get((numel, dtype), [])
            for index, (buffer, after) in enumerate(free):
                if after is None or after.done():
                    del free[index]
                    return buffer
            self.allocated_bytes += numel * dtype.itemsize
        return aligned_empty(numel, dtype)

    def give(self, buffer: torch.Tensor, after: Event | None = None) -> None:
        """Take a buffer back; it is handed out again once `after`, a copy out of it, is over."""
        with self._lock:
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append((buffer, after))

    def forget(self, buffer: torch.Tensor) -> None:
        """A buffer that is not coming back, because what reads it is not known."""
        with self._lock:
            self.allocated_bytes -= buffer.numel() * buffer.element_size()

    def trim(self) -> None:
        """Give what nobody uses back to the system."""
        with self._lock:
            for key, free in self._free.items():
                in_use = [(buffer, after) for buffer, after in free if after is not None and not after.done()]
                numel, dtype = key
                self.allocated_bytes -= (len(free) - len(in_use)) * numel * dtype.itemsize
                self._free[key] = in_use


class ParameterStore:
    """Fetches and releases blocks. `ready(block)` gives the events of updates that the next copy must wait for."""

    def __init__(self, device: Device, blocks: Sequence[BlockParameters], nvme: Any = None) -> None:
        """`nvme`: the NvmeStore of blocks whose parameters live there."""
        self.device = device
        self.nvme = nvme
        self.staging = StagingPool()
        self.blocks = list(blocks)
        self.block_of: dict[int, int] = {
            parameter.ds_id: block.index for block in self.blocks for parameter in block.parameters()
        }
        self.ready: Callable[[int], Sequence[Event]] = lambda block: ()
        self.on_stall: Callable[[ChannelName, float], None] = lambda channel, seconds: None
        self.before_issue: Callable[[int], None] = lambda block: None
        self._late_reads: dict[int, list[_LateRead]] = {}
        self._free: dict[tuple[torch.dtype, int], list[tuple[torch.Tensor, Event]]] = {}
        self._slot_of_storage: dict[int, tuple[BlockParameters, Part]] = {}
        self._use_clock = 0
        self._wanted: int | None = None  # the block that compute is about to use
        self._last_use: dict[int, int] = {}
        self.copies = 0
        self.copied_bytes = 0
        device.add_reliever(0, self._trim)
        device.add_reliever(3, self._evict)

    # -- slots -------------------------------------------------------------------------------------------------
    def _take(self, part: Part, must: bool) -> Event | None:
        """Give `part` a slot; returns the event after which it may be written. DeviceMemoryError when none fits."""
        key = (part.dtype, part.numel)
        pool = self._free.get(key)
        if pool:
            part.slot, free_after = pool.pop()
            return free_after
        while True:
            try:
                part.slot = self.device.allocate(part.numel, part.dtype, PURPOSE, must)
                return self.device.record()  # the allocator may hand out memory that queued compute still uses
            except DeviceMemoryError:
                if not self._trim():
                    raise

    def trim_slots(self) -> None:
        """Free the pooled slots: called when a visit's fetches are issued, so that what is left is not planned for."""
        while self._trim():
            pass

    def _trim(self) -> bool:
        """Really free one pooled slot; False if there is none."""
        for pool in self._free.values():
            if pool:
                slot, _ = pool.pop()
                self.device.free(slot, PURPOSE)
                return True
        return False

    def _evict(self) -> bool:
        """Release the block that nobody holds and that was prefetched or used longest ago; False if there is none."""
        candidates = [
            block
            for block in self.blocks
            if (block.state != "absent" or block.kept)
            and block.holds == 0
            and not block.resident
            and block.index != self._wanted
            and not block.in_use
        ]
        if not candidates:
            return False
        oldest = min(candidates, key=lambda block: self._last_use.get(block.index, 0))
        if oldest.kept:
            self.let_go(oldest.index)
        else:
            self.release(oldest.index)
        return self._trim() or True

    # -- fetch -------------------------------------------------------------------------------------------------
    def issue(self, index: int, must: bool = False) -> bool:
        """Queue the copy of a block. Optional prefetches (`must` False) return False where no slot is free."""
        block = self.blocks[index]
        if must:
            self._wanted = index
        if block.state != "absent" and not block.stale:
            return True
        if block.state == "present":
            return True  # stale but in use: an update can only have been recorded after the step released it
        taken: list[Part] = []
        waits: list[Event] = []
        try:
            for part in block.parts:
                if part.slot is None:
                    free_after = self._take(part, must)
                    taken.append(part)
                    self._slot_of_storage[part.slot.untyped_storage().data_ptr()] = (block, part)
                    if free_after is not None:
                        waits.append(free_after)
        except DeviceMemoryError:
            for part in taken:
                self._give_back(block, part, self.device.record())
            if must:
                raise
            return False
        if taken or block.stale or not block.stays:  # a slot just taken holds nothing yet, whatever was current before
            self.before_issue(index)
            updates = tuple(self.ready(index))
            after = [*waits, *updates]
            for part in block.parts:
                source, arrived = self._source(part, index)
                part.updates, part.read = updates, next(iter(arrived), None)
                part.event = self.device.copy_async(
                    part.slot, source, "h2d", [*after, *arrived], ("parameter_fetch", index)
                )
                self.copies += 1
                self.copied_bytes += part.byte_count
        block.stale = False
        block.state = "in flight"
        return True

    def _source(self, part: Part, block: int) -> tuple[torch.Tensor, Sequence[Event]]:
        """Where the copy to the device comes from: the host home, or a staging buffer that NVMe is read into."""
        if part.host is not None:
            return part.host, ()
        part.staging = self.staging.take(part.numel, part.dtype)
        read = _LateRead(self.nvme, part.key, part.staging, self.ready(block))
        if not read.started:
            self._late_reads.setdefault(block, []).append(read)
        return part.staging, (read,)

    def home_changed(self, index: int) -> None:
        """The block's update has gone home (called by the worker): reads that wait for it may start."""
        for read in self._late_reads.pop(index, ()):
            read.start()

    def _arrived(self, part: Part) -> None:
        if part.staging is not None:
            self.staging.give(part.staging, part.event)
            part.staging = None
        part.event = part.read = None
        part.updates = ()

    def need(self, index: int) -> None:
        """Make a block's parameters present for the compute that follows."""
        block = self.blocks[index]
        self._wanted = index
        self._use_clock += 1
        self._last_use[index] = self._use_clock
        if block.state == "absent" or (block.state == "in flight" and block.stale):
            self.issue(index, must=True)
        if block.state == "in flight":
            for part in block.parts:
                if part.event is not None:
                    self.device.waits(part.event, partial(self._report_stall, part.updates, part.read))
                    self._arrived(part)
            block.state = "present"
        for part in block.parts:
            for parameter, offset, numel in part.entries:
                # Someone else may have partitioned or gathered single parameters meanwhile; theirs stay untouched.
                if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                    parameter.data = part.slot.narrow(0, offset, numel).view(parameter.ds_shape)
                    parameter.ds_status = ZeroParamStatus.AVAILABLE

    def _report_stall(self, updates: Sequence[Event], read: Event | None, end: float, seconds: float) -> None:
        """Compute waited until `end` for a copy: for its update, that one's write, its own read, then for the link."""
        at = end - seconds
        stages: tuple[tuple[ChannelName, Sequence[float | None]], ...] = (
            ("host", [event.at for event in updates]),
            ("nvme_write", [read.ready_at] if isinstance(read, _LateRead) else ()),
            ("nvme_read", [read.at] if read is not None else ()),
        )
        for channel, moments in stages:
            until = max((min(moment, end) for moment in moments if moment is not None), default=at)
            if until > at:
                self.on_stall(channel, until - at)
                at = until
        if end > at:
            self.on_stall("h2d", end - at)

    def _is_ours(self, part: Part, parameter: Parameter) -> bool:
        return (
            part.slot is not None
            and parameter.data.untyped_storage().data_ptr() == part.slot.untyped_storage().data_ptr()
        )

    def release(self, index: int, force: bool = False) -> None:
        """Empty a block's parameters and give its slot back, unless it is held. Residents keep the slot."""
        block = self.blocks[index]
        if block.state == "absent" or (block.holds and not force):
            return
        if block.state == "in flight":
            for part in block.parts:
                if part.event is not None:
                    self.device.compute_waits(part.event)
                    self._arrived(part)
        done = self.device.record()
        for part in block.parts:
            for parameter, _, _ in part.entries:
                if parameter.ds_status is ZeroParamStatus.AVAILABLE and self._is_ours(part, parameter):
                    parameter.data = torch.empty(0, dtype=part.dtype, device=parameter.device)
                    parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
            if not block.stays:
                self._give_back(block, part, done)
        block.state = "absent"
        block.in_use = False
        if block.stays and not block.stale:
            block.state = "in flight"  # the slot still holds the current values: the next `need` only points at it

    def let_go(self, index: int) -> None:
        """Evaluation keeps this block no longer: its slot goes back, now or, where it is in use, with its release."""
        block = self.blocks[index]
        if not block.kept:
            return  # gone already: someone needed its slot
        block.kept = False
        if block.in_use or block.holds:
            return
        if block.state != "absent":
            self.release(index)
            return
        done = self.device.record()
        for part in block.parts:  # stale: it kept its slot, but there is nothing to release
            self._give_back(block, part, done)

    def _give_back(self, block: BlockParameters, part: Part, free_after: Event) -> None:
        slot, part.slot, part.event = part.slot, None, None
        if slot is None:
            return
        self._slot_of_storage.pop(slot.untyped_storage().data_ptr(), None)
        free_after = self.device.retire(slot) or free_after
        if block.pooled:
            self._free.setdefault((part.dtype, slot.numel()), []).append((slot, free_after))
        else:  # the allocator orders the next use on the compute stream behind the compute that read this slot
            self.device.free(slot, PURPOSE)

    def updated(self, index: int) -> None:
        """An optimizer update of this block was recorded: the next fetch copies again."""
        self.blocks[index].stale = True
        if self.blocks[index].state == "in flight":
            self.blocks[index].state = "absent"

    def release_all(self) -> None:
        """Release everything, held or not (between steps nothing is in use)."""
        for block in self.blocks:
            block.holds = 0
            self.release(block.index, force=True)

    def set_resident(self, index: int, resident: bool) -> None:
        """Between steps, with everything released: the block keeps its slot from its next fetch on, or no longer."""
        block = self.blocks[index]
        if block.resident and not resident:
            block.resident = False
            self.release(index, force=True)
            for part in block.parts:  # a resident whose update made it stale is absent, but has its slot still
                self._give_back(block, part, self.device.record())
            block.state, block.stale = "absent", True
        block.resident = resident

    def trim(self) -> None:
        """Free every pooled slot and staging buffer: what another plan needs may be of other sizes."""
        self.trim_slots()
        self.staging.trim()

    def close(self) -> None:
        """Give every slot back, residents and pooled ones too, also those whose copy failed with its update."""
        for block in self.blocks:
            block.holds = 0
            try:
                self.release(block.index, force=True)
            except LazyTrainError:  # raised to the user by the worker's own drain
                for part in block.parts:
                    part.event = part.staging = None
        done = self.device.record()
        for block in self.blocks:
            block.pooled = False
            for part in block.parts:
                self._give_back(block, part, done)
            block.state, block.stale = "absent", True
        self.trim()

    # -- for others --------------------------------------------------------------------------------------------
    def view_of(self, tensor: torch.Tensor) -> SlotView | None:
        """The place of `tensor` inside a parameter if it lies in one of our slots, else None."""
        if not tensor.numel():
            return None
        found = self._slot_of_storage.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return None
        _, part = found
        start = tensor.storage_offset() - part.slot.storage_offset()
        for parameter, offset, numel in part.entries:
            if offset <= start < offset + numel:
                return SlotView(parameter, start - offset, tensor.size(), tuple(tensor.stride()))
        raise PlanError("a saved tensor lies in a parameter slot but in no parameter of it; please report this")

    @property
    def live_slot_bytes(self) -> int:
        """Bytes of slots in use, residents included, pooled free slots excluded."""
        return sum(
            part.slot.numel() * part.slot.element_size()
            for block in self.blocks
            for part in block.parts
            if part.slot is not None
        )
