"""The inner loop of the simulator: one micro-step after another, until the channels' state repeats.

See simulator.py for the contract. Times are relative to the end of the micro-step before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Final

from lazytrain_ds.planning.program import BACKWARD, FORWARD, PARAMETER, WRITE_BACK, Issue, Program
from lazytrain_ds.planning.timeline import TaskKind

__all__ = ["STALL_CHANNELS", "ExceededError", "Limits", "Playback", "Recorder"]

STALL_CHANNELS: Final = ("h2d", "d2h", "nvme_read", "nvme_write", "host")
_LONGEST_WARM_UP: Final = 6

_ISSUE_KIND: Final[dict[int, TaskKind]] = {
    PARAMETER: "parameter_fetch",
    1: "activation_prefetch",
    2: "activation_prefetch",
    WRITE_BACK: "parameter_write",
}


class ExceededError(Exception):
    """What is being played is past its limits; only `Simulator.better` sets some, and catches this."""


@dataclass(frozen=True)
class Limits:
    """What a step may take, and the levels it may reach; beyond them its figures are of no interest."""

    step_seconds: float = inf
    device_bytes: float = inf
    host_bytes: float = inf


@dataclass
class Recorder:
    """Tasks and byte levels of one micro-step, in absolute simulated time."""

    tasks: list[tuple[str, int, str, float, float, int]] = field(default_factory=list)
    levels: list[tuple[str, float, int]] = field(default_factory=list)

    def task(self, kind: str, block: int, channel: str, start: float, end: float, byte_count: int = 0) -> None:
        self.tasks.append((kind, block, channel, start, end, byte_count))

    def level(self, tier: str, at: float, byte_count: int) -> None:
        self.levels.append((tier, at, byte_count))


@dataclass
class _State:
    """Where the channels stand when a micro-step ends at time `now` (busy-until times; what is still leaving)."""

    now: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0
    nvme_read: float = 0.0
    nvme_write: float = 0.0
    host: float = 0.0
    last_gradient: float = 0.0
    copies: tuple[float, float] = (0.0, 0.0)
    additions: tuple[float, float] = (0.0, 0.0)
    tails: tuple[tuple[float, int], ...] = ()

    def relative(self, settled: float, optimizer: bool) -> tuple[float, ...]:
        """Comparable form: how long after `now` everything lasts, as far as it can matter to what follows.

        The host only works on gradients again `settled` seconds later, so what it finishes by then leaves no trace;
        when the last gradient is in matters only where an optimizer step follows (`optimizer`).
        """
        now = self.now
        busy = (self.h2d, self.d2h, self.nvme_read, self.nvme_write, *self.copies)
        values = [max(0.0, value - now) for value in busy]
        if optimizer:
            values += [max(0.0, value - now) for value in (self.host, self.last_gradient)]
        values += [value - now if value - now > settled else 0.0 for value in (self.host, *self.additions)]
        values += [value for end, byte_count in self.tails if end > now for value in (end - now, float(byte_count))]
        return tuple(values)

    def rebased(self) -> _State:
        """The same state with `now` at 0."""
        now = self.now
        return _State(
            0.0,
            self.h2d - now,
            self.d2h - now,
            self.nvme_read - now,
            self.nvme_write - now,
            self.host - now,
            self.last_gradient - now,
            (self.copies[0] - now, self.copies[1] - now),
            (self.additions[0] - now, self.additions[1] - now),
            tuple((end - now, byte_count) for end, byte_count in self.tails),
        )


def _same(left: tuple[float, ...], right: tuple[float, ...], scale: float) -> bool:
    return len(left) == len(right) and all(abs(a - b) <= 1e-9 * scale for a, b in zip(left, right, strict=True))


class Playback:
    """Plays the micro-steps of one Program; `device_peak` and `host_peak` are the highest levels met so far.

    `visited`: visits played. Raises ExceededError where `limits` are exceeded.
    """

    def __init__(self, program: Program, limits: Limits | None = None) -> None:
        self.program = program
        self.limits = limits or Limits()
        self.visited = 0
        self.device_peak = 0
        self.host_peak = 0
        self.waits: list[tuple[int, float]] | None = None
        n = program.block_count
        self.first_issues = [
            sorted((*issues, *backs)) if backs else issues
            for issues, backs in zip(program.issues, program.write_backs, strict=True)
        ]
        self.visit_seconds = [a + b for a, b in zip(program.compute_seconds, program.recompute_seconds, strict=True)]
        self.arrays = 3 * n
        # Compute that follows each visit in its micro-step.
        self._after = [*list(accumulate(reversed(self.visit_seconds)))[::-1][1:], 0.0]

    # ---- steady state

    def _guess(self) -> _State:
        """The state after a micro-step whose transfers kept up: only the last block's gradient is still leaving."""
        for kind, block in reversed(self.program.visits):
            byte_count, seconds, accumulate = self.program.gradient[block]
            if kind == BACKWARD and byte_count:
                added = seconds + (accumulate if self.program.rounds > 1 else 0.0)
                return _State(
                    d2h=seconds,
                    host=added if accumulate and self.program.rounds > 1 else 0.0,
                    last_gradient=added,
                    copies=(0.0, seconds),
                    additions=(0.0, added if self.program.rounds > 1 else 0.0),
                    tails=((seconds, byte_count),),
                )
        return _State()

    def play(self) -> tuple[list[tuple[float, dict[str, float]]], int, _State]:
        """(seconds, stalls) of the distinct micro-steps, how often the last one repeats, the state at the start."""
        rounds = self.program.rounds
        scale = sum(self.visit_seconds) or 1.0
        settled = sum(self.visit_seconds[: self.program.turn + 1])
        begin = self._guess()
        left = self.limits.step_seconds
        for _ in range(_LONGEST_WARM_UP):
            played: list[tuple[float, dict[str, float]]] = []
            state, seconds, stalls = self.micro_step(begin, 0, None, left - (rounds - 1) * scale)
            played.append((seconds, stalls))
            repeats = 1
            spent = seconds
            while len(played) < rounds:
                before = state.relative(settled, False)
                # Transfers pile up from one micro-step to the next: the rest last about as long as this one at least.
                most = (left - spent) / (rounds - len(played))
                state, seconds, stalls = self.micro_step(state.rebased(), len(played), None, most)
                played.append((seconds, stalls))
                spent += seconds
                if len(played) < rounds and (
                    _same(before, state.relative(settled, False), scale) or len(played) > _LONGEST_WARM_UP
                ):
                    repeats = rounds - len(played) + 1
                    break
            if _same(begin.relative(settled, True), state.relative(settled, True), scale):
                return played, repeats, begin
            begin = state.rebased()
        return played, repeats, begin

    # ---- one micro-step

    def micro_step(
        self, state: _State, index: int, record: Recorder | None, limit: float = inf
    ) -> tuple[_State, float, dict[str, float]]:
        """Play micro-step `index` (0: the one that follows an optimizer step) from `state`, which must have now = 0.

        Raises ExceededError as soon as it is sure to take more than `limit` seconds, or exceeds a level's limit.
        """
        program = self.program
        first = index == 0
        n = program.block_count
        visits, needs, offloads, tails_of = program.visits, program.needs, program.offloads, program.tails
        device_base, start_extra, host_base = program.device_base, program.start_extra, program.host_base
        visit_seconds, gradients = self.visit_seconds, program.gradient
        issues_at = self.first_issues if first else program.issues
        device_static, host_static = program.device_static, program.host_static
        arrived = [0.0] * self.arrays
        read_until = [0.0] * self.arrays
        stored = [0.0] * self.arrays
        h2d, d2h, nvme_read, nvme_write, host = (
            state.h2d,
            state.d2h,
            state.nvme_read,
            state.nvme_write,
            state.host,
        )
        copies, additions = state.copies, state.additions
        last_gradient = 0.0
        tails = deque(state.tails)
        tail_bytes = sum(byte_count for _, byte_count in tails)
        writes: deque[tuple[float, int]] = deque()
        write_bytes = 0
        stalls = dict.fromkeys(STALL_CHANNELS, 0.0)
        now = 0.0
        updated = [0.0] * n
        pending = 0
        updates = program.updates if first else []
        stepped = [0.0] * n
        state_writes: list[float] = []
        parameter_writes: list[float] = []
        updates_ready = state.last_gradient
        after = self._after
        most_device, most_host = self.limits.device_bytes, self.limits.host_bytes

        def advance(until: int) -> None:
            """Play host updates in forward order up to and including block `until`."""
            nonlocal pending, host, nvme_read, nvme_write
            while pending < len(updates) and updates[pending].block <= until:
                update = updates[pending]
                pending += 1
                if update.on_device:
                    continue
                ready = updates_ready
                if update.read_seconds:
                    begin = max(nvme_read, ready)
                    if len(state_writes) >= 2:
                        begin = max(begin, state_writes[-2])
                    nvme_read = ready = begin + update.read_seconds
                    if record:
                        record.task("state_read", update.block, "nvme_read", begin, ready, update.state_bytes)
                begin = max(host, ready)
                if update.parameter_write_seconds and len(parameter_writes) >= 2:
                    begin = max(begin, parameter_writes[-2])
                host = begin + update.seconds
                stepped[update.block] = done = host
                if record and update.seconds:
                    record.task("optimizer", update.block, "host", begin, host)
                if update.parameter_write_seconds:
                    begin = max(nvme_write, host)
                    nvme_write = done = begin + update.parameter_write_seconds
                    parameter_writes.append(done)
                    if record:
                        record.task("parameter_write", update.block, "nvme_write", begin, done, update.trained_bytes)
                if update.write_seconds:
                    begin = max(nvme_write, host)
                    nvme_write = begin + update.write_seconds
                    state_writes.append(nvme_write)
                    if record:
                        record.task("state_write", update.block, "nvme_write", begin, nvme_write, update.state_bytes)
                updated[update.block] = done

        if first and program.device_step_seconds:
            stalls["d2h"] += max(0.0, updates_ready)
            now = max(0.0, updates_ready)
            for update in updates:
                if not update.on_device:
                    continue
                begin, now = now, now + update.seconds
                if record:
                    record.task("optimizer", update.block, "compute", begin, now)
                done = now
                if update.parameter_d2h_seconds:
                    begin = max(d2h, now)
                    d2h = done = begin + update.parameter_d2h_seconds
                    if record:
                        record.task("parameter_write", update.block, "d2h", begin, done, update.parameter_bytes)
                stepped[update.block] = done
                if update.parameter_write_seconds:
                    begin = max(nvme_write, done)
                    nvme_write = done = begin + update.parameter_write_seconds
                    if record:
                        record.task("parameter_write", update.block, "nvme_write", begin, done, update.trained_bytes)
                updated[update.block] = done
        if first and program.serial and updates:
            advance(n)
            begin = now
            now = max(now, updates_ready, max(updated), nvme_write if state_writes else 0.0)
            self._serial_stalls(stalls, begin, updates_ready, now)

        def issue_one(issue: Issue) -> None:
            nonlocal h2d, nvme_read
            slot = issue.slot
            ready = now
            if issue.kind == PARAMETER or issue.kind == WRITE_BACK:
                if first:
                    advance(issue.block + 1)
                    if updated[issue.block] > ready:
                        ready = updated[issue.block]
            elif stored[slot] > ready:
                ready = stored[slot]
            if issue.read_seconds:
                begin = ready if ready > nvme_read else nvme_read
                nvme_read = ready = begin + issue.read_seconds
                read_until[slot] = ready
                if record:
                    record.task(_ISSUE_KIND[issue.kind], issue.block, "nvme_read", begin, ready, issue.byte_count)
            begin = ready if ready > h2d else h2d
            h2d = arrived[slot] = begin + issue.h2d_seconds
            if record:
                record.task(_ISSUE_KIND[issue.kind], issue.block, "h2d", begin, h2d, issue.byte_count)

        for offload in program.first_offloads:
            begin = d2h if d2h > now else now
            d2h = stored[offload.slot] = begin + offload.d2h_seconds
            if record:
                record.task("activation_offload", offload.block, "d2h", begin, d2h, offload.byte_count)
            if offload.write_seconds:
                begin = max(nvme_write, d2h)
                nvme_write = stored[offload.slot] = begin + offload.write_seconds
                writes.append((nvme_write, offload.byte_count))
                write_bytes += offload.byte_count
                if record:
                    record.task(
                        "activation_offload", offload.block, "nvme_write", begin, nvme_write, offload.byte_count
                    )
        copy_done = {offload.slot: d2h for offload in program.first_offloads}

        fresh_bytes = 0  # of the tails that began when the visit before ended: while it ran its base held them
        for position, (kind, block) in enumerate(visits):
            for issue in issues_at[position]:
                issue_one(issue)
            while tails and tails[0][0] <= now:
                end, byte_count = tails.popleft()
                tail_bytes -= byte_count
                if record:
                    level = device_static + self._base_before(position) + tail_bytes - fresh_bytes
                    record.level("device", max(0.0, end), level)
            fresh_bytes = 0
            level = device_static + device_base[position] + tail_bytes
            if level > self.device_peak:
                self.device_peak = level
                if level > most_device:
                    self.visited += position
                    raise ExceededError
            while writes and writes[0][0] <= now:
                write_bytes -= writes.popleft()[1]
            host_level = host_static + host_base[position] + write_bytes
            if host_level > self.host_peak:
                self.host_peak = host_level
                if host_level > most_host:
                    self.visited += position
                    raise ExceededError
            if record:
                record.level("device", now, level)
                record.level("host", now, host_level)
            start = now
            for slot in needs[position]:
                if arrived[slot] > start:
                    start = arrived[slot]
                    cause = slot
            if start > now:
                self._fetch_stalls(stalls, now, start, cause, updates_ready, stepped, updated, read_until)
            if kind == BACKWARD and copies[0] > start and gradients[block][0]:
                stalls["d2h"] += copies[0] - start
                start = copies[0]
            if self.waits is not None and start > now:
                self.waits.append((position, start - now))
            while tails and tails[0][0] <= start:
                end, byte_count = tails.popleft()
                tail_bytes -= byte_count
                if record:
                    record.level("device", end, device_static + device_base[position] + tail_bytes)
            level = device_static + device_base[position] + tail_bytes + start_extra[position]
            if level > self.device_peak:
                self.device_peak = level
                if level > most_device:
                    self.visited += position
                    raise ExceededError
            now = start + visit_seconds[position]
            if now + after[position] > limit:
                self.visited += position
                raise ExceededError
            if record:
                record.level("device", start, level)
                self._record_visit(record, kind, block, position, start, now)
            if kind == FORWARD:
                for offload in offloads[position]:
                    begin = d2h if d2h > now else now
                    d2h = begin + offload.d2h_seconds
                    stored[offload.slot] = copy_done[offload.slot] = d2h
                    if record:
                        record.task("activation_offload", offload.block, "d2h", begin, d2h, offload.byte_count)
                    if offload.write_seconds:
                        begin = nvme_write if nvme_write > d2h else d2h
                        nvme_write = stored[offload.slot] = begin + offload.write_seconds
                        writes.append((nvme_write, offload.byte_count))
                        write_bytes += offload.byte_count
                        if record:
                            record.task(
                                "activation_offload", offload.block, "nvme_write", begin, nvme_write, offload.byte_count
                            )
                for offload in tails_of[block]:
                    end = copy_done[offload.slot]
                    if end > now:
                        tails.append((end, offload.byte_count))
                        tail_bytes += offload.byte_count
                        fresh_bytes += offload.byte_count
            elif kind == BACKWARD:
                byte_count, seconds, accumulate = gradients[block]
                if byte_count:
                    begin = d2h if d2h > now else now
                    if not first and additions[0] > begin:
                        begin = additions[0]
                    d2h = begin + seconds
                    copies = (copies[1], d2h)
                    tails.append((d2h, byte_count))
                    tail_bytes += byte_count
                    fresh_bytes += byte_count
                    added = d2h
                    if record:
                        record.task("gradient", block, "d2h", begin, d2h, byte_count)
                    if not first and accumulate:
                        begin = host if host > d2h else d2h
                        host = added = begin + accumulate
                        if record:
                            record.task("accumulate", block, "host", begin, host)
                    additions = (additions[1], added)
                    if added > last_gradient:
                        last_gradient = added
        if first:
            advance(n)
        if record:
            for end, byte_count in tails:
                tail_bytes -= byte_count
                record.level("device", end, device_static + tail_bytes)
        self.visited += len(visits)
        final = _State(
            now, h2d, d2h, nvme_read, nvme_write, host, max(last_gradient, now), copies, additions, tuple(tails)
        )
        return final, now, stalls

    def _base_before(self, position: int) -> int:
        before = position - 1
        return self.program.device_base[before] + self.program.start_extra[before] if position else 0

    @staticmethod
    def _serial_stalls(stalls: dict[str, float], begin: float, gradients_in: float, end: float) -> None:
        """Compute waits for the last gradient (D2H), then for the host."""
        waited = max(begin, min(gradients_in, end))
        stalls["d2h"] += waited - begin
        stalls["host"] += max(0.0, end - waited)

    @staticmethod
    def _fetch_stalls(
        stalls: dict[str, float],
        now: float,
        start: float,
        slot: int,
        gradients_in: float,
        stepped: list[float],
        updated: list[float],
        read: list[float],
    ) -> None:
        """Split a wait from `now` to `start` for what arrives in `slot`.

        Last gradient, update, its write to NVMe, the read from there, then H2D.
        """
        if slot < len(updated) and updated[slot] > now:
            if gradients_in > now:
                until = min(start, gradients_in)
                stalls["d2h"] += until - now
                now = until
            until = min(start, max(now, stepped[slot]))
            stalls["host"] += until - now
            now = until
            until = min(start, updated[slot])
            stalls["nvme_write"] += until - now
            now = until
        if read[slot] > now:
            until = min(start, read[slot])
            stalls["nvme_read"] += until - now
            now = until
        stalls["h2d"] += start - now

    def _record_visit(self, record: Recorder, kind: int, block: int, position: int, start: float, end: float) -> None:
        again = self.program.recompute_seconds[position]
        if again:
            record.task("recompute", block, "compute", start, start + again)
        if kind == FORWARD:
            record.task("forward", block, "compute", start, end)
        elif kind == BACKWARD:
            record.task("backward", block, "compute", start + again, end)
