"""Plays a Plan as tasks on channels. The runtime obeys the same contract; `monitor.py` fills the same Timeline.

The contract (a *visit* is one use of a block by compute: forward, re-run, backward; compute *reaches* a visit when the
one before it has ended)

Order. A micro-step visits all blocks forward, then segment by segment backward: a segment of several blocks first
re-runs all but its last block without gradient, from its kept boundary, then runs backward from its last block to its
first. Each channel is FIFO in program order: the order in which compute reaches the visits that issue the transfers.
A transfer waits, at the head of its queue, for what it depends on; H2D, D2H, both NVMe directions and the host run at
once.

To the device. A block's parameters are fetched as one copy, issued when compute reaches the visit `parameter_lead`
visits before the one that needs them (not before the micro-step starts); with NVMe as home first read to a host staging
buffer. If that moment is not after the block's previous visit, or no other visit lies between, or `keep_parameters`
spans the gap from forward to backward, nothing is fetched: the parameters are held. Otherwise their slot is free when
the visit ends (a block's own backward holds them throughout). A borrower needs its owner's parameters in the same way.
Activations with a home off the device come back likewise, `activation_lead` visits before the backward (for the
boundary of a segment: before the segment's first re-run), not before the forward has ended. Transfers issued at the
same visit go in order of need; for equal need parameters, boundary, saved tensors.

From the device. When a forward visit ends, its block's saved tensors leave, then the next block's boundary, each if it
has another home (block 0's boundary leaves when the micro-step starts); with NVMe as home they go on to a write from a
host staging buffer. When a backward visit ends the gradient leaves, unless the block is stepped on the device. A
backward visit does not start before the gradient before the last one has left: at most two are on the device. On the
host, gradients after the first micro-step's are added (task `accumulate`), from two staging buffers.

Optimizer. Updates start when the last gradient is in. Device-stepped sub-groups first, on compute, which waits for
that; then host-stepped ones in forward order: NVMe states are read (two staging buffers), stepped; updated parameters
homed on NVMe are written (two staging buffers, frozen ones never), then the states. `hidden`: compute goes on with the
next step's forward; a fetch waits, inside its channel, for its block's update, and a resident block's updated copy
comes as one H2D in place of the fetch (same lead). On the NVMe queues a block's fetch stands behind the state read of
the next block. `serial`: all updates and their writes end before the next forward; write-backs still take the place of
fetches.

Device bytes. Fixed; resident parameters; device-stepped states and gradient accumulation; fetched parameters from
issue to release; a boundary from the end of its producer until its copy out has ended (and its own forward) or, at home
on the device, until its backward ends; saved tensors from the start of their forward likewise; what comes back from its
issue to the end of the backward; while a visit runs its transient and, in backward, its gradient and what recomputation
holds; a gradient until its copy out has ended; re-made boundaries until their backward ends; an owner's gradient from
the borrower's backward on.
Host bytes. Fixed; parameters at home there, and the updated copy of resident ones stepped there; states; accumulated
gradients; two gradient staging buffers (several rounds); two staging buffers each of the largest state and parameters
written to NVMe; activations at home there; NVMe traffic in flight. NVMe bytes: what lives there.

Steady state. A step is measured from the end of the last backward of one step to that of the next, so the optimizer
belongs to the beginning. Micro-steps are played until the channels' state at their end (times relative to that end)
repeats; the rest are exact copies. Cost: two micro-steps where no transfer is left over from the step before.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import ChannelBytes, PhasePeak, Plan, Prediction
from lazytrain_ds.planning.playback import STALL_CHANNELS, ExceededError, Limits, Playback, Recorder
from lazytrain_ds.planning.program import Executor, Program
from lazytrain_ds.planning.schema import CHANNELS, PHASES, TIERS, TierName
from lazytrain_ds.planning.timeline import MemorySample, Stall, Task, Timeline

__all__ = ["Outcome", "Simulator", "predict", "simulate"]


@dataclass
class Outcome:
    """What the fast run returns. `excess` is the sum over tiers and phases of bytes above the cap (0: it fits)."""

    step_seconds: float
    peaks: dict[TierName, int]
    stalls: dict[str, float]
    program: Program
    shortages: tuple[tuple[TierName, int, int], ...]
    nvme_written_bytes: int

    @property
    def excess(self) -> int:
        return sum(need - have for _, need, have in self.shortages)

    @property
    def fits(self) -> bool:
        return not self.shortages


class Simulator:
    """Simulates plans of one instance; keeps its lookup tables between plans. Not thread-safe.

    `visits`: how much `run` and `better` had to play, in visits of a block; laying out a plan counts two a block.
    """

    def __init__(self, instance: Instance, executor: Executor = "lazytrain") -> None:
        self.instance = instance
        self.executor: Executor = executor
        self.runs = 0
        self.visits = 0
        self._costs: dict[int, Costs] = {}
        self._phases = [(instance.phase(name), name) for name in PHASES]

    def costs(self, micro_batch: int) -> Costs:
        """The lookup table at `micro_batch`."""
        if micro_batch not in self._costs:
            self._costs[micro_batch] = Costs(self.instance, micro_batch)
        return self._costs[micro_batch]

    def run(self, plan: Plan) -> Outcome:
        """Step seconds, peaks and stalls of `plan`, without the timeline. The plan is not checked here."""
        self.runs += 1
        program = Program(self.costs(plan.micro_batch), plan, self.executor)
        playback = Playback(program)
        outcome = self._outcome(program, playback)
        self.visits += 2 * program.block_count + playback.visited
        return outcome

    def better(self, plan: Plan, bar_seconds: float) -> Outcome | None:
        """Like `run`, but None as soon as it shows that the plan does not fit or takes more than `bar_seconds`."""
        self.runs += 1
        program = Program(self.costs(plan.micro_batch), plan, self.executor)
        self.visits += 2 * program.block_count
        caps, step = program.costs.caps, self.instance.phase("step")
        for extra, _ in self._phases:
            if program.host_static + extra.host_bytes > caps["host"]:
                return None
            if program.nvme_static + extra.nvme_bytes > caps["nvme"]:
                return None
            if program.device_static + extra.device_bytes > caps["device"]:
                return None
        most = caps["device"] - step.device_bytes
        # While a visit runs, and whatever is still leaving.
        if program.device_static + max(map(add, program.device_base, program.start_extra)) > most:
            return None
        playback = Playback(program, Limits(bar_seconds, most, caps["host"] - step.host_bytes))
        try:
            outcome = self._outcome(program, playback)
        except ExceededError:
            outcome = None
        self.visits += playback.visited
        return outcome if outcome is not None and outcome.fits and outcome.step_seconds <= bar_seconds else None

    def _outcome(self, program: Program, playback: Playback) -> Outcome:
        played, repeats, _ = playback.play()
        step_seconds = 0.0
        stalls = dict.fromkeys(STALL_CHANNELS, 0.0)
        for index, (seconds, parts) in enumerate(played):
            times = repeats if index == len(played) - 1 else 1
            step_seconds += times * seconds
            for channel, value in parts.items():
                stalls[channel] += times * value
        peaks: dict[TierName, int] = {
            "device": playback.device_peak,
            "host": playback.host_peak,
            "nvme": program.nvme_static,
        }
        shortages = list(self.shortages(program, peaks))
        written = program.moved["nvme_write"][0]
        budget = self.instance.nvme_write_budget_bytes_per_step
        if budget is not None and written > budget:
            shortages.append(("nvme", written, budget))
        return Outcome(step_seconds, peaks, stalls, program, tuple(shortages), written)

    def waits(self, plan: Plan) -> list[tuple[float, int]]:
        """(seconds, block) of every wait of compute for a transfer, over the step's rounds, the longest first."""
        program = Program(self.costs(plan.micro_batch), plan, self.executor)
        playback = Playback(program)
        played, repeats, state = playback.play()
        total: dict[int, float] = {}
        for index in range(len(played)):
            playback.waits = []
            state, _, _ = playback.micro_step(state.rebased(), index, None)
            times = repeats if index == len(played) - 1 else 1
            for position, seconds in playback.waits:
                block = program.visits[position][1]
                total[block] = total.get(block, 0.0) + times * seconds
        return sorted(((seconds, block) for block, seconds in total.items()), reverse=True)

    def timeline(self, plan: Plan) -> Timeline:
        """The whole step as a Timeline."""
        program = Program(self.costs(plan.micro_batch), plan, self.executor)
        playback = Playback(program)
        played, repeats, begin = playback.play()
        tasks: list[Task] = []
        samples: list[MemorySample] = []
        state, at, micro_step = begin, 0.0, 0
        for index in range(len(played)):
            recorder = Recorder()
            state, seconds, _ = playback.micro_step(state.rebased(), index, recorder)
            times = repeats if index == len(played) - 1 else 1
            for _ in range(times):
                for kind, block, channel, start, end, byte_count in recorder.tasks:
                    tasks.append(Task(kind, block, channel, at + start, at + end, byte_count, micro_step))  # type: ignore[arg-type]
                for tier, when, level in recorder.levels:
                    if when <= seconds:
                        samples.append(MemorySample(tier, at + when, level))  # type: ignore[arg-type]
                at += seconds
                micro_step += 1
        samples.append(MemorySample("nvme", 0.0, program.nvme_static))
        order = sorted(range(len(samples)), key=lambda i: (TIERS.index(samples[i].tier), samples[i].at_seconds))
        outcome = self.run(plan)
        stalls = tuple(Stall(channel, outcome.stalls.get(channel, 0.0)) for channel in CHANNELS)
        return Timeline(tuple(tasks), tuple(samples[i] for i in order), stalls, at)

    def shortages(self, program: Program, peaks: dict[TierName, int]) -> tuple[tuple[TierName, int, int], ...]:
        """(tier, need, have) for the worst phase of every tier above its cap."""
        result: list[tuple[TierName, int, int]] = []
        for tier, need in self.phase_needs(program, peaks).items():
            have = program.costs.caps[tier]
            worst = max(need.values())
            if worst > have:
                result.append((tier, worst, have))
        return tuple(result)

    def phase_needs(self, program: Program, peaks: dict[TierName, int]) -> dict[TierName, dict[str, int]]:
        """Bytes needed per tier and phase: placement (for `step` the peak) plus the phase's own."""
        static = {"device": program.device_static, "host": program.host_static, "nvme": program.nvme_static}
        result: dict[TierName, dict[str, int]] = {tier: {} for tier in TIERS}
        for extra, name in self._phases:
            for tier, more in (
                ("device", extra.device_bytes),
                ("host", extra.host_bytes),
                ("nvme", extra.nvme_bytes),
            ):
                base = peaks[tier] if name == "step" else static[tier]  # type: ignore[index]
                result[tier][name] = base + more  # type: ignore[index]
        return result


