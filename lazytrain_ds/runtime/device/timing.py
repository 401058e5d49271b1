"""Clocks of the emulated device: compute that takes planned time, host work and disks of a given rate.

Note [The emulated clock]
Values are computed for real, and far faster than the emulated device would. A visit of a block therefore ends on a
clock: it starts when the visit before it has ended and what it waited for has arrived, both on their own clocks, and
takes the plan's seconds; the thread that computed it sleeps until then. So order, waits and stalls are those that the
runtime really produces, and only how long things take is given.

A thread that comes late to the next visit by less than `SLACK_SECONDS` does not delay the device, as a real one lives
on launches queued ahead; whoever comes later counts in full. Inside a visit a loaded machine may take longer than the
visit should: that is made up for, up to `GRACE_SECONDS`, as long as the thread did not compute for longer itself (by
more than `OVERRUN_SECONDS`). So the emulated clock may be behind the real one for a while; everything that is timed
follows it, the requests of a disk included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from lazytrain_ds.runtime.device.base import Event

__all__ = ["SLACK_SECONDS", "ComputeClock", "HostClock", "Past", "RateLimit", "happened_at", "late", "sleep_until"]

SPIN_SECONDS = 3e-4  # the last bit of a wait is spun: sleep alone is late by up to 0.15 ms
SLACK_SECONDS = 2.5e-2
OVERRUN_SECONDS = 8e-3
GRACE_SECONDS = 0.25
LOAD_SECONDS = 5e-2  # host work that takes longer than this does so itself, whatever else the machine does


def sleep_until(moment: float) -> None:
    """Wait until `time.perf_counter()` reaches `moment`."""
    while True:
        left = moment - time.perf_counter()
        if left <= 0:
            return
        time.sleep(left - SPIN_SECONDS if left > SPIN_SECONDS else 0)


def late(started: float) -> float:
    """Seconds since `started` if they are more than what a loaded machine adds, else 0: the work itself is slower."""
    taken = time.perf_counter() - started
    return taken if taken > LOAD_SECONDS else 0.0


def happened_at(event: Event) -> float:
    """When a finished event happened; an event that does not know is taken to have happened just now."""
    at = getattr(event, "at", None)
    return time.perf_counter() if at is None else float(at)


class Past(Event):
    """Something that happened at a known moment."""

    def __init__(self, at: float) -> None:
        self.at = at

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _Visit(Event):
    """The end of a block's compute; it moves while the visit still waits for what it needs."""

    def __init__(self, start: float, seconds: float) -> None:
        self.start, self.seconds = start, seconds
        self.thread, self.computed = threading.get_ident(), time.thread_time()

    @property
    def at(self) -> float:  # type: ignore[override]
        return self.start + self.seconds

    def done(self) -> bool:
        return time.perf_counter() >= self.at

    def wait(self) -> None:
        while not self.done():
            sleep_until(self.at)


class ComputeClock:
    """Where the emulated compute channel stands. Driven by one thread at a time; see Note [The emulated clock].

    `overrun_seconds`, `late_seconds`: what this machine added so far, by computing for longer than a visit should take
    and by coming late to the next one; both would be 0 on a machine fast enough for the device it plays.
    """

    def __init__(self) -> None:
        self.overrun_seconds = self.late_seconds = 0.0
        self._free_at = 0.0
        self._grace = 0.0
        self._visits: list[_Visit] = []

    def now(self) -> float:
        """Up to when compute has been issued: the start of the visit under way, or the end of the last one."""
        if self._visits:
            return self._visits[-1].start
        moment = time.perf_counter()
        if moment - self._free_at > SLACK_SECONDS + self._grace:
            self.late_seconds += moment - self._free_at if self._free_at else 0.0
            self._free_at = moment
            self._grace = 0.0
        return self._free_at

    def behind(self) -> float:
        """Seconds by which this clock was behind the real one when the last visit ended."""
        return self._grace

    def played_seconds(self) -> float:
        """Where this clock stands, without what this machine added: differences are seconds of the played device."""
        return self.now() - self.overrun_seconds - self.late_seconds

    def record(self) -> Event:
        """Behind the visit under way, or behind the last one."""
        return self._visits[-1] if self._visits else Past(self.now())

    def wait_for(self, event: Event, since: float | None = None) -> float:
        """The visit under way, or the next one, starts behind `event`; the seconds by which that delays it.

        `since`: compute has waited from this moment on, in which this thread did the work that `event` ends.
        """
        before = self.now() if since is None else since
        event.wait()
        stall = max(0.0, happened_at(event) - before)
        if self._visits:
            self._visits[-1].start += stall
        else:
            self._free_at = before + stall
        return stall

    def visit_begins(self, seconds: float) -> None:
        """A visit that takes `seconds`; inside another one, that one goes on afterwards."""
        self._visits.append(_Visit(self.now(), seconds))

    def visit_ends(self) -> tuple[float, float] | None:
        """Sleep until the visit's end. (start, end); None if none is under way."""
        if not self._visits:
            return None
        visit = self._visits.pop()
        if threading.get_ident() == visit.thread:
            computed = time.thread_time() - visit.computed
            if computed > visit.seconds + OVERRUN_SECONDS:  # this CPU is slower than the device it plays
                self.overrun_seconds += computed - visit.seconds
                visit.seconds = computed
        self._grace = min(GRACE_SECONDS, max(0.0, time.perf_counter() - visit.at))
        if self._visits:
            self._visits[-1].start += visit.at - self._visits[-1].start
        else:
            self._free_at = visit.at
        visit.wait()
        return visit.start, visit.at


class HostClock:
    """The host's own work (updates, additions of gradients), one after the other. Driven by one thread."""

    def __init__(self) -> None:
        self._free_at = 0.0

    @property
    def free_at(self) -> float:
        """The end of the last work."""
        return self._free_at

    def possible(self, at: float) -> None:
        """The next work waits for something that happens at `at`."""
        self._free_at = max(self._free_at, at)

    def ends(self, started: float, seconds: float) -> float:
        """Work begun at `started` takes `seconds`: sleep for what is left of them. Returns when it ends."""
        if started - self._free_at <= SLACK_SECONDS:
            started = self._free_at  # in a row: what lies between is this machine's, not the work's
        self._free_at = started + seconds
        sleep_until(self._free_at)
        return self._free_at


class RateLimit:
    """A `Throttle` of the NVMe store: each direction moves its bytes at a rate, whatever the disk does.

    `behind`: by how much the clock of who asks is behind the real one; so much earlier has a request begun on it.
    """

    def __init__(self, bytes_per_second: Mapping[str, float | None], behind: Callable[[], float] = lambda: 0.0) -> None:
        self._rates = dict(bytes_per_second)
        self._behind = behind
        self._free_at = dict.fromkeys(self._rates, 0.0)
        self._lock = threading.Lock()

    def __call__(self, kind: str, request_bytes: int, started: float) -> tuple[float, float] | None:
        """Wait until a request is over; its start and end. None: the disk's own time, as no rate is given."""
        rate = self._rates.get(kind)
        if rate is None:
            return None
        with self._lock:
            begun = max(self._free_at[kind], started - self._behind())
            self._free_at[kind] = end = begun + request_bytes / rate
        sleep_until(end)
        moment = time.perf_counter()
        return begun, end if moment - end <= SLACK_SECONDS else moment  # later: the disk itself is slower
