"""A CUDA device: one stream per direction, events between them and compute, nothing that blocks the host in a step.

A copy whose dependencies are all done on the device's side is queued at once. One that waits for host work (an
optimizer update, an NVMe read) is handed to the channel's thread, which waits and queues it; then every later copy of
that channel goes through the thread too, so that the order is kept.

What copies, visits and waits took is read from timing events once they are over (`report_times`), and put on the
host's clock by an event whose moment both clocks know.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from lazytrain_ds.planning.schema import ChannelName
from lazytrain_ds.planning.timeline import TaskKind
from lazytrain_ds.runtime.device.base import Device, Event, OnWait

__all__ = ["CudaDevice", "CudaEvent"]


class CudaEvent(Event):
    """A point in a stream. `queued` is set once the host has put it there (a channel's thread may do that later)."""

    def __init__(self, event: Any = None) -> None:
        self.event = event
        self.error: BaseException | None = None
        self._queued = threading.Event()
        if event is not None:
            self._queued.set()

    def fulfil(self, event: Any, error: BaseException | None = None) -> None:
        """The work is in its stream (or failed before it got there)."""
        self.event, self.error = event, error
        self._queued.set()

    @property
    def queued(self) -> bool:
        return self._queued.is_set()

    def wait_queued(self) -> None:
        """Block the host until the work is in its stream; raises what went wrong before."""
        self._queued.wait()
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.queued and (self.error is not None or bool(self.event.query()))

    def wait(self) -> None:
        self.wait_queued()
        self.event.synchronize()


class _Channel:
    """A stream, and a thread for copies that wait for host work (started when the first one comes)."""

    def __init__(self, name: ChannelName, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device=device)
        self.copies: deque[tuple[tuple[TaskKind, int], Any, Any, int]] = deque()
        self._device = device
        self.name = name
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Event],
        task: tuple[TaskKind, int] | None = None,
    ) -> CudaEvent:
        with self._lock:
            host_work = [event for event in after if not isinstance(event, CudaEvent) or not event.queued]
            if self._waiting == 0 and all(event.done() for event in host_work):
                for event in host_work:
                    event.wait()  # raises the error of failed work
                return CudaEvent(self._enqueue(target, source, after, task))
            self._waiting += 1
            result = CudaEvent()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"lazytrain-{self.name}", daemon=True)
                self._thread.start()
        self._jobs.put((target, source, tuple(after), task, result))
        return result

    def _enqueue(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Event],
        task: tuple[TaskKind, int] | None,
    ) -> Any:
        with torch.cuda.stream(self.stream):
            for event in after:
                if isinstance(event, CudaEvent):
                    self.stream.wait_event(event.event)
            begun = None
            if task is not None:
                begun = torch.cuda.Event(enable_timing=True)
                begun.record(self.stream)
            target.copy_(source, non_blocking=True)
            for tensor in (target, source):
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)
            done = torch.cuda.Event(enable_timing=True)
            done.record(self.stream)
        if task is not None:
            self.copies.append((task, begun, done, source.numel() * source.element_size()))
        return done

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            job = self._jobs.get()
            if job is None:
                return
            target, source, after, task, result = job
            try:
                for event in after:
                    if isinstance(event, CudaEvent):
                        event.wait_queued()
                    else:
                        event.wait()
                result.fulfil(self._enqueue(target, source, after, task))
            except BaseException as error:
                result.fulfil(None, error)
            with self._lock:
                self._waiting -= 1
            del job, target, source, after, result

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


class CudaDevice(Device):
    """Real streams and events. `cap_bytes` caps what LazyTrain holds; torch's own allocations are not counted here."""

    name = "cuda"

    def __init__(self, torch_device: torch.device, cap_bytes: int | None = None, pin_memory: bool = True) -> None:
        super().__init__(torch_device, cap_bytes, pin_memory)
        names: tuple[ChannelName, ...] = ("h2d", "d2h")
        self._channels = {name: _Channel(name, torch_device) for name in names}
        self._pinning_failed = False
        self._anchor: tuple[Any, float] | None = None
        self._begun: list[tuple[str, int, Any]] = []
        self._visits: deque[tuple[str, int, Any, Any]] = deque()
        self._waits: deque[tuple[Any, CudaEvent, OnWait]] = deque()

    times_later = True

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not self.pin_memory or self._pinning_failed or numel == 0:
            return torch.empty(numel, dtype=dtype)
        try:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            self._pinning_failed = True
            print(f"[lazytrain] page-locked memory is refused ({error}); copies go on from pageable memory, slower")
            return torch.empty(numel, dtype=dtype)

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def available_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def copy_async(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        channel: ChannelName,
        after: Sequence[Event] = (),
        task: tuple[TaskKind, int] | None = None,
    ) -> Event:
        return self._channels[channel].copy(target, source, after, task)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return CudaEvent(event)

    def compute_waits(self, event: Event) -> float:
        if not isinstance(event, CudaEvent):
            started = time.perf_counter()
            event.wait()
            return time.perf_counter() - started
        blocked = 0.0
        if not event.queued:
            started = time.perf_counter()
            event.wait_queued()
            blocked = time.perf_counter() - started
        event.wait_queued()
        torch.cuda.current_stream(self.torch_device).wait_event(event.event)
        return blocked

    # -- times -------------------------------------------------------------------------------------------------
    def _mark(self) -> Any:
        """A timing event behind the compute issued so far. The first one ties the device's clock to the host's."""
        if self._anchor is None:
            anchor = torch.cuda.Event(enable_timing=True)
            anchor.record(torch.cuda.current_stream(self.torch_device))
            anchor.synchronize()  # once per run
            self._anchor = anchor, time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def _at(self, event: Any) -> float:
        """When a finished timing event happened, on the host's clock."""
        assert self._anchor is not None
        anchor, moment = self._anchor
        return moment + float(anchor.elapsed_time(event)) * 1e-3

    def waits(self, event: Event, report: OnWait) -> None:
        before = self._mark()
        self.compute_waits(event)
        if isinstance(event, CudaEvent):
            self._waits.append((before, event, report))

    def visit_begins(self, phase: str, block: int) -> int:
        self._begun.append((phase, block, self._mark()))
        return 0

    def visit_ends(self) -> tuple[float, float] | None:
        if not self._begun:
            return None
        phase, block, begun = self._begun.pop()
        ended = self._mark()
        self._visits.append((phase, block, begun, ended))
        moment = time.perf_counter()
        return moment, moment

    def report_times(self) -> None:
        if self._anchor is None:
            return
        for channel in self._channels.values():
            while channel.copies and channel.copies[0][2].query():
                task, begun, done, byte_count = channel.copies.popleft()
                if self.on_copy is not None:
                    self.on_copy(*task, channel.name, self._at(begun), self._at(done), byte_count)
        while self._visits and self._visits[0][3].query():
            phase, block, begun, ended = self._visits.popleft()
            if self.on_visit is not None:
                self.on_visit(phase, block, self._at(begun), self._at(ended))
        while self._waits and self._waits[0][0].query() and self._waits[0][1].done():
            before, event, report = self._waits.popleft()
            end = self._at(event.event)
            if event.error is None and end > self._at(before):
                report(end, end - self._at(before))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
