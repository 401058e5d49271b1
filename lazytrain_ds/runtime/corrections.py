"""What real steps say about an Instance: compute per class of blocks, rates of channels, seconds of updates.

Corrections are relative to the *estimated* instance (from traces and the probed machine), so that they carry over to
other shapes and never pile up on each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lazytrain_ds.planning.costs import optimizer_seconds
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.schema import ChannelName
from lazytrain_ds.planning.timeline import Timeline
from lazytrain_ds.workload.measure import Seconds, from_timeline, with_measured

__all__ = ["LINKS", "Corrections", "channel_rate", "measure"]

LINKS: tuple[ChannelName, ...] = ("h2d", "d2h", "nvme_read", "nvme_write")
# A rate is believed from this many bytes of a step on: short copies take what starting them takes.
LEAST_BYTES = 1 << 16


@dataclass(frozen=True)
class Corrections:
    """`compute`: class -> measured over estimated seconds, forward and backward (None: not seen). `rates`: bytes per
    second of channels. `updates`: measured over estimated seconds of the optimizer's updates on the host."""

    compute: Mapping[str, Seconds] = field(default_factory=dict)
    rates: Mapping[ChannelName, float] = field(default_factory=dict)
    updates: float = 1.0

    def applied(self, estimated: Instance, micro_batch: int) -> Instance:
        """The instance as these corrections have it; classes and channels that were not seen keep their estimates."""
        seconds = {}
        for name, ratio in self.compute.items():
            if any(item.name == name for item in estimated.classes):
                known = next(item for item in estimated.classes if item.name == name).at(micro_batch)
                seconds[name] = Seconds(
                    None if ratio.forward is None else ratio.forward * known.forward_seconds,
                    None if ratio.backward is None else ratio.backward * known.backward_seconds,
                )
        instance = with_measured(estimated, seconds, micro_batch)
        channels = tuple(
            replace(channel, bytes_per_second=self.rates.get(channel.name, channel.bytes_per_second))
            for channel in instance.channels
        )
        modes = tuple(
            replace(mode, seconds_per_parameter=mode.seconds_per_parameter * self.updates)
            if mode.step_device == "host"
            else mode
            for mode in instance.optimizer_modes
        )
        return replace(instance, channels=channels, optimizer_modes=modes)

    def seconds(self, estimated: Instance, micro_batch: int) -> dict[str, Seconds]:
        """The measured seconds themselves, as the profile cache keeps them."""
        instance = self.applied(estimated, micro_batch)
        result = {}
        for name, ratio in self.compute.items():
            known = next((item for item in instance.classes if item.name == name), None)
            if known is not None:
                costs = known.at(micro_batch)
                result[name] = Seconds(
                    None if ratio.forward is None else costs.forward_seconds,
                    None if ratio.backward is None else costs.backward_seconds,
                )
        return result

    @classmethod
    def from_seconds(cls, estimated: Instance, micro_batch: int, seconds: Mapping[str, Seconds]) -> Corrections:
        """Corrections that give these seconds."""
        compute = {}
        for item in estimated.classes:
            if item.name in seconds:
                known, measured = item.at(micro_batch), seconds[item.name]
                compute[item.name] = Seconds(
                    _ratio(measured.forward, known.forward_seconds), _ratio(measured.backward, known.backward_seconds)
                )
        return cls(compute)


def _ratio(measured: float | None, estimated: float) -> float | None:
    return measured / estimated if measured is not None and estimated > 0 else None


def measure(estimated: Instance, plan: Plan, timelines: Sequence[Timeline]) -> Corrections:
    """What the steps of `timelines`, run under `plan`, say: medians, so that a single slow step does not count."""
    rates: dict[ChannelName, float] = {}
    for channel in LINKS:
        latency = estimated.channel(channel).latency_seconds
        seen = [rate for timeline in timelines if (rate := channel_rate(timeline, channel, latency)) is not None]
        if seen:
            rates[channel] = statistics.median(seen)
    together = replace(timelines[-1], tasks=tuple(task for timeline in timelines for task in timeline.tasks))
    measured = from_timeline(estimated, together, plan)
    compute = Corrections.from_seconds(estimated, plan.micro_batch, measured).compute
    ratios = [ratio for timeline in timelines if (ratio := _update_ratio(estimated, plan, timeline)) is not None]
    return Corrections(compute, rates, statistics.median(ratios) if ratios else 1.0)


def channel_rate(timeline: Timeline, channel: ChannelName, latency_seconds: float = 0.0) -> float | None:
    """Bytes per second while the channel was busy, its fixed cost per transfer taken off; None: too little moved."""
    tasks = sorted((task for task in timeline.tasks if task.channel == channel), key=lambda task: task.start_seconds)
    byte_count = sum(task.byte_count for task in tasks)
    if byte_count < LEAST_BYTES:
        return None
    busy, end = 0.0, float("-inf")
    for task in tasks:  # several transfers at once (NVMe) occupy the channel together
        busy += max(0.0, task.end_seconds - max(task.start_seconds, end))
        end = max(end, task.end_seconds)
    busy -= latency_seconds * len(tasks)
    return byte_count / busy if busy > 0 else None


def _update_ratio(instance: Instance, plan: Plan, timeline: Timeline) -> float | None:
    """Measured over estimated seconds of the updates on the host that `timeline` shows."""
    taken: dict[int, float] = {}
    for task in timeline.tasks:
        if task.kind == "optimizer" and task.block >= 0 and plan.blocks[task.block].optimizer.step_device == "host":
            taken[task.block] = taken.get(task.block, 0.0) + task.seconds
    expected = sum(optimizer_seconds(instance, instance.block_class(b), plan.blocks[b].optimizer) for b in taken)
    return sum(taken.values()) / expected if expected > 0 else None
