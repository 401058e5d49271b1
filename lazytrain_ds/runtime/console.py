"""What a run says: the plan at its start, predicted against measured after the first steps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
import torch

from lazytrain_ds.errors import format_bytes
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan

__all__ = ["Console", "plan_lines"]

REPORT_AFTER_STEPS = 5
NAMES_SHOWN = 8


def plan_lines(instance: Instance, plan: Plan) -> list[str]:
    """One line per run of equal decisions of a class, then tiers, predicted peaks and step."""
    lines: list[str] = []
    start = 0
    for stop in range(1, plan.block_count + 1):
        if stop < plan.block_count and (
            plan.blocks[stop] == plan.blocks[start] and instance.order[stop] == instance.order[start]
        ):
            continue
        decisions = plan.blocks[start]
        costs = instance.costs(start, plan.micro_batch)
        choice = costs.choice(decisions.choice)
        count = stop - start
        name = instance.order[start]
        where = f"{start}" if count == 1 else f"{start}-{stop - 1}"
        parts = [f"activations {choice.name}"]
        if choice.needs_input:
            parts.append(f"boundary {decisions.boundary}")
        if choice.offloadable_bytes and decisions.saved_tier != "device":
            parts.append(f"saved tensors {decisions.saved_tier}")
        kept = " (kept for backward)" if decisions.keep_parameters and not decisions.resident else ""
        parts.append("parameters resident" if decisions.resident else f"parameters {decisions.parameter_tier}{kept}")
        group = decisions.optimizer
        if instance.block_class(start).trainable_count:
            parts.append(f"states {group.tier} {group.precision}")
        lines.append(f"  block {where:>7}  {name} x{count}: " + ", ".join(parts))
        start = stop
    prediction = plan.prediction
    if prediction is not None:
        peaks = ", ".join(
            f"{tier.name} {format_bytes(prediction.peak_bytes(tier.name))} of {format_bytes(tier.usable_bytes)}"
            for tier in instance.tiers
            if tier.capacity_bytes
        )
        lines.append(
            f"  predicted step {prediction.step_seconds:.3g} s ({plan.rounds} x micro-batch {plan.micro_batch}, "
            f"optimizer {plan.optimizer_step}), {prediction.percent_of_bound:.0f} % of bound; peaks: {peaks}"
        )
    return lines


class Console:
    """Prints on rank 0. `step_done` is called after every optimizer step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._speaks = int(os.environ.get("RANK", "0")) == 0
        self._last: float | None = None
        self._steps: list[float] = []
        self._done = 0
        self._noted: set[str] = set()

    def say(self, text: str) -> None:
        """One message, flushed."""
        if self._speaks:
            print(f"[lazytrain] {text}", flush=True)

    def plan(self, instance: Instance, plan: Plan, what: str) -> None:
        """Print a plan."""
        self.say(f"plan ({what}) by {plan.origin or 'file'}:\n" + "\n".join(plan_lines(instance, plan)))

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

    def step_done(self) -> None:
        """Count a step; after five, print predicted against measured (the first step is left out: it warms up)."""
        now = time.perf_counter()
        self._done += 1
        if self._done > REPORT_AFTER_STEPS:
            return
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now
        if self._done == REPORT_AFTER_STEPS:
            self._report()

    def _report(self) -> None:
        book = self._engine._lt_book
        prediction = book.plan.prediction
        measured = statistics.median(self._steps)
        device = book.device
        lines = ["predicted against measured after 5 steps:"]
        if prediction is not None:
            lines.append(f"  step     {prediction.step_seconds:9.3g} s   {measured:9.3g} s (median of 4)")
            held = device.ledger.peak_bytes
            if device.torch_device.type == "cuda":
                held = torch.cuda.max_memory_allocated(device.torch_device)
            note = "" if device.torch_device.type == "cuda" else " (parameters, gradients and boundaries in flight)"
            lines.append(
                f"  device   {format_bytes(prediction.peak_bytes('device')):>11}   {format_bytes(held):>11}{note}"
            )
            resident = psutil.Process().memory_info().rss
            lines.append(
                f"  host     {format_bytes(prediction.peak_bytes('host')):>11}   {format_bytes(resident):>11} (process)"
            )
        self.say("\n".join(lines))
