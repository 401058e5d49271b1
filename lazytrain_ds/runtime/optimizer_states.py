"""Where each sub-group's fp32 master and moments live: device, host memory, or NVMe behind a few staging buffers.

A sub-group on NVMe is one tensor of bytes in the store: master first, then its moments, each section on a 64-byte
boundary. An update takes it through one of `STAGING_BUFFERS` host buffers: read ahead in the order of the updates,
stepped in place, written behind. So a step reads and writes each state once and nothing else; gradients stay in host
memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lazytrain_ds.errors import PlanError
from lazytrain_ds.planning.schema import TierName
from lazytrain_ds.runtime.device.base import Device
from lazytrain_ds.runtime.swap import aligned_empty

__all__ = ["STAGING_BUFFERS", "StateHomes", "States"]

STAGING_BUFFERS = 2
SECTION_BYTES = 64
PURPOSE = "optimizer states"

Span = tuple[int, int, str]


class StateMaker(Protocol):
    """What is needed of an updater: fresh moments for a master."""

    def new_state(self, master: torch.Tensor, spans: Sequence[Span]) -> dict[str, Any]:
        """State of step 0; tensors and numbers. Empty where the optimizer makes its own at its first step."""
        ...


@dataclass
class States:
    """A sub-group's master and state while they are at hand."""

    master: torch.Tensor
    state: dict[str, Any]


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def byte_count(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class _OnDisk:
    """A sub-group on NVMe: its layout, its numbers (step counts), and where it is on its way."""

    key: str
    sections: tuple[_Section, ...]
    numbers: dict[str, Any]
    byte_count: int
    buffer: torch.Tensor | None = None
    ticket: Any = None
    waiting: deque[int] = field(default_factory=deque)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _ended(ticket: Any) -> float:
    ticket.wait()
    return float(ticket.end_seconds)


class StateHomes:
    """Masters and states of all sub-groups. `order` announces the next updates so that reads run ahead."""

    def __init__(self, device: Device, optimizer: torch.optim.Optimizer, maker: StateMaker, store: Any = None) -> None:
        """`store`: an NvmeStore, needed only if a sub-group's tier is `nvme`."""
        self.device = device
        self.optimizer = optimizer
        self.maker = maker
        self.store = store
        self.tiers: list[TierName] = []
        self.masters: list[torch.Tensor] = []
        self.stall_seconds = 0.0
        self._disk: dict[int, _OnDisk] = {}
        self._free: list[torch.Tensor] = []
        self._writing: deque[tuple[Any, torch.Tensor]] = deque()  # buffers nobody has claimed yet
        self._unseen: deque[Any] = deque()  # writes whose buffer has been claimed, to be checked once they have ended
        self._ahead: deque[int] = deque()
        self._staging_bytes = 0

    # -- construction ------------------------------------------------------------------------------------------
    def add(self, low_precision: torch.Tensor, tier: TierName, spans: Sequence[Span]) -> torch.Tensor:
        """A sub-group whose weights are `low_precision`; returns its master (an empty shell where it is on NVMe)."""
        index = len(self.masters)
        master = self._master(low_precision, tier)
        state = self.maker.new_state(master, spans)
        self.tiers.append(tier)
        self.masters.append(master)
        self._place(index, master, state)
        return self.masters[index]

    def _master(self, values: torch.Tensor, tier: TierName) -> torch.Tensor:
        """A copy of `values` in fp32 where masters of `tier` are made."""
        if tier != "device":
            return values.detach().to("cpu", torch.float32, copy=True)
        master = self.device.allocate(values.numel(), torch.float32, PURPOSE)
        master.copy_(values.detach())
        return master

    def _place(self, index: int, master: torch.Tensor, state: dict[str, Any]) -> None:
        """Sub-group `index`, whose tier is set, gets this master and state; on NVMe its master is an empty shell."""
        if self.tiers[index] != "nvme":
            self.masters[index] = master.requires_grad_(True)
            if state:
                self.optimizer.state[master] = state
            return
        if not state:
            raise PlanError(f"states of {type(self.optimizer).__name__} cannot live on NVMe: only our Adam's can")
        self._put_on_disk(index, master, state)
        self.masters[index] = torch.empty(0, dtype=torch.float32).requires_grad_(True)

    # -- another plan ------------------------------------------------------------------------------------------
    def move(self, index: int, tier: TierName) -> torch.Tensor:
        """Give a sub-group another home, with no update under way; returns its master there.

        Where that fails (no space, no memory) it stays where it is.
        """
        before = self.tiers[index]
        if tier == before:
            return self.masters[index]
        self.settle()
        self._free.clear()  # of the size that the largest sub-group on NVMe had until now
        place = self._disk.get(index)
        if place is not None:
            buffer = aligned_empty(place.byte_count, torch.uint8)
            self.store.read(place.key, buffer).wait()
            views = {section.name: self._view(buffer, section) for section in place.sections}
            old = views.pop("master")
            state = {**views, **place.numbers}
        else:
            old = self.masters[index]
            state = self.optimizer.state.get(old, {})
        master = self._master(old, tier) if tier != "nvme" else old.detach()
        where = master.device
        state = {
            name: value.to(where, copy=place is not None) if torch.is_tensor(value) and value.dim() > 0 else value
            for name, value in state.items()
        }
        self.tiers[index] = tier
        try:
            self._place(index, master, state)
        except BaseException:
            self.tiers[index] = before
            if place is None and (written := self._disk.pop(index, None)) is not None and written.key in self.store:
                self.store.delete(written.key)
            raise
        if place is not None:
            del self._disk[index]
            self.store.delete(place.key)
            self._staging_bytes = max((each.byte_count for each in self._disk.values()), default=0)
        else:
            self.optimizer.state.pop(old, None)
            if before == "device":
                self.device.free(old, PURPOSE)
        return self.masters[index]

    # -- NVMe --------------------------------------------------------------------------------------------------

    def _put_on_disk(self, index: int, master: torch.Tensor, state: dict[str, Any]) -> None:
        tensors = {"master": master, **{name: value for name, value in state.items() if torch.is_tensor(value)}}
        tensors = {name: value for name, value in tensors.items() if name == "master" or value.dim() > 0}
        numbers = {name: value for name, value in state.items() if name not in tensors}
        sections: list[_Section] = []
        at = 0
        for name, value in tensors.items():
            sections.append(_Section(name, at, value.shape, value.dtype))
            at = _round_up(at + sections[-1].byte_count, SECTION_BYTES)
        place = _OnDisk(f"states/{index}", tuple(sections), numbers, at)
        self._disk[index] = place
        self._staging_bytes = max(self._staging_bytes, at)
        buffer = aligned_empty(at, torch.uint8)
        for section in sections:
            self._view(buffer, section).copy_(tensors[section.name])
        self.store.write(place.key, buffer).wait()

    @staticmethod
    def _view(buffer: torch.Tensor, section: _Section) -> torch.Tensor:
        return buffer.narrow(0, section.offset, section.byte_count).view(section.dtype).view(section.shape)

    # -- updates -----------------------------------------------------------------------------------------------
    def order(self, indices: Sequence[int]) -> None:
        """The sub-groups that will be updated next, in order: reads start as staging buffers come free."""
        self._ahead.extend(index for index in indices if index in self._disk)
        self._read_ahead()

    def _take_buffer(self) -> tuple[torch.Tensor, Sequence[Any]] | None:
        """A staging buffer, and the write from it that must end before a read into it may begin."""
        self._check_writes()
        if self._free:
            return self._free.pop(), ()
        in_use = sum(place.buffer is not None for place in self._disk.values()) + len(self._writing)
        if in_use < STAGING_BUFFERS:
            return aligned_empty(self._staging_bytes, torch.uint8), ()
        if not self._writing:
            return None
        # The read is queued behind the write in the store: it begins when that ends, whatever the worker does then.
        ticket, buffer = self._writing.popleft()
        self._unseen.append(ticket)
        return buffer, (ticket,)

    def _check_writes(self) -> None:
        """Raise what went wrong in writes that have ended; buffers they leave are free."""
        while self._unseen and self._unseen[0].done():
            self._unseen.popleft().wait()
        while self._writing and self._writing[0][0].done():
            ticket, buffer = self._writing.popleft()
            ticket.wait()
            self._free.append(buffer)

    def _read_ahead(self) -> None:
        while self._ahead:
            taken = self._take_buffer()
            if taken is None:
                return
            self._start_read(self._ahead.popleft(), *taken)

    def _start_read(self, index: int, buffer: torch.Tensor, after: Sequence[Any]) -> None:
        place = self._disk[index]
        place.buffer = buffer
        place.ticket = self.store.read(place.key, buffer.narrow(0, 0, place.byte_count), after)

    @contextmanager
    def at_hand(self, index: int, *, write: bool = True) -> Iterator[States]:
        """Master and state of a sub-group, in memory for the duration; with `write` what changed goes home."""
        place = self._disk.get(index)
        if place is None:
            master = self.masters[index]
            yield States(master, self.optimizer.state[master])
            return
        self._bring(index, place)
        buffer = place.buffer
        views = {section.name: self._view(buffer, section) for section in place.sections}
        master = views.pop("master")
        state = {**views, **place.numbers}
        try:
            yield States(master, state)
        except BaseException:
            place.buffer = None
            self._free.append(buffer)
            raise
        place.buffer = None
        if write:
            place.numbers = {name: value for name, value in state.items() if name not in views}
            self._writing.append((self.store.write(place.key, buffer.narrow(0, 0, place.byte_count)), buffer))
        else:
            self._free.append(buffer)
        self._read_ahead()

    def _bring(self, index: int, place: _OnDisk) -> None:
        if place.buffer is None:
            if index in self._ahead:
                self._ahead.remove(index)
            taken = self._take_buffer()
            if taken is None:
                raise PlanError("all staging buffers hold states read ahead; updates must come in the order announced")
            self._start_read(index, *taken)
        ticket, place.ticket = place.ticket, None
        if ticket is not None:
            ticket.wait()
        self._check_writes()

    def settle(self) -> float:
        """Wait for writes under way and give the staging buffers back to the system; when the last one ended (or 0)."""
        self._ahead.clear()
        ended = 0.0
        while self._unseen:
            ended = max(ended, _ended(self._unseen.popleft()))
        while self._writing:
            ticket, buffer = self._writing.popleft()
            ended = max(ended, _ended(ticket))
            self._free.append(buffer)
        for place in self._disk.values():
            if place.buffer is not None and place.ticket is not None:
                place.ticket.wait()
                self._free.append(place.buffer)
                place.buffer, place.ticket = None, None
        return ended

    # -- checkpoints -------------------------------------------------------------------------------------------
    def mapped(self, index: int) -> States:
        """Master and state for reading only. On NVMe: mapped from the swap file, so that saving needs no memory."""
        place = self._disk.get(index)
        if place is None:
            master = self.masters[index]
            return States(master, self.optimizer.state.get(master, {}))
        self.settle()
        buffer = self.store.mapped(place.key)
        # By way of numpy each section is a storage of its own: torch.save refuses two dtypes in one storage.
        views = {section.name: torch.from_numpy(self._view(buffer, section).numpy()) for section in place.sections}
        master = views.pop("master")
        return States(master, {**views, **place.numbers})

    def close(self) -> None:
        """Let go of buffers and of device memory, also where a write has failed (which is raised at the end)."""
        try:
            self.settle()
        finally:
            self._free.clear()
            for tier, master in zip(self.tiers, self.masters, strict=True):
                if tier == "device":
                    self.device.free(master, PURPOSE)
