"""Predicted against measured while a run goes on: when a plan is off, and what is done about it.

After the first steps, and again when a channel's rate has dropped for good, the plan is simulated with what was
measured (`corrections.py`). Where that, or the seconds compute waited, is more than `TOLERANCE` away from what the plan
promised, it is solved again with the measured figures. A better plan takes over between two optimizer steps; numerics
(micro-batch, accumulation, state precision) are not the planner's to change here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import ConfigError, InfeasibleError, LazyTrainError, PlanError
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.schema import ChannelName, digest
from lazytrain_ds.planning.simulator import Outcome, Simulator, predict
from lazytrain_ds.planning.timeline import Timeline
from lazytrain_ds.runtime.corrections import LINKS, Corrections, channel_rate, measure

__all__ = ["TOLERANCE", "Replanner", "Verdict", "make_replanner"]

TOLERANCE = 0.15
WARM_UP_STEPS = 1
WINDOW_STEPS = 4
# So many steps in a row have to be slow before a channel counts as slower than it was.
DROP_STEPS = 3
LEAST_GAIN = 0.02
RESOLVES_AFTER_DROPS = 3


@dataclass(frozen=True)
class Verdict:
    """A plan under what was measured. `promised`, `corrected`: seconds per step. `waited`: seconds per channel."""

    instance: Instance
    corrections: Corrections
    promised: float
    corrected: float
    waited: dict[str, float]
    promised_waits: dict[str, float]

    @property
    def off_by(self) -> float:
        """The larger of two shares of the promised step: how far the corrected one is away, and how far the waits."""
        waits = sum(abs(self.waited.get(name, 0.0) - self.promised_waits.get(name, 0.0)) for name in LINKS)
        return max(abs(self.corrected - self.promised), waits) / self.promised if self.promised > 0 else 0.0

    def reasons(self, before: Instance) -> str:
        """What differs from `before`, in words."""
        parts = []
        for channel in before.channels:
            now = self.instance.channel(channel.name).bytes_per_second
            if channel.name in LINKS and abs(now / channel.bytes_per_second - 1) > TOLERANCE:
                parts.append(f"{channel.name} {now / 1e9:.3g} GB/s instead of {channel.bytes_per_second / 1e9:.3g}")
        compute = [
            value
            for seconds in self.corrections.compute.values()
            for value in (seconds.forward, seconds.backward)
            if value is not None
        ]
        if compute:
            parts.append(f"blocks take {min(compute):.2g} to {max(compute):.2g} times their estimate")
        if abs(self.corrections.updates - 1) > TOLERANCE:
            parts.append(f"optimizer updates {self.corrections.updates:.2g} times")
        return ", ".join(parts)


def make_replanner(book: Any, config: LazyTrainConfig, say: Callable[[str], None]) -> Replanner | None:
    """The one that the block's `replan` asks for; None for none.

    `"auto"` leaves the plan alone where somebody else decided it (`plan_file`, `policy`), with more ranks (their
    times differ, and they would have to agree), and where blocks are not timed; `true` is refused there, by name.
    """
    if config.replan is False:
        return None
    reasons = {
        f'"lazytrain.plan_file": {config.plan_file!r} says what to do': config.plan_file != "auto",
        f'"lazytrain.policy": {config.policy!r} decides instead of the plan': config.policy != "auto",
        f"there are {book.world_size} ranks, and only one rank can change its plan in a run": book.world_size > 1,
        "blocks are not timed on this kind of device yet": not book.times_blocks,
    }
    for reason, holds in reasons.items():
        if holds and config.replan is True:
            raise ConfigError(f'"lazytrain.replan": true is not possible here, because {reason}; set it to "auto"')
        if holds:
            return None
    return Replanner(book, config.replan is True, say)


class Replanner:
    """One per engine. `step_done` is called after each optimizer step, when the next one has not begun.

    `always`: look again after every window of steps, as often as the plan is off; else once, and after lasting drops.
    """

    def __init__(self, book: Any, always: bool, say: Callable[[str], None]) -> None:
        self.book = book
        self.always = always
        self.say = say
        self.resolved = 0
        self._steps: list[Timeline] = []
        self._to_skip = WARM_UP_STEPS
        self._first_look_done = False
        self._after_drops = 0
        self._reference: dict[ChannelName, float] = {}
        self._slow: dict[ChannelName, int] = {}

    def step_done(self, timeline: Timeline) -> tuple[Instance, Plan] | None:
        """Note a step; the plan to go on with and its instance, where that is another one."""
        if self._to_skip:
            self._to_skip -= 1
            return None
        self._steps.append(timeline)
        del self._steps[:-WINDOW_STEPS]
        look = self._first_look if not self._first_look_done else self._watch
        return look()

    def plan_changed(self) -> None:
        """Steps so far say nothing about the plan now in force, and its first one warms up."""
        self._steps.clear()
        self._slow.clear()
        self._to_skip = WARM_UP_STEPS

    # -- when ----------------------------------------------------------------------------------------------------
    def _first_look(self) -> tuple[Instance, Plan] | None:
        if len(self._steps) < WINDOW_STEPS:
            return None
        self._first_look_done = not self.always
        verdict = self._verdict(self._steps)
        self.book.keep_measured(verdict.corrections)
        self._reference = dict(verdict.corrections.rates)
        self._steps.clear()
        if verdict.off_by <= TOLERANCE:
            return None
        return self._solve(verdict)

    def _watch(self) -> tuple[Instance, Plan] | None:
        latest = self._steps[-1]
        dropped = []
        for channel, reference in self._reference.items():
            rate = channel_rate(latest, channel, self.book.estimated.channel(channel).latency_seconds)
            slow = rate is not None and rate < (1 - TOLERANCE) * reference
            self._slow[channel] = self._slow.get(channel, 0) + 1 if slow else 0
            if self._slow[channel] >= DROP_STEPS:
                dropped.append(channel)
        if not dropped or self._after_drops >= RESOLVES_AFTER_DROPS:
            return None
        verdict = self._verdict(self._steps[-DROP_STEPS:])
        self._reference.update(verdict.corrections.rates)  # the next drop is one from here
        self._slow.clear()
        if verdict.off_by <= TOLERANCE:
            return None
        self._after_drops += 1
        return self._solve(verdict)

    # -- what ----------------------------------------------------------------------------------------------------
    def _verdict(self, timelines: list[Timeline]) -> Verdict:
        book = self.book
        corrections = measure(book.estimated, book.plan, timelines)
        instance = corrections.applied(book.estimated, book.plan.micro_batch)
        promised: Outcome = Simulator(book.instance).run(book.plan)
        corrected = Simulator(instance).run(book.plan)
        waited = {name: statistics.median(each.stall_seconds(name) for each in timelines) for name in LINKS}
        return Verdict(
            instance, corrections, promised.step_seconds, corrected.step_seconds, waited, dict(promised.stalls)
        )

    def _solve(self, verdict: Verdict) -> tuple[Instance, Plan] | None:
        book, now = self.book, self.book.plan
        before = book.instance
        book.corrections = verdict.corrections
        said = (
            f"the plan promised {verdict.promised:.3g} s a step; with what was measured it takes "
            f"{verdict.corrected:.3g} s ({verdict.reasons(before)})"
        )
        self.resolved += 1
        same = replace(now.with_prediction(predict(verdict.instance, now)), instance=digest(verdict.instance))
        try:
            found = book.solve_again(verdict.instance)
        except (InfeasibleError, PlanError) as error:
            self.say(f"{said}; no other plan was found: {error}")
            found = same
        else:
            gain = 1 - found.prediction.step_seconds / verdict.corrected if verdict.corrected > 0 else 0.0
            if found.blocks == now.blocks and found.optimizer_step == now.optimizer_step:
                self.say(f"{said}; solved again: the plan stays")
                found = same
            elif gain < LEAST_GAIN:
                self.say(f"{said}; solved again: the plan stays, the best other one gains {100 * max(gain, 0):.1f} %")
                found = same
            else:
                self.say(f"{said}; solved again: {found.prediction.step_seconds:.3g} s, {100 * gain:.0f} % less")
        self.plan_changed()
        return verdict.instance, found

    def failed(self, error: LazyTrainError) -> None:
        """The move to another plan failed and was undone: no more of them."""
        self._first_look_done, self.always, self._after_drops = True, False, RESOLVES_AFTER_DROPS
        self.say(f"the plan stays in force, because its successor could not be put in place: {error}")
