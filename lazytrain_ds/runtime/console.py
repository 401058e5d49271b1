"""What a run says: the plan as a table at its start, predicted against measured after the first steps, then one line
per `steps_per_print`; and what it leaves for others: records and timelines in `report_dir`, DeepSpeed's own monitor.
"""

from __future__ import annotations

import io
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
import torch
from rich.console import Console as Screen

from lazytrain_ds.errors import format_bytes
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.timeline import Timeline
from lazytrain_ds.report.run_directory import RunDirectory, StepRecord
from lazytrain_ds.report.screen import WIDTH
from lazytrain_ds.report.tables import decision_table, format_number, memory_table

__all__ = ["Console", "plan_lines", "record_line"]

REPORT_AFTER_STEPS = 5
NAMES_SHOWN = 8
RECORD_EVERY = 10
CHANNELS = ("h2d", "d2h", "nvme_read", "nvme_write")


def rendered(*parts: Any) -> str:
    """Tables as plain text of at most `WIDTH` columns."""
    screen = Screen(file=io.StringIO(), width=WIDTH, highlight=False)
    for part in parts:
        screen.print(part)
    return screen.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]


def plan_lines(instance: Instance, plan: Plan) -> list[str]:
    """The predicted step and peaks, in one line."""
    prediction = plan.prediction
    if prediction is None:
        return []
    peaks = ", ".join(
        f"{tier.name} {format_bytes(prediction.peak_bytes(tier.name))} of {format_bytes(tier.usable_bytes)}"
        for tier in instance.tiers
        if tier.capacity_bytes
    )
    return [
        f"  predicted step {prediction.step_seconds:.3g} s ({plan.rounds} x micro-batch {plan.micro_batch}, "
        f"optimizer {plan.optimizer_step}), {prediction.percent_of_bound:.0f} % of bound; peaks: {peaks}"
    ]


def record_line(record: StepRecord, write_budget: int | None) -> str:
    """One reporting interval in one line: step time, what compute waited for, bytes per channel, SSD wear."""
    waits = sorted(record.stall_seconds.items(), key=lambda item: -item[1])
    shares = [f"{name} {100 * s / record.step_seconds:.0f} %" for name, s in waits if s > 0.005 * record.step_seconds]
    parts = [
        f"step {record.step}: {record.step_seconds:.3g} s, {format_number(record.samples_per_second)} samples/s",
        f"compute waits {100 * record.stall_share:.0f} %" + (f" ({', '.join(shares)})" if shares else ""),
    ]
    moved = [f"{name} {format_bytes(record.byte_counts[name])}" for name in CHANNELS if record.byte_counts.get(name)]
    if moved:
        parts.append(f"per step {', '.join(moved)}")
    if record.nvme_bytes_per_day:
        limit = f" of {format_bytes(write_budget)} allowed" if write_budget is not None else ""
        parts.append(f"{format_bytes(record.nvme_bytes_per_day)} written to NVMe per day{limit}")
    return "; ".join(parts)


