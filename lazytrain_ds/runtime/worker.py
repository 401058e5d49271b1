"""One host thread that runs jobs in order: gradient sums, norms and optimizer updates beside the device's compute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from lazytrain_ds.errors import WorkerError
from lazytrain_ds.runtime.device.base import HostEvent

__all__ = ["HostWorker"]


class HostWorker:
    """FIFO. After a job failed, later jobs are not run; the failure is raised, once, by the next `check` or `drain`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: queue.SimpleQueue[tuple[Callable[[], float | None], HostEvent] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._idle = threading.Condition()
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], float | None]) -> HostEvent:
        """Queue `job`; the event is set when it ended, with its error if it failed.

        A job may return the time (perf_counter) at which its work was done; else that is when it returned.
        """
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        event = HostEvent()
        with self._idle:
            self._pending += 1
        self._queue.put((job, event))
        return event

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            job, event = item
            error, at = self._error, None
            if error is None:
                try:
                    at = job()
                except BaseException as caught:
                    error = self._error = caught
            failure = None if error is None else WorkerError(f"{self.name}: a job failed: {error!r}")
            if failure is not None:
                failure.__cause__ = error
            event.set(failure, at)
            del job, item
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    @property
    def busy(self) -> bool:
        """Whether jobs are queued or running."""
        return self._pending > 0

    def is_current_thread(self) -> bool:
        """Whether the caller runs on this worker."""
        return threading.current_thread() is self._thread

    def fail(self, error: BaseException) -> None:
        """Something that a job left under way went wrong: from now on as if the job had failed."""
        if self._error is None:
            self._error = error

    def check(self) -> None:
        """Raise WorkerError, with the cause, if a job failed."""
        error = self._error
        if error is not None:
            raise WorkerError(
                f"{self.name} failed earlier: {error!r}. The states of this run are incomplete; "
                "restart from the last checkpoint."
            ) from error

    def drain(self) -> None:
        """Wait until everything submitted has run, then `check`."""
        if self.is_current_thread():
            return
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)
        self.check()

    def close(self) -> None:
        """Let queued jobs finish and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