def simulate(instance: Instance, plan: Plan, *, executor: Executor = "lazytrain") -> Timeline:
    """One optimizer step of `plan` in steady state, all rounds. Raises PlanError if the plan is not in the plan space.

    `executor="published_megatrain"` charges the published executor's own waste instead of ours: every block of a
    segment is re-run, the last one too, and its parameters are fetched once more for it.
    """
    plan.check(instance)
    return Simulator(instance, executor).timeline(plan)


def predict(
    instance: Instance, plan: Plan, *, simulator: Simulator | None = None, lower_bound_seconds: float | None = None
) -> Prediction:
    """What the simulator says about `plan`; the bound defaults to its compute time without any recomputation."""
    simulator = simulator or Simulator(instance)
    outcome = simulator.run(plan)
    program = outcome.program
    peaks = tuple(
        PhasePeak(phase, tier, need[phase])
        for tier, need in simulator.phase_needs(program, outcome.peaks).items()
        for phase in PHASES
    )
    compute = program.step_compute_seconds
    busy = dict(program.moved)
    busy_compute = compute + program.step_recompute_seconds + program.device_step_seconds
    channels = [ChannelBytes("compute", 0, busy_compute, 0.0)]
    for channel in CHANNELS[1:]:
        byte_count, seconds = busy[channel]
        channels.append(ChannelBytes(channel, byte_count, seconds, outcome.stalls[channel]))
    return Prediction(
        step_seconds=outcome.step_seconds,
        compute_seconds=compute,
        recompute_seconds=program.step_recompute_seconds,
        optimizer_exposed_seconds=outcome.stalls["host"] + program.device_step_seconds,
        peaks=peaks,
        channels=tuple(channels),
        lower_bound_seconds=compute if lower_bound_seconds is None else lower_bound_seconds,
    )
