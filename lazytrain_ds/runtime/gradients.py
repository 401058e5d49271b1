"""Gradients leave the device once, in the accumulation dtype, for their place in host memory; norm and finiteness.

A parameter's first gradient of an optimizer step is copied over what is there, later ones are added; so nothing stale
survives a step in which a parameter got no gradient (upstream keeps the old one).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch.nn import Parameter

from lazytrain_ds.optim.kernels import accumulate_, squared_norm
from lazytrain_ds.planning.schema import ChannelName
from lazytrain_ds.runtime.device.base import Device, Event
from lazytrain_ds.runtime.worker import HostWorker

__all__ = ["GradientStore"]

PURPOSE = "gradients"


class GradientStore:
    """Host gradient buffers of this rank's partition, filled during backward."""

    def __init__(
        self,
        device: Device,
        worker: HostWorker,
        buffers: dict[int, torch.Tensor],
        block_of: dict[int, int],
        threads: int = 1,
    ) -> None:
        """`buffers`: ds_id -> flat buffer of the parameter's partition, in the accumulation dtype. `block_of`: ds_id ->
        the block it belongs to."""
        self.device = device
        self.worker = worker
        self.buffers = buffers
        self.fresh: set[int] = set()
        self._assigned: set[int] = set()  # set by hand while there was no gradient: the next one replaces them
        self._taken: dict[int, int] = {}  # how often in this backward, whatever number of attempts it took
        self._arrivals: dict[int, int] = {}  # in this attempt
        self._spent: dict[int, float] = {}  # taken by the last step, times this
        self.threads = threads
        self.block_of = block_of
        self._in_flight: deque[tuple[Event, torch.Tensor, int, int]] = deque()
        device.add_reliever(2, self.wait_for_oldest)
        self._staging: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.moved_bytes = 0
        self.on_stall: Callable[[ChannelName, float], None] = lambda channel, seconds: None

    def take(self, parameter: Parameter, gradient: torch.Tensor) -> None:
        """Move one parameter's gradient (this rank's partition, any shape) to the host buffer."""
        flat = gradient.reshape(-1)
        buffer = self.buffers[parameter.ds_id].narrow(0, 0, flat.numel())
        arrivals = self._arrivals.get(parameter.ds_id, 0) + 1
        self._arrivals[parameter.ds_id] = arrivals
        if arrivals <= self._taken.get(parameter.ds_id, 0):
            return
        first = parameter.ds_id not in self.fresh or parameter.ds_id in self._assigned
        self._move(parameter.ds_id, flat, buffer, first)
        # Only now: where the device has no room for the move, this gradient is not in.
        self._taken[parameter.ds_id] = arrivals
        self._assigned.discard(parameter.ds_id)
        self.fresh.add(parameter.ds_id)
        self.moved_bytes += flat.numel() * buffer.element_size()

    def backward_begins(self) -> None:
        """A backward is about to run for the first time."""
        self._taken.clear()
        self._arrivals.clear()

    def again(self) -> None:
        """The backward under way broke off and will run again: what it has handed in is in, and is not taken twice."""
        self._arrivals.clear()

    def _move(self, ds_id: int, flat: torch.Tensor, buffer: torch.Tensor, first: bool) -> None:
        if self.device.name == "cpu":
            if first:
                buffer.copy_(flat)
            else:
                buffer.add_(flat.to(buffer.dtype))
            return
        block = self.block_of[ds_id]
        self.make_room(block)
        flat = flat.to(buffer.dtype)
        byte_count = flat.numel() * flat.element_size()
        self.device.charge(byte_count, PURPOSE)
        if first:
            event = self.device.copy_async(buffer, flat, "d2h", [self.device.record()], ("gradient", block))
        else:
            staging = self._take_staging(flat)
            event = self.device.copy_async(staging, flat, "d2h", [self.device.record()], ("gradient", block))
            self.worker.submit(partial(self._add, event, buffer, staging))
        self._in_flight.append((event, flat, byte_count, block))

    def _take_staging(self, like: torch.Tensor) -> torch.Tensor:
        free = self._staging.setdefault((like.numel(), like.dtype), [])
        return free.pop() if free else self.device.empty_host(like.numel(), like.dtype)

    def _add(self, event: Event, buffer: torch.Tensor, staging: torch.Tensor) -> None:
        event.wait()
        started = event.at if event.at is not None else time.perf_counter()
        accumulate_(buffer, staging, num_threads=self.threads)
        self.device.addition_ends(staging.numel(), started)
        self._staging[(staging.numel(), staging.dtype)].append(staging)

    def make_room(self, block: int) -> None:
        """Let go of gradients that have left; those of at most one block before `block` may still be on their way."""
        while self._in_flight:
            event, _, byte_count, _ = self._in_flight[0]
            others = dict.fromkeys(entry[3] for entry in self._in_flight if entry[3] != block)
            if len(others) >= 2:
                self.on_stall("d2h", self.device.host_waits(event))
            elif not event.done():
                return
            self._in_flight.popleft()
            self.device.ledger.discharge(byte_count, PURPOSE)

    def wait_for_oldest(self) -> bool:
        """Wait until the gradient that has been on its way longest has left the device; False if none is."""
        if not self._in_flight:
            return False
        event, _, byte_count, _ = self._in_flight.popleft()
        self.on_stall("d2h", self.device.host_waits(event))
        self.device.ledger.discharge(byte_count, PURPOSE)
        return True

    def settle(self) -> None:
        """Wait until every gradient has arrived and been added."""
        while self.wait_for_oldest():
            pass
        self.worker.drain()

    def squared_norm(self, parameters: Iterable[Parameter]) -> float:
        """Sum over `parameters`, in their order, of those that got a gradient this step (fp64)."""
        total = 0.0
        for parameter in parameters:
            if parameter.ds_id in self.fresh:
                total += squared_norm(self.buffers[parameter.ds_id], num_threads=self.threads)[0]
        return total if math.isfinite(total) else math.inf

    def missing(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        """Those of `parameters` that got no gradient in this step."""
        return [parameter for parameter in parameters if parameter.ds_id not in self.fresh]

    def spans(self, parameters: Sequence[Parameter]) -> tuple[tuple[int, int], ...] | None:
        """(offset, numel) of runs of `parameters` that got a gradient, in elements; None when all did.

        The others are skipped, as plain PyTorch does.
        """
        if not self.missing(parameters):
            return None
        spans: list[tuple[int, int]] = []
        at = 0
        for parameter in parameters:
            numel = parameter.partition_numel()
            if parameter.ds_id in self.fresh:
                if spans and sum(spans[-1]) == at:
                    spans[-1] = (spans[-1][0], spans[-1][1] + numel)
                else:
                    spans.append((at, numel))
            at += numel
        return tuple(spans)

    def step_done(self, scale: float) -> None:
        """The step has taken the gradients times `scale` (or discarded them): the next ones replace them."""
        self._spent = dict.fromkeys(self.fresh, scale)
        self.fresh.clear()
        self._assigned.clear()

    def value(self, parameter: Parameter) -> torch.Tensor:
        """A copy as fp32. Before the step what has accumulated; after it what the update took, as upstream shows it."""
        buffer = self.buffers[parameter.ds_id]
        if parameter.ds_id in self.fresh:
            return buffer.to(torch.float32, copy=True)
        scale = self._spent.get(parameter.ds_id)
        return torch.zeros(buffer.numel()) if scale is None else buffer.to(torch.float32) * scale

    def assign(self, parameter: Parameter, value: torch.Tensor) -> None:
        """Replace the gradient that the next step takes. One set before any backward gives way to that backward's."""
        buffer = self.buffers[parameter.ds_id]
        buffer.narrow(0, 0, value.numel()).copy_(value.reshape(-1))
        if parameter.ds_id not in self.fresh:
            self.fresh.add(parameter.ds_id)
            self._assigned.add(parameter.ds_id)