class _Interval:
    """Sums over the steps since the last record."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.stalls: dict[str, float] = {}
        self.byte_counts: dict[str, float] = {}

    def add(self, seconds: float, timeline: Timeline) -> None:
        self.steps += 1
        self.seconds += seconds
        for stall in timeline.stalls:
            self.stalls[stall.channel] = self.stalls.get(stall.channel, 0.0) + stall.seconds
        for task in timeline.tasks:
            if task.byte_count:
                self.byte_counts[task.channel] = self.byte_counts.get(task.channel, 0.0) + task.byte_count


class Console:
    """Prints on rank 0. `step_done` is called after every optimizer step, when the monitor has its timeline."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._speaks = int(os.environ.get("RANK", "0")) == 0
        self._last: float | None = None
        self._steps: list[float] = []
        self._done = 0
        self._noted: set[str] = set()
        self._shown: tuple[object, ...] | None = None
        self._interval = _Interval()

    def say(self, text: str) -> None:
        """One message, flushed."""
        if self._speaks:
            print(f"[lazytrain] {text}", flush=True)

    def plan(self, instance: Instance, plan: Plan, what: str) -> None:
        """Print a plan; its table only where decisions differ from the last one printed."""
        lines = [f"plan ({what}) by {plan.origin or 'file'}:", *plan_lines(instance, plan)]
        decisions = (plan.blocks, instance.order)
        if decisions == self._shown:
            lines.append("  decisions as in the table above")
        else:
            tables = [decision_table(instance, plan)]
            if plan.prediction is not None:
                tables.insert(0, memory_table(instance, plan))
            lines.append(rendered(*tables))
        self._shown = decisions
        self.say("\n".join(lines))

    def notes(self, notes: Iterable[str]) -> None:
        """Print each note once."""
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                self.say(f"note: {note}")

    def untrained(self, names: Sequence[str]) -> None:
        """Say which trainable parameters got no gradient in the first step."""
        if names:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            self.say(
                f"warning: no gradient in the first step for {', '.join(names[:NAMES_SHOWN])}{more}; "
                "they stay as they are. Freeze them (requires_grad=False) if that is meant"
            )

    # -- steps -------------------------------------------------------------------------------------------------
    def step_done(self) -> None:
        """Count a step; report after five of them (the first is left out: it warms up) and per `steps_per_print`."""
        now = time.perf_counter()
        seconds = None if self._last is None else now - self._last
        self._last = now
        self._done += 1
        timeline: Timeline = self._engine.lazytrain_timeline
        if seconds is not None:
            self._interval.add(seconds, timeline)
            self._to_deepspeed_monitor(seconds, timeline)
        if self._done <= REPORT_AFTER_STEPS and seconds is not None:
            self._steps.append(seconds)
        if self._done == REPORT_AFTER_STEPS:
            self._report()
        if self._done in (2, REPORT_AFTER_STEPS):
            self._leave(timeline)
        every = self._engine.steps_per_print()
        printing = isinstance(every, (int, float)) and every >= 1
        step = self._engine.global_steps  # stays where it is when a step is skipped for an overflow
        if step and step % (every if printing else RECORD_EVERY) == 0 and self._interval.steps:
            record = self._record()
            if printing:
                self.say(record_line(record, self._write_budget()))
            self._leave(timeline, record)

    def _write_budget(self) -> int | None:
        budget = self._engine._lt_config.nvme_write_budget
        return None if budget == "auto" else int(budget)

    def _held_bytes(self) -> int:
        device = self._engine._lt_book.device
        if device.torch_device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(device.torch_device))
        return int(device.ledger.peak_bytes)

    def _record(self) -> StepRecord:
        interval, self._interval = self._interval, _Interval()
        count, store = interval.steps, self._engine._lt_book.nvme_store
        return StepRecord(
            step=self._engine.global_steps,
            steps=count,
            step_seconds=interval.seconds / count,
            samples_per_second=self._engine.train_batch_size() * count / interval.seconds,
            device_bytes=self._held_bytes(),
            host_bytes=psutil.Process().memory_info().rss,
            nvme_bytes_per_day=store.disk_bytes_written_per_day if store is not None else 0.0,
            stall_seconds={name: value / count for name, value in interval.stalls.items()},
            byte_counts={name: value / count for name, value in interval.byte_counts.items()},
        )

    def _leave(self, timeline: Timeline, record: StepRecord | None = None) -> None:
        """Write to the report directory, if the run has one; a full disk must not end the training."""
        directory: RunDirectory | None = self._engine._lt_book.report
        if directory is None:
            return
        try:
            directory.write_timeline(timeline)
            if record is not None:
                directory.append(record)
        except OSError as error:
            self.notes([f"nothing more is written to {directory.path}: {error.strerror}"])
            self._engine._lt_book.report = None

    def _to_deepspeed_monitor(self, seconds: float, timeline: Timeline) -> None:
        """TensorBoard, CSV, W&B, Comet: whatever the user's config turned on in DeepSpeed, under `LazyTrain/`."""
        monitor = self._engine.monitor
        if not monitor.enabled or self._engine.global_rank != 0:
            return
        one = _Interval()
        one.add(seconds, timeline)
        values = {"step_seconds": seconds, "stall_share": sum(one.stalls.values()) / seconds}
        values |= {f"stall_seconds/{name}": value for name, value in one.stalls.items()}
        values |= {f"bytes/{name}": value for name, value in one.byte_counts.items()}
        values["device_bytes"] = self._held_bytes()
        store = self._engine._lt_book.nvme_store
        if store is not None:
            values["nvme_bytes_per_day"] = store.disk_bytes_written_per_day
        at = self._engine.global_samples
        monitor.write_events([(f"LazyTrain/{name}", value, at) for name, value in values.items()])

    def _report(self) -> None:
        book = self._engine._lt_book
        prediction = book.plan.prediction
        measured = statistics.median(self._steps)
        device = book.device
        lines = ["predicted against measured after 5 steps:"]
        if prediction is not None:
            lines.append(f"  step     {prediction.step_seconds:9.3g} s   {measured:9.3g} s (median of 4)")
            note = "" if device.torch_device.type == "cuda" else " (parameters, gradients and boundaries in flight)"
            lines.append(
                f"  device   {format_bytes(prediction.peak_bytes('device')):>11}   "
                f"{format_bytes(self._held_bytes()):>11}{note}"
            )
            resident = psutil.Process().memory_info().rss
            lines.append(
                f"  host     {format_bytes(prediction.peak_bytes('host')):>11}   {format_bytes(resident):>11} (process)"
            )
        self.say("\n".join(lines))
