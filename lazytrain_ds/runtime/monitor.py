"""Fills a Timeline from a real run: tasks on channels, bytes held, seconds compute waited. Off the critical path.

Everything that happens reports a tuple here (an append, from any thread); a Timeline is made of them at the end of an
optimizer step. Times are `time.perf_counter()`.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from lazytrain_ds.planning.schema import ChannelName, TierName
from lazytrain_ds.planning.timeline import MemorySample, Stall, Task, TaskKind, Timeline

__all__ = ["Monitor"]

KEPT_STEPS = 8
VISITS: dict[str, TaskKind] = {"forward": "forward", "rerun": "recompute", "backward": "backward"}
NVME_KINDS: dict[tuple[str, str], TaskKind] = {
    ("read", "parameters"): "parameter_fetch",
    ("write", "parameters"): "parameter_write",
    ("read", "states"): "state_read",
    ("write", "states"): "state_write",
    ("read", "activations"): "activation_prefetch",
    ("write", "activations"): "activation_offload",
}


class Monitor:
    """One per engine. `timelines` are those of the last steps, newest last."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.timelines: deque[Timeline] = deque(maxlen=KEPT_STEPS)
        self.micro_step = 0
        self._tasks: list[tuple[TaskKind, int, ChannelName, float, float, int, int]] = []
        self._memory: list[tuple[TierName, float, int]] = []
        self._stalls: dict[ChannelName, float] = {}
        self._lock = threading.Lock()
        self._started = time.perf_counter()

    # -- reports -----------------------------------------------------------------------------------------------
    def task(
        self, kind: TaskKind, block: int, channel: ChannelName, start: float, end: float, byte_count: int = 0
    ) -> None:
        """Something occupied a channel."""
        self._tasks.append((kind, block, channel, start, end, byte_count, self.micro_step))

    def transfer_task(
        self, kind: TaskKind, block: int, channel: ChannelName, start: float, end: float, byte_count: int
    ) -> None:
        """`task`, for who also reports compute that is part of a visit: transfers only."""
        if channel in ("h2d", "d2h"):
            self.task(kind, block, channel, start, end, byte_count)

    def visit(self, phase: str, block: int, start: float, end: float) -> None:
        """Compute used a block (from the coordinator)."""
        self.task(VISITS[phase], block, "compute", start, end)

    def transfer(self, kind: str, key: str, disk_bytes: int, start: float, end: float) -> None:
        """An NVMe transfer ended (from the store's workers)."""
        room, _, rest = key.partition("/")
        number = rest.partition("/")[0]
        task = NVME_KINDS.get((kind, room), NVME_KINDS[kind, "activations"])
        block = int(number) if room == "parameters" and number.isdigit() else -1
        self.task(task, block, "nvme_read" if kind == "read" else "nvme_write", start, end, disk_bytes)

    def stall(self, channel: ChannelName, seconds: float) -> None:
        """Compute waited for a channel."""
        if seconds > 0:
            with self._lock:
                self._stalls[channel] = self._stalls.get(channel, 0.0) + seconds

    def memory(self, tier: TierName, byte_count: int) -> None:
        """Bytes held in a tier from now on."""
        self._memory.append((tier, time.perf_counter(), byte_count))

    # -- steps -------------------------------------------------------------------------------------------------
    def step_ended(self, step: int) -> Timeline:
        """Close the step: everything reported since the last one, with times from its start."""
        now = time.perf_counter()
        with self._lock:
            tasks, self._tasks = self._tasks, []
            memory, self._memory = self._memory, []
            stalls, self._stalls = self._stalls, {}
            started, self._started = self._started, now
        self.micro_step = 0
        timeline = Timeline(
            tasks=tuple(
                Task(kind, block, channel, start - started, max(start, end) - started, byte_count, micro_step)
                for kind, block, channel, start, end, byte_count, micro_step in tasks
            ),
            memory=tuple(MemorySample(tier, at - started, byte_count) for tier, at, byte_count in memory),
            stalls=tuple(Stall(channel, seconds) for channel, seconds in sorted(stalls.items())),
            step_seconds=now - started,
            rank=self.rank,
            step=step,
            source="measured",
        )
        self.timelines.append(timeline)
        return timeline
