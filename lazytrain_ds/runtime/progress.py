"""A heartbeat for phases that take long: every 10 seconds one line says what is still going on.

    with phase("planning"):
        ...

Phases nest; the innermost one speaks. The thread exists only while a phase is open. While `deepspeed.initialize` or
`zero.Init` runs (`starting`), DeepSpeed may build kernels or wait for the lock of another build: that is said as well.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil

from lazytrain_ds.errors import format_bytes
from lazytrain_ds.hardware.kernel_builds import build_locks

__all__ = ["HEARTBEAT_SECONDS", "in_first_step", "in_phase", "phase", "starting"]

HEARTBEAT_SECONDS = 10.0

Method = TypeVar("Method", bound=Callable[..., Any])


class _Heartbeat:
    """The open phases of this process and the thread that speaks for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: list[tuple[str, float]] = []
        self._thread: threading.Thread | None = None
        self.builds = 0  # how many open phases may build kernels

    def begin(self, name: str) -> tuple[str, float]:
        entry = (name, time.monotonic())
        with self._changed:
            self._open.append(entry)
            if self._thread is None and os.environ.get("RANK", "0") == "0":
                self._thread = threading.Thread(target=self._run, name="lazytrain-heartbeat", daemon=True)
                self._thread.start()
        return entry

    def end(self, entry: tuple[str, float]) -> None:
        with self._changed:
            self._open.remove(entry)
            thread = self._thread
            if self._open or thread is None:
                return
            self._thread = None
            self._changed.notify_all()
        thread.join()

    def _run(self) -> None:
        me = threading.current_thread()
        with self._changed:
            while self._thread is me:
                name, began = self._open[-1]
                passed = time.monotonic() - began
                wait = HEARTBEAT_SECONDS - passed % HEARTBEAT_SECONDS
                self._changed.wait(wait)
                if self._thread is me and self._open[-1] == (name, began):
                    seconds = time.monotonic() - began
                    held = format_bytes(psutil.Process().memory_info().rss)
                    builds = kernel_builds(time.time() - (time.monotonic() - self._open[0][1])) if self.builds else ""
                    print(f"[lazytrain] {name}: {seconds:.0f} s so far, process memory {held}{builds}", flush=True)


_HEARTBEAT = _Heartbeat()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """While this lasts, say so every `HEARTBEAT_SECONDS` (on rank 0)."""
    entry = _HEARTBEAT.begin(name)
    try:
        yield
    finally:
        _HEARTBEAT.end(entry)


@contextmanager
def starting(name: str) -> Iterator[None]:
    """A phase in which DeepSpeed may build kernels."""
    _HEARTBEAT.builds += 1
    try:
        with phase(name):
            yield
    finally:
        _HEARTBEAT.builds -= 1


def kernel_builds(began: float) -> str:
    """What the locks of kernel builds say: those made since `began` (seconds since the epoch) are most likely ours."""
    said = []
    for lock in build_locks():
        if lock.made >= began - 1.0:  # file systems round times
            said.append(f"building {lock.kernel}")
        else:
            minutes = lock.age_seconds() / 60
            said.append(
                f"{lock.path} is there since {minutes:.0f} minutes, and a run that needs that kernel waits for the "
                "build that made it; if no build is running, one was interrupted and the wait has no end: "
                f"rm {lock.path}"
            )
    return "".join(f"; {each}" for each in said)


def in_phase(name: str) -> Callable[[Method], Method]:
    """Decorator: every call is a phase."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with phase(name):
                return method(*args, **kwargs)

        return wrapped  # type: ignore[return-value]

    return decorate


def in_first_step(name: str) -> Callable[[Method], Method]:
    """Decorator for an engine's methods: calls before the first optimizer step has ended are phases."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.global_steps:
                return method(self, *args, **kwargs)
            with phase(name):
                return method(self, *args, **kwargs)

        return wrapped  # type: ignore[return-value]

    return decorate
