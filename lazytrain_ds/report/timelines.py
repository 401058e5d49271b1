"""Predicted and measured timelines side by side: put on one clock, summed up by channel, and as a Chrome trace.

A step is a cycle. The simulator cuts it at the end of the last backward, a run where `step()` returns; here both begin
at the end of the last backward, so that the optimizer comes first and pictures can be laid over each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from lazytrain_ds.errors import format_bytes
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.schema import CHANNELS, TIERS
from lazytrain_ds.planning.simulator import simulate
from lazytrain_ds.planning.timeline import MemorySample, Task, Timeline
from lazytrain_ds.report.screen import table

__all__ = ["Lane", "aligned", "channel_table", "chrome_trace", "lanes_of"]

COMPUTE_KINDS = ("forward", "backward", "recompute")


@dataclass(frozen=True)
class Lane:
    """A timeline with the name it is drawn under."""

    name: str
    timeline: Timeline


def aligned(timeline: Timeline) -> Timeline:
    """The same step, cut at the end of its last backward instead of where it was cut (as it is, if it has none)."""
    ends = [task.end_seconds for task in timeline.tasks if task.kind == "backward" and task.channel == "compute"]
    cut = max(ends, default=0.0)
    length = timeline.step_seconds
    if not ends or cut >= length or cut <= 0:
        return timeline

    def moved(at: float) -> float:
        return at - cut if at >= cut else at - cut + length

    tasks = []
    for task in timeline.tasks:
        start = moved(task.start_seconds)
        tasks.append(replace(task, start_seconds=start, end_seconds=start + task.seconds))
    samples: list[MemorySample] = []
    for tier in TIERS:
        own = [sample for sample in timeline.memory if sample.tier == tier]
        samples += sorted(
            (replace(sample, at_seconds=moved(sample.at_seconds)) for sample in own), key=lambda s: s.at_seconds
        )
    return replace(timeline, tasks=tuple(tasks), memory=tuple(samples))


def lanes_of(instance: Instance, plan: Plan, measured: Timeline | None) -> list[Lane]:
    """What is predicted for the plan and, if given, what was measured, on one clock."""
    lanes = [Lane("predicted", aligned(simulate(instance, plan)))]
    if measured is not None:
        lanes.append(Lane(f"measured, step {measured.step}", aligned(measured)))
    return lanes


def channel_table(lanes: Sequence[Lane]) -> Table:
    """Per channel what it carried, how long it was busy, how long compute waited for it; a column per lane each."""
    short = [lane.name.partition(",")[0] for lane in lanes]
    made = table("By channel, per optimizer step", "channel")
    for what in ("bytes", "busy", "waited for"):
        for name in short:
            made.add_column(f"{what},\n{name}" if len(lanes) > 1 else what, justify="right")
    for channel in CHANNELS:
        if not any(task.channel == channel for lane in lanes for task in lane.timeline.tasks):
            continue
        row = [format_bytes(lane.timeline.channel_bytes(channel)) if channel not in ("compute", "host") else "-"
               for lane in lanes]  # fmt: skip
        row += [f"{lane.timeline.busy_seconds(channel):.3g} s" for lane in lanes]
        row += [f"{lane.timeline.stall_seconds(channel):.3g} s" if channel != "compute" else "-" for lane in lanes]
        made.add_row(channel, *row)
    return made


# -- Chrome / Perfetto ------------------------------------------------------------------------------------------------


def chrome_trace(lanes: Sequence[Lane], instance: Instance) -> dict[str, Any]:
    """A trace that chrome://tracing and ui.perfetto.dev open: a process per lane, a thread per channel, counters.

    Times are microseconds. The cap of a tier is a counter beside the bytes in it.
    """
    events: list[dict[str, Any]] = []
    for process, lane in enumerate(lanes, start=1):
        events.append({"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": lane.name}})
        for thread, channel in enumerate(CHANNELS):
            about = {"ph": "M", "pid": process, "tid": thread}
            events.append({**about, "name": "thread_name", "args": {"name": channel}})
            events.append({**about, "name": "thread_sort_index", "args": {"sort_index": thread}})
        events += [_task_event(process, task, instance) for task in lane.timeline.tasks]
        for tier in TIERS:
            samples = [sample for sample in lane.timeline.memory if sample.tier == tier]
            cap = instance.tier(tier).usable_bytes
            for sample in samples:
                args = {"in use": sample.byte_count, "cap": cap}
                at = max(0.0, sample.at_seconds) * 1e6
                events.append({"ph": "C", "pid": process, "name": f"{tier} bytes", "ts": at, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _task_event(process: int, task: Task, instance: Instance) -> dict[str, Any]:
    args: dict[str, Any] = {"micro_step": task.micro_step}
    name = task.kind.replace("_", " ")
    if task.block >= 0:
        args["block"] = task.block
        if task.block < instance.block_count:
            args["class"] = instance.order[task.block]
        name += f" {task.block}"
    if task.byte_count:
        args["bytes"] = task.byte_count
    return {
        "ph": "X",
        "pid": process,
        "tid": CHANNELS.index(task.channel),
        "name": name,
        "cat": task.kind,
        "ts": task.start_seconds * 1e6,
        "dur": task.seconds * 1e6,
        "args": args,
    }
