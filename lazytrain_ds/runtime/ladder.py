"""Safer plans for when the device runs out of memory under the plan in force: the next one needs less than the last.

First come plans with other activations and the same placement (`planning.solve.activation_ladder`); the last one also
gives up what the placement holds on the device: residents, parameters kept until backward, prefetches, states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lazytrain_ds.errors import DeviceMemoryError, format_bytes
from lazytrain_ds.hardware.probe import cache_directory
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import BlockPlan, Plan, SubGroupPlan
from lazytrain_ds.planning.schema import digest
from lazytrain_ds.planning.simulator import Simulator, predict
from lazytrain_ds.planning.solve import activation_ladder
from lazytrain_ds.runtime.device.base import OutOfDeviceMemoryError

__all__ = ["Ladder", "changes", "safer_plans"]

RUNGS = 3


def safer_plans(instance: Instance, plan: Plan, count: int = RUNGS) -> tuple[Plan, ...]:
    """Plans of the same numerics, each of which needs less of the device than the one before it, `plan` the first."""
    rungs = list(activation_ladder(instance, plan, count))
    last = rungs[-1] if rungs else plan
    lean = _lean_placement(instance, last)
    simulator = Simulator(instance)
    outcome = simulator.run(lean)
    needed = min(simulator.run(each).peaks["device"] for each in (plan, last))
    if outcome.peaks["device"] < needed and not any(tier != "device" for tier, _, _ in outcome.shortages):
        prediction = predict(instance, lean, simulator=simulator)
        rungs.append(replace(lean.with_prediction(prediction), origin="ladder, least", instance=digest(instance)))
    return tuple(rungs)


def _lean_placement(instance: Instance, plan: Plan) -> Plan:
    """The plan with nothing on the device that need not be there when its block is not at work."""
    allowed = instance.allowed

    def lean(block: BlockPlan) -> BlockPlan:
        parameters, states = block.parameter_tier, block.optimizer
        if parameters == "device" and len(allowed.parameter_tiers) > 1:
            parameters = "host" if "host" in allowed.parameter_tiers else "nvme"
        on_host = "host" in allowed.optimizer_tiers and instance.optimizer_mode("host", states.precision) is not None
        if states.tier == "device" and on_host:
            states = SubGroupPlan("host", states.precision, "host")
        return replace(
            block,
            parameter_tier=parameters,
            optimizer=states,
            keep_parameters=False,
            parameter_lead=0,
            activation_lead=0,
        )

    return replace(plan, blocks=tuple(lean(block) for block in plan.blocks))


class Ladder:
    """The safer plans of the plan in force. Another plan in force: another ladder."""

    def __init__(self, book: Any) -> None:
        self.book = book
        self._of: Plan | None = None
        self._rungs: list[Plan] = []

    def prepare(self) -> None:
        """Compute the rungs for the plan in force, unless they are there."""
        if self._of is not self.book.plan:
            self._of = self.book.plan
            self._rungs = list(safer_plans(self.book.instance, self._of))

    def next(self) -> Plan | None:
        """The next safer plan, which the caller puts in force; None where the ladder ends."""
        self.prepare()
        return self._rungs[0] if self._rungs else None

    def climbed(self) -> None:
        """The plan that `next` gave is in force now."""
        self._rungs.pop(0)
        self._of = self.book.plan

    def end(self, cause: BaseException) -> DeviceMemoryError:
        """The error for when no safer plan is left."""
        book = self.book
        need = Simulator(book.instance).run(book.plan).peaks["device"]
        tier = book.instance.tier("device")
        return OutOfDeviceMemoryError(
            f"out of device memory, and no safer plan is left: this one needs {format_bytes(need)} by its prediction, "
            f"and more in this run; {format_bytes(tier.capacity_bytes)} are there. Use a smaller micro-batch or a "
            "shorter sequence, raise lazytrain.device_memory if the device has more, or free what else is on it. The "
            f"device said: {cause}"
        )

    def line(self, before: Plan, after: Plan, where: str) -> str:
        """What is said when `after` takes over."""
        peaks = [each.prediction.peak_bytes("device") if each.prediction else 0 for each in (before, after)]
        seconds = [each.prediction.step_seconds if each.prediction else 0.0 for each in (before, after)]
        slower = f", step {100 * (seconds[1] / seconds[0] - 1):+.0f} %" if seconds[0] > 0 else ""
        return (
            f"out of device memory in a {where}: the micro-batch runs again under a safer plan ({after.origin}; "
            f"predicted peak {format_bytes(peaks[0])} -> {format_bytes(peaks[1])}{slower}): {changes(before, after)}"
        )

    def restart(self, plan: Plan, where: str, obstacle: str, cause: BaseException) -> DeviceMemoryError:
        """The error for when `plan` would help, but the micro-batch cannot be run again."""
        path = self.save(plan)
        advice = (
            f'a safer plan is in {path}: restart from the last checkpoint with "lazytrain": {{"plan_file": "{path}"}}'
            if path is not None
            else "restart from the last checkpoint with a smaller lazytrain.device_memory"
        )
        need = plan.prediction.peak_bytes("device") if plan.prediction else 0
        have = self.book.instance.tier("device").capacity_bytes
        return OutOfDeviceMemoryError(
            f"out of device memory in a {where}, and the micro-batch cannot be run again, because {obstacle}; {advice} "
            f"(it needs {format_bytes(need)} of {format_bytes(have)}). The device said: {cause}"
        )

    def save(self, plan: Plan) -> Path | None:
        """Leave a plan for a restart, in the report directory if there is one; None where nothing can be written."""
        config = self.book.config
        configured = config.profile.cache_dir
        directory = (
            Path(config.report_dir).expanduser()
            if config.report_dir != "auto"
            else cache_directory(None if configured == "auto" else configured)
        )
        path = directory.absolute() / f"safer-plan-{digest(self.book.instance)[:12]}.json"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(plan.to_json())
        except OSError:
            return None
        return path


def changes(before: Plan, after: Plan) -> str:
    """What differs between two plans of one model, by runs of blocks that change alike."""
    return "; ".join(
        (f"block {first}" if first == last else f"blocks {first}-{last}") + ": " + text
        for first, last, text in _runs(before, after)
    )


def _runs(before: Plan, after: Plan) -> Iterator[tuple[int, int, str]]:
    texts = [_change(old, new) for old, new in zip(before.blocks, after.blocks, strict=True)]
    first = 0
    for index in range(1, len(texts) + 1):
        if index == len(texts) or texts[index] != texts[first]:
            if texts[first]:
                yield first, index - 1, texts[first]
            first = index


def _change(old: BlockPlan, new: BlockPlan) -> str:
    parts = []
    names = {
        "choice": "activations",
        "boundary": "boundary",
        "saved_tier": "saved tensors",
        "parameter_tier": "parameters",
        "keep_parameters": "parameters kept for backward",
        "parameter_lead": "parameter lead",
        "activation_lead": "activation lead",
    }
    for name, words in names.items():
        if getattr(old, name) != getattr(new, name):
            parts.append(f"{words} {_word(getattr(old, name))} -> {_word(getattr(new, name))}")
    if old.optimizer.tier != new.optimizer.tier:
        parts.append(f"states {old.optimizer.tier} -> {new.optimizer.tier}")
    return ", ".join(parts)


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
