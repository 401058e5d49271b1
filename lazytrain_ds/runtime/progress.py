"""A heartbeat for phases that take long: every 10 seconds one line says what is still going on.

    with phase("planning"):
        ...

Phases nest; the innermost one speaks. The thread exists only while a phase is open.
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

__all__ = ["HEARTBEAT_SECONDS", "in_first_step", "in_phase", "phase"]

HEARTBEAT_SECONDS = 10.0

Method = TypeVar("Method", bound=Callable[..., Any])


class _Heartbeat:
    """The open phases of this process and the thread that speaks for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: list[tuple[str, float]] = []
        self._thread: threading.Thread | None = None

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
                    print(f"[lazytrain] {name}: {seconds:.0f} s so far, process memory {held}", flush=True)


_HEARTBEAT = _Heartbeat()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """While this lasts, say so every `HEARTBEAT_SECONDS` (on rank 0)."""
    entry = _HEARTBEAT.begin(name)
    try:
        yield
    finally:
        _HEARTBEAT.end(entry)


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
