"""A CUDA device: one stream per direction, events between them and compute, nothing that blocks the host in a step.

A copy whose dependencies are all done on the device's side is queued at once. One that waits for host work (an
optimizer update, an NVMe read) is handed to the channel's thread, which waits and queues it; then every later copy of
that channel goes through the thread too, so that the order is kept.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from lazytrain_ds.planning.schema import ChannelName
from lazytrain_ds.planning.timeline import TaskKind
from lazytrain_ds.runtime.device.base import Device, Event

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

    def __init__(self, name: str, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device=device)
        self._device = device
        self._name = name
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> CudaEvent:
        with self._lock:
            host_work = [event for event in after if not isinstance(event, CudaEvent) or not event.queued]
            if self._waiting == 0 and all(event.done() for event in host_work):
                for event in host_work:
                    event.wait()  # raises the error of failed work
                return CudaEvent(self._enqueue(target, source, after))
            self._waiting += 1
            result = CudaEvent()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"lazytrain-{self._name}", daemon=True)
                self._thread.start()
        self._jobs.put((target, source, tuple(after), result))
        return result

    def _enqueue(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> Any:
        with torch.cuda.stream(self.stream):
            for event in after:
                if isinstance(event, CudaEvent):
                    self.stream.wait_event(event.event)
            target.copy_(source, non_blocking=True)
            for tensor in (target, source):
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)
            done = torch.cuda.Event()
            done.record(self.stream)
        return done

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            job = self._jobs.get()
            if job is None:
                return
            target, source, after, result = job
            try:
                for event in after:
                    if isinstance(event, CudaEvent):
                        event.wait_queued()
                    else:
                        event.wait()
                result.fulfil(self._enqueue(target, source, after))
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
        self._channels = {name: _Channel(name, torch_device) for name in ("h2d", "d2h")}
        self._pinning_failed = False

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
        return self._channels[channel].copy(target, source, after)

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

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
