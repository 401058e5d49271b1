"""Plans, and directories as runs leave them, without a run. Not a test module."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.planner_instances import SHAPES
from benchmarks.planner_instances import instance as big_instance
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.simulator import predict, simulate
from lazytrain_ds.planning.solve import solve
from lazytrain_ds.report.run_directory import RunDirectory, StepRecord

SMALL = big_instance(
    replace(SHAPES["0.5B"], name="small", layers=6), "rtx3090", rounds_of_first=2, device_bytes=8 * 10**9
)


@cache
def _solved(instance: Instance, kind: str) -> Plan:
    return solve(instance, kind=kind, time_limit_seconds=0.1)


def planned(instance: Instance = SMALL, kind: str = "checkpoint_all_host", **changes: Any) -> Plan:
    """A rule's plan with its prediction (quick to make); `changes` go into every block."""
    plan = _solved(instance, kind)
    if changes:
        plan = replace(plan, blocks=tuple(replace(block, **changes) for block in plan.blocks), prediction=None)
        plan = plan.with_prediction(predict(instance, plan))
    return plan


def plan_file(path: Path, plan: Plan, instance: Instance = SMALL) -> str:
    """What `lazytrain plan --json` writes, as far as readers look."""
    path.write_text(json.dumps({"plan": json.loads(plan.to_json()), "instance": json.loads(instance.to_json())}))
    return str(path)


def record(step: int, seconds: float, **changes: Any) -> StepRecord:
    return replace(
        StepRecord(step, 10, seconds, 1000.0, 5 * 10**9, 7 * 10**9, 0.0, {"h2d": 0.2 * seconds}, {"h2d": 1e9}),
        **changes,
    )


def run_directory(path: Path, plan: Plan, steps: tuple[int, ...] = (5,), factor: float = 1.1) -> str:
    """A run whose measured steps took `factor` times the predicted ones, cut where a run cuts them: at `step()`."""
    directory = RunDirectory(path)
    directory.begin({"torch": "2.13.0"})
    directory.write_plan(plan, SMALL)
    for step in steps:
        directory.write_timeline(measured(plan, step, factor))
        directory.append(record(step, factor * plan.prediction.step_seconds))
    return str(path)


def measured(plan: Plan, step: int = 5, factor: float = 1.1) -> Any:
    """The predicted timeline, `factor` times as slow, said to be measured."""
    timeline = simulate(SMALL, plan)
    return replace(
        timeline,
        tasks=tuple(
            replace(t, start_seconds=factor * t.start_seconds, end_seconds=factor * t.end_seconds)
            for t in timeline.tasks
        ),
        memory=tuple(replace(s, at_seconds=factor * s.at_seconds) for s in timeline.memory),
        stalls=tuple(replace(s, seconds=factor * s.seconds) for s in timeline.stalls),
        step_seconds=factor * timeline.step_seconds,
        step=step,
        source="measured",
    )
