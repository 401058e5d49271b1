"""What a run leaves in `report_dir`, and reading it back: plan and instance in force, measured timelines, step records.

    plan.json, instance.json    the plan in force and what it was made for; replaced when the run plans again
    run.json                    versions, machine, start time
    steps.jsonl                 one `StepRecord` a line, per `steps_per_print` optimizer steps
    timelines/step-0000005.json measured Timelines: the first one reported and the newest few

Written by rank 0 only, with the user's permissions only; a file is replaced whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from lazytrain_ds.errors import ConfigError, PlanError, SchemaError
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.schema import STRICT, from_json, to_json
from lazytrain_ds.planning.simulator import predict
from lazytrain_ds.planning.timeline import Timeline

__all__ = ["RunDirectory", "Source", "StepRecord", "read_source"]

KEPT_TIMELINES = 4


@dataclass(frozen=True)
class StepRecord:
    """Means over the `steps` optimizer steps that end with `step`: seconds and bytes per optimizer step.

    `samples_per_second`: over all ranks. `stall_seconds`: compute waiting, by channel. `device_bytes`: peak so far of
    what the device held; `host_bytes`: the process's resident memory. `nvme_bytes_per_day`: bytes written, at the run's
    rate so far.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step: int
    steps: int
    step_seconds: float
    samples_per_second: float
    device_bytes: int
    host_bytes: int
    nvme_bytes_per_day: float = 0.0
    stall_seconds: dict[str, float] = field(default_factory=dict)
    byte_counts: dict[str, float] = field(default_factory=dict)

    @property
    def stall_share(self) -> float:
        """Share of the step in which compute waited for a transfer or the host."""
        return sum(self.stall_seconds.values()) / self.step_seconds if self.step_seconds > 0 else 0.0


class RunDirectory:
    """Writes a run's report. OSError where the directory cannot be written."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory).expanduser()

    def _write(self, name: str, text: str) -> None:
        target = self.path / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        scratch.write_text(text)
        scratch.replace(target)

    def begin(self, about: Mapping[str, Any]) -> None:
        """A new run: what an earlier one measured here goes, `run.json` says what this one is."""
        (self.path / "steps.jsonl").unlink(missing_ok=True)
        for old in self.path.glob("timelines/step-*.json"):
            old.unlink()
        self._write("run.json", json.dumps(dict(about), indent=1) + "\n")

    def write_plan(self, plan: Plan, instance: Instance) -> None:
        """Replace plan and instance."""
        self._write("instance.json", instance.to_json())
        self._write("plan.json", plan.to_json())

    def write_timeline(self, timeline: Timeline) -> None:
        """Add a measured timeline; of earlier ones the first and the newest are kept."""
        self._write(f"timelines/step-{timeline.step:07d}.json", to_json(timeline, indent=None))
        for old in sorted(self.path.glob("timelines/step-*.json"))[1 : 1 - KEPT_TIMELINES]:
            old.unlink()

    def append(self, record: StepRecord) -> None:
        """Add a line to `steps.jsonl`."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.path / "steps.jsonl").open("a") as file:
            file.write(to_json(record, indent=None) + "\n")


@dataclass(frozen=True)
class Source:
    """A plan with its instance, and for a run what was measured (`timelines`, `records`: oldest first)."""

    name: str
    plan: Plan
    instance: Instance
    timelines: tuple[Timeline, ...] = ()
    records: tuple[StepRecord, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether a run left something measured here."""
        return bool(self.timelines or self.records)

    def timeline(self, step: int | None = None) -> Timeline | None:
        """The measured timeline of `step`, or the newest (None: there is none). ConfigError lists what there is."""
        if step is None:
            return self.timelines[-1] if self.timelines else None
        for timeline in self.timelines:
            if timeline.step == step:
                return timeline
        steps = ", ".join(str(timeline.step) for timeline in self.timelines) or "none"
        raise ConfigError(f"--step: {self.name} has no timeline of step {step}; there are: {steps}")


def read_source(name: str) -> Source:
    """A run directory, the file that `lazytrain plan --json` wrote, or a plan.json beside its instance.json.

    Raises ConfigError (missing, not readable, not a plan), with the file and what was expected.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _read_directory(name, path)
    if not path.is_file():
        raise ConfigError(f"there is no file or directory {name!r}")
    raw = _json_of(path)
    if "plan" in raw and "instance" in raw:
        if raw["plan"] is None:
            raise ConfigError(f"{name}: nothing was planned, because nothing fits (lazytrain plan said what is short)")
        return _source(name, json.dumps(raw["plan"]), json.dumps(raw["instance"]), path)
    if "blocks" not in raw:
        raise ConfigError(f"{name}: is neither a plan nor what lazytrain plan --json writes")
    beside = path.with_name("instance.json")
    if not beside.is_file():
        raise ConfigError(
            f"{name}: a plan alone does not say what it was made for; put its instance.json beside it, or name the "
            "run's report_dir or the file that lazytrain plan --json wrote"
        )
    return _source(name, path.read_bytes(), beside.read_bytes(), path)


def _json_of(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a {type(raw).__name__}, not a plan")
    return raw


def _source(name: str, plan: str | bytes, instance: str | bytes, where: Path) -> Source:
    try:
        made, asked = Plan.from_json(plan), Instance.from_json(instance)
        made.check(asked)
    except (SchemaError, PlanError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if made.prediction is None:
        made = made.with_prediction(predict(asked, made))
    return Source(name, made, asked)


def _read_directory(name: str, path: Path) -> Source:
    files = {file: path / file for file in ("plan.json", "instance.json")}
    for file, where in files.items():
        if not where.is_file():
            raise ConfigError(
                f"{name}: there is no {file}; a run writes it when its config says "
                f'"lazytrain": {{"report_dir": "{path}"}}'
            )
    source = _source(name, files["plan.json"].read_bytes(), files["instance.json"].read_bytes(), path)
    steps = path / "steps.jsonl"
    about = path / "run.json"
    try:
        timelines = tuple(Timeline.from_json(file.read_bytes()) for file in sorted(path.glob("timelines/step-*.json")))
        lines = steps.read_text().splitlines() if steps.is_file() else []
        records = tuple(from_json(StepRecord, line) for line in lines if line.endswith("}"))  # the last may be cut
    except (OSError, SchemaError) as error:
        raise ConfigError(f"{name}: {error}") from error
    return Source(name, source.plan, source.instance, timelines, records, _json_of(about) if about.is_file() else {})
