"""Reads and writes in flight: one queue and a few worker threads per direction, order per tensor, tickets."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lazytrain_ds.errors import SwapError, format_bytes
from lazytrain_ds.hardware.swap_path import errno_name
from lazytrain_ds.runtime.swap.backends import Backend, Kind, Segment, Worker
from lazytrain_ds.runtime.swap.memory import copy_memory, memory_view, round_up

__all__ = ["Channel", "Ledger", "OnTransfer", "Operation", "Throttle", "Ticket", "swap_error"]

logger = logging.getLogger(__name__)

Throttle = Callable[[Kind, int, float], tuple[float, float] | None]
"""`throttle(kind, request_bytes, started_seconds)`: called by the worker after each request and before it counts as
done; sleeping here makes the disk look slower (`started_seconds` is time.perf_counter() at the request's start). It may
return when the request began and ended on its own clock."""

OnTransfer = Callable[[Kind, str, int, float, float], None]
"""`on_transfer(kind, key, disk_bytes, start_seconds, end_seconds)`: called by a worker after each transfer that went
well, before its ticket is done. Times are time.perf_counter()."""


def swap_error(
    action: str, path: Path, error: OSError, wanted_bytes: int, done_bytes: int, free_bytes: int
) -> SwapError:
    """The one shape of an I/O failure: what, where, errno, bytes done of wanted, free space, what to do.

    The SwapError has `errno`, `path`, `wanted_bytes`, `done_bytes` and `free_bytes` as attributes.
    """
    detail = errno_name(error.errno)
    reason = error.strerror or str(error)
    if reason and reason not in detail:
        detail += f", {reason}"
    failure = SwapError(
        f"NVMe store: {action} failed with {detail}: {done_bytes} of {wanted_bytes} bytes done, file {path}, "
        f"{format_bytes(free_bytes)} free on its file system. Free space there or check the disk (dmesg), or set "
        "nvme_path to another one; the tensor's content on disk is not used again."
    )
    failure.errno = error.errno
    failure.path = path  # type: ignore[attr-defined]
    failure.wanted_bytes = wanted_bytes  # type: ignore[attr-defined]
    failure.done_bytes = done_bytes  # type: ignore[attr-defined]
    failure.free_bytes = free_bytes  # type: ignore[attr-defined]
    return failure


class Ticket:
    """One read or write under way. Until `wait` returned, a write's tensor must not change and a read's not be used.

    `payload_bytes` is the tensor's size, `disk_bytes` what the disk moves (padded). `start_seconds` and `end_seconds`
    are time.perf_counter() of the first request's start and of completion; None before. `ready_seconds` is when the
    last transfer that it had to wait for ended; None if there was none.
    """

    def __init__(self, kind: Kind, key: str, payload_bytes: int, disk_bytes: int) -> None:
        self.kind = kind
        self.key = key
        self.payload_bytes = payload_bytes
        self.disk_bytes = disk_bytes
        self.start_seconds: float | None = None
        self.end_seconds: float | None = None
        self.ready_seconds: float | None = None
        self._operation: Operation | None = None  # until it has ended
        self._played_end: float | None = None
        self._finished = threading.Event()
        self._error: SwapError | None = None
        self._observed = False

    def done(self) -> bool:
        """Whether it has ended, well or not. Never raises."""
        return self._finished.is_set()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until it has ended. Raises its SwapError each time if it failed, TimeoutError if it has not ended."""
        if not self._finished.wait(timeout_seconds):
            raise TimeoutError(f"NVMe store: {self.kind} of {self.key!r} not done after {timeout_seconds} s")
        if self._error is not None:
            self._observed = True
            raise self._error

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "pending"
        return f"Ticket({self.kind} {self.key!r}, {self.payload_bytes} bytes, {state})"


class Operation:
    """A transfer of one tensor as a row of requests. Whoever waits for it is in `dependents`.

    `memory` is the tensor's (address, bytes); `keep_alive` the tensor. A request is cut from the padded length, so
    only the last one can hold padding: that goes through the worker's bounce buffer, as does all of a tensor whose
    memory the back end cannot take (`direct` false).
    """

    def __init__(
        self, ticket: Ticket, path: Path, memory: Segment, keep_alive: torch.Tensor | None, *, direct: bool,
        request_bytes: int, length_alignment_bytes: int, on_ready: Callable[[Operation], None], by_caller: bool = False,
    ) -> None:  # fmt: skip
        self.ticket = ticket
        ticket._operation = self
        self.path = path
        self.memory = memory
        self.keep_alive = keep_alive
        self.direct = direct
        self.request_bytes = request_bytes
        self.length_alignment_bytes = length_alignment_bytes
        self.on_ready = on_ready
        self.by_caller = by_caller  # moved and finished by the thread that asked (export), not by a channel
        self.source: Operation | None = None  # for a read: the write whose data it wants
        self.waits_for = 0
        self.dependents: list[Operation] = []
        self.count = -(-ticket.disk_bytes // request_bytes)
        self.taken = 0
        self.running = 0
        self.ended = False
        self.done_bytes = 0
        self.error: SwapError | None = None
        self.lock = threading.Lock()
        self._file: Any = None

    def fail(self, error: SwapError) -> None:
        """Keep the first error."""
        if self.error is None:
            self.error = error

    def perform(self, index: int, worker: Worker, backend: Backend) -> int:
        """Move request `index`. Returns the bytes moved on disk; raises OSError."""
        kind = self.ticket.kind
        address, payload = self.memory
        start = index * self.request_bytes
        stop = min(start + self.request_bytes, self.ticket.disk_bytes)
        size, wanted = stop - start, min(stop, payload) - start  # wanted: without the padding
        alignment = self.length_alignment_bytes
        whole = wanted // alignment * alignment if self.direct else 0
        rest = wanted - whole
        segments: list[Segment] = [(address + start, whole)] if whole else []
        if size > whole:
            bounce, _ = worker.staging(round_up(self.request_bytes, 4096) if not self.direct else alignment)
            if kind == "write":
                copy_memory(bounce, address + start + whole, rest)
                memory_view(bounce + rest, size - whole - rest)[:] = bytes(size - whole - rest)
            segments.append((bounce, size - whole))
        self.move(backend, worker, segments, start)
        if kind == "read" and size > whole:
            copy_memory(address + start + whole, bounce, rest)
        return size

    def move(self, backend: Backend, worker: Worker, segments: list[Segment], offset: int) -> None:
        """Give `segments` to the worker, with the file opened at the first call."""
        with self.lock:
            if self._file is None:
                self._file = backend.open(self.path, self.ticket.kind)
        worker.transfer(self.ticket.kind, self._file, segments, offset)

    def close_file(self, backend: Backend) -> None:
        if self._file is not None:
            backend.close(self._file)
            self._file = None


class Ledger:
    """What both channels share: order, counters, hooks. Holds nothing of the store, so that a store that nobody uses
    any more can be collected while its threads wait."""

    def __init__(
        self, free_bytes: Callable[[], int], on_transfer: OnTransfer | None, throttle: Throttle | None
    ) -> None:
        self.lock = threading.RLock()
        self.free_bytes = free_bytes
        self.on_transfer = on_transfer
        self.throttle = throttle
        self.closing = False
        self.payload_bytes: dict[Kind, int] = {"read": 0, "write": 0}
        self.disk_bytes: dict[Kind, int] = {"read": 0, "write": 0}
        self.unobserved: list[Ticket] = []

    def submit(self, operation: Operation, after: Iterable[Operation]) -> None:
        """Start `operation` once all of `after` have ended. Call with `lock` held, in the order that shall count."""
        for earlier in after:
            if not earlier.ended:
                earlier.dependents.append(operation)
                operation.waits_for += 1
        if operation.waits_for == 0:
            operation.on_ready(operation)

    def finish(self, operation: Operation) -> None:
        """Book an operation that has ended, wake who waits for it, start what came after it."""
        settled = [operation]
        while settled:  # a loop: at close, a long chain on one tensor would overflow the stack
            current = settled.pop()
            for ready in self._settle(current):
                if self.closing:
                    ready.fail(_closed_error(ready))
                if self.closing and not ready.by_caller:
                    settled.append(ready)
                else:
                    ready.on_ready(ready)

    def _settle(self, operation: Operation) -> list[Operation]:
        ticket = operation.ticket
        operation.keep_alive = None
        ticket.end_seconds = time.perf_counter() if ticket._played_end is None else ticket._played_end
        if ticket.start_seconds is None:
            ticket.start_seconds = ticket.end_seconds
        ticket._error = operation.error
        with self.lock:
            self.disk_bytes[ticket.kind] += operation.done_bytes
            if operation.error is None:
                self.payload_bytes[ticket.kind] += ticket.payload_bytes
            elif not self.closing:
                self.unobserved = [known for known in self.unobserved if not known._observed] + [ticket]
        if operation.error is None and self.on_transfer is not None:
            try:
                self.on_transfer(ticket.kind, ticket.key, ticket.disk_bytes, ticket.start_seconds, ticket.end_seconds)
            except Exception:
                logger.exception("NVMe store: on_transfer failed for %r; the transfer itself is fine", ticket)
        with self.lock:
            operation.ended = True
            ticket._operation = None
            dependents, operation.dependents = operation.dependents, []
            for dependent in dependents:
                dependent.waits_for -= 1
                dependent.ticket.ready_seconds = max(ticket.end_seconds, dependent.ticket.ready_seconds or 0.0)
            ready = [dependent for dependent in dependents if dependent.waits_for == 0]
        ticket._finished.set()
        return ready


class Channel:
    """The queue of one direction. Workers take requests first in, first out; a large tensor keeps several busy."""

    def __init__(self, kind: Kind, backend: Backend, threads: int, ledger: Ledger) -> None:
        self._backend = backend
        self._ledger = ledger
        self._queue: deque[Operation] = deque()
        # An RLock inside (Condition's default): a store may be collected, and so closed, while this thread holds it.
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"lazytrain-nvme-{kind}-{number}", daemon=True)
            for number in range(threads)
        ]
        self._workers_ready = threading.Barrier(threads + 1)
        self._start_error: BaseException | None = None
        for thread in self._threads:
            thread.start()
        self._workers_ready.wait()
        if self._start_error is not None:
            self.close()
            raise SwapError(f"NVMe store: the {backend.name} back end did not start: {self._start_error}")

    def owns_current_thread(self) -> bool:
        return threading.current_thread() in self._threads

    def push(self, operation: Operation) -> None:
        """Queue an operation whose dependencies are done."""
        with self._changed:
            if not self._closing:
                self._queue.append(operation)
                self._changed.notify(max(1, operation.count))
                return
        operation.fail(_closed_error(operation))
        self._finish(operation)

    def close(self) -> None:
        """Let requests in flight end, fail what is queued, join the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        while self._queue:
            operation = self._queue.popleft()
            operation.fail(_closed_error(operation))
            self._finish(operation)

    def _run(self) -> None:
        worker = None
        try:
            worker = self._backend.worker()
        except BaseException as error:
            self._start_error = error
        self._workers_ready.wait()
        if worker is None:
            return
        try:
            while True:
                with self._changed:
                    while not self._queue and not self._closing:
                        self._changed.wait()
                    if self._closing:
                        return
                    operation = self._queue[0]
                    index = operation.taken
                    operation.taken += 1
                    operation.running += 1
                    if operation.taken >= operation.count:
                        self._queue.popleft()
                self._step(operation, index, worker)
                del operation  # an idle worker must not keep the last tensor (nor, through it, the store) alive
        finally:
            worker.close()

    def _step(self, operation: Operation, index: int, worker: Worker) -> None:
        ticket = operation.ticket
        started = time.perf_counter()
        moved, failure, ended = 0, None, None
        try:
            source = operation.source
            if source is not None and source.error is not None:
                failure = SwapError(f"NVMe store: {ticket.key!r} has no valid content, its last write failed")
                failure.__cause__ = source.error
            elif operation.count:
                moved = operation.perform(index, worker, self._backend)
                throttle = self._ledger.throttle
                played = None if throttle is None else throttle(ticket.kind, moved, started)
                if played is not None:
                    started, ended = played
        except OSError as error:
            moved = getattr(error, "done_bytes", 0)
            failure = swap_error(
                f"{ticket.kind} of {ticket.key!r}", operation.path, error, ticket.disk_bytes,
                operation.done_bytes + moved, self._ledger.free_bytes(),
            )  # fmt: skip
            failure.__cause__ = error
        except BaseException as error:
            failure = SwapError(f"NVMe store: {ticket.kind} of {ticket.key!r} failed: {error!r}")
            failure.__cause__ = error
        with self._changed:
            if ticket.start_seconds is None or started < ticket.start_seconds:
                ticket.start_seconds = started
            if ended is not None:
                ticket._played_end = max(ended, ticket._played_end or 0.0)
            operation.done_bytes += moved
            if failure is not None:
                operation.fail(failure)
            if operation.error is not None and operation.taken < operation.count:
                operation.taken = operation.count  # skip the rest
                self._queue.remove(operation)
            operation.running -= 1
            last = operation.running == 0 and operation.taken >= operation.count
        if last:
            self._finish(operation)

    def _finish(self, operation: Operation) -> None:
        operation.close_file(self._backend)
        self._ledger.finish(operation)


def _closed_error(operation: Operation) -> SwapError:
    return SwapError(f"NVMe store: closed before {operation.ticket!r} was done")
