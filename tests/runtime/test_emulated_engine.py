"""Emulated compute in the real engine: the measured timeline is the simulated one, stall by stall; values stay exact.

What a plan costs is given by the emulation (`hardware.emulation`), so simulator and run can only differ in what is
issued when, who waits for what, and what is held meanwhile: exactly what these tests are about.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from lazytrain_ds.errors import DeviceMemoryError
from lazytrain_ds.planning.schema import CHANNELS
from lazytrain_ds.planning.simulator import predict, simulate
from lazytrain_ds.runtime import plans
from tests.integration.training import config, engine_of, gpt, loss_of, rule_block, run, tokens

BLOCKS = 6
FORWARD_SECONDS = 0.012  # this takes about 8 ms of a slow core's time with one row of tokens
STEPS = 6


def emulate(transfer_seconds: float = 0.01, memory: str = "200MB", **changes: Any) -> dict[str, Any]:
    """A device on which a block's parameters take `transfer_seconds` each way and its forward 12 ms."""
    block_bytes = 4 * sum(parameter.numel() for parameter in gpt().blocks[0].parameters())
    rate = block_bytes / transfer_seconds
    section = {"memory": memory, "h2d": rate, "d2h": rate, "compute": FORWARD_SECONDS, "host": 400e6, **changes}
    section.update({key: round(section[key]) for key in ("h2d", "d2h")})
    return {"emulate": section}


def arranged(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Plans are changed, block by block, on their way from the planner to the engine."""
    solve = plans.solve

    def solved(instance: Any, **options: Any) -> Any:
        plan = solve(instance, **options)
        plan = replace(plan, blocks=tuple(change(block) for block in plan.blocks))
        return plan.with_prediction(predict(instance, plan))

    monkeypatch.setattr(plans, "solve", solved)


def make() -> Any:
    return gpt(blocks=BLOCKS, dropout=0.0)


def measured(
    block: dict[str, Any], steps: int = STEPS, accumulation: int = 1, **keys: Any
) -> tuple[Any, Any, list[Any], int]:
    """(instance, plan, timelines of the last steps, the ledger's peak) of a run.

    Their step is that of the device's clock: what a busy machine adds to it is left out.
    """
    torch.manual_seed(0)
    block = {"replan": False, **block, **keys}
    ends = []
    with engine_of(make(), config(block, accumulation=accumulation, train_micro_batch_size_per_gpu=1)) as engine:
        for call in tokens(steps * accumulation):
            call = {name: value[:1] for name, value in call.items()}
            engine.backward(loss_of(engine(**call)))
            engine.step()
            ends.append(engine._lt_book.device.played_seconds())
        book = engine._lt_book
        ends = ends[accumulation - 1 :: accumulation]
        seconds = [after - before for before, after in pairwise(ends)]
        timelines = list(book.monitor.timelines)[1:]
        played = [replace(timeline, step_seconds=s) for timeline, s in zip(timelines, seconds, strict=True)]
        return book.instance, book.plan, played[1:], book.device.ledger.peak_bytes


def assert_stalls_agree(instance: Any, plan: Any, timelines: list[Any]) -> None:
    """Stall seconds per channel within 2 ms or 10 % of the simulator's: the median of the steps."""
    predicted = simulate(instance, plan)
    for channel in CHANNELS:
        expected = predicted.stall_seconds(channel)
        seen = statistics.median(timeline.stall_seconds(channel) for timeline in timelines)
        assert seen == pytest.approx(expected, abs=max(2e-3, 0.1 * expected)), (channel, plan.origin)
    seconds = statistics.median(timeline.step_seconds for timeline in timelines)
    assert seconds == pytest.approx(predicted.step_seconds, rel=0.1)


# Tests that compare seconds within a few per cent need a machine that is not overloaded: `-m slow`.


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", [5, 10, 20])
@pytest.mark.parametrize("lead", [0, 1, 2])
def test_stalls_per_channel_are_the_simulators(milliseconds, lead, monkeypatch):
    arranged(monkeypatch, lambda block: replace(block, parameter_lead=lead))
    block = {"device": emulate(milliseconds / 1000), **rule_block("checkpoint_all")}
    instance, plan, timelines, _ = measured(block, parameters="host")
    assert {decision.parameter_lead for decision in plan.blocks} == {lead}
    assert_stalls_agree(instance, plan, timelines)
    if milliseconds > 1000 * FORWARD_SECONDS:
        assert simulate(instance, plan).stall_seconds("h2d") > 0.01  # there is something to compare


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        ("checkpoint_all_host", 1),
        ("megatrain", 2),
        ("keep_all", 2),
        ("megatrain", 1),
        ("checkpoint_all_host", 2),
        ("zero3_offload", 1),
        ("auto", 1),
    ],
)
def test_each_rule_stalls_and_peaks_as_simulated(name, accumulation):
    instance, plan, timelines, peak = measured(
        {"device": emulate(memory="20MB"), **rule_block(name)}, accumulation=accumulation, parameters="host"
    )
    assert_stalls_agree(instance, plan, timelines)
    assert max(timeline.peak_bytes("device") for timeline in timelines) <= peak
    assert peak == pytest.approx(simulate(instance, plan).peak_bytes("device"), rel=0.04)


@pytest.mark.slow
def test_a_throttled_disk_stalls_as_simulated(tmp_path, monkeypatch):
    """In all: how a wait divides into update, write and read depends on when this machine wakes the store's workers."""
    arranged(monkeypatch, lambda block: replace(block, parameter_lead=1))
    disk = {"nvme_read": 10_000_000, "nvme_write": 10_000_000}
    block = {"device": emulate(0.004, compute=0.03, **disk), **rule_block("checkpoint_all")}
    keys = {"parameters": "nvme", "optimizer_states": "host", "nvme_path": str(tmp_path)}
    instance, plan, timelines, _ = measured(block, **keys)
    assert instance.channel("nvme_read").bytes_per_second == 10e6
    predicted = simulate(instance, plan)
    assert predicted.stall_seconds("nvme_read") > 0.04
    expected = sum(predicted.stall_seconds(channel) for channel in CHANNELS)
    seen = [sum(timeline.stall_seconds(channel) for channel in CHANNELS) for timeline in timelines]
    assert min(seen) == pytest.approx(expected, rel=0.1)  # others use the real disk: it can only add
    assert statistics.median(timeline.stall_seconds("nvme_read") for timeline in timelines) > 0.02
    assert min(timeline.step_seconds for timeline in timelines) == pytest.approx(predicted.step_seconds, rel=0.1)


def test_timed_compute_changes_no_value():
    calls = tokens(3)
    plain = run(make, config(rule_block("megatrain")), calls)
    timed = run(make, config({"device": emulate(), **rule_block("megatrain")}), calls)
    timed.assert_identical(plain)


def test_over_the_cap_is_cudas_out_of_memory():
    """With a plan made for more memory than there is, and none left that needs as little as there is."""
    block = {"device": emulate(memory="300kB"), "device_memory": "200MB", **rule_block("keep_all")}
    with pytest.raises(torch.OutOfMemoryError, match=r"300 kB") as caught:
        measured(block, steps=1)
    assert isinstance(caught.value, DeviceMemoryError)


def overlap_seconds(timelines: list[Any]) -> float:
    """Seconds of a step during which the host updated while a forward ran on the device (median)."""

    def one(timeline: Any) -> float:
        forwards = [task for task in timeline.tasks if task.kind == "forward"]
        updates = [task for task in timeline.tasks if task.kind == "optimizer"]
        return sum(
            max(0.0, min(a.end_seconds, b.end_seconds) - max(a.start_seconds, b.start_seconds))
            for a in forwards
            for b in updates
        )

    return statistics.median(one(timeline) for timeline in timelines)


@pytest.mark.slow
def test_the_hidden_step_shows_in_the_measured_timeline_and_in_the_stalls():
    def of(name: str) -> tuple[float, float, float]:
        instance, plan, timelines, _ = measured({"device": emulate(0.002, host=50e6), **rule_block(name)})
        assert_stalls_agree(instance, plan, timelines)
        busy = statistics.median(timeline.busy_seconds("host") for timeline in timelines)
        return busy, overlap_seconds(timelines), statistics.median(t.stall_seconds("host") for t in timelines)

    busy, hidden_overlap, hidden_stall = of("checkpoint_all")
    serial_busy, serial_overlap, serial_stall = of("zero3_offload")
    assert busy == pytest.approx(serial_busy, rel=0.1)
    assert serial_overlap == 0.0
    assert serial_stall == pytest.approx(serial_busy, rel=0.1)
    assert hidden_overlap > 0.3 * busy
    assert hidden_stall < 0.7 * serial_stall


# -- the cap ---------------------------------------------------------------------------------------------------------
DEPTH = 24


def deep() -> Any:
    return gpt(blocks=DEPTH, dropout=0.0)


def peak_under(memory: int, seed: int | None = None) -> tuple[int, int, list[float]]:
    """(measured peak, predicted peak, losses) of two steps of 24 blocks with the planner's own plan for this cap."""
    section = {"memory": memory, "h2d": "2GB/s", "d2h": "2GB/s"}
    block: dict[str, Any] = {"device": {"emulate": section}, "planner": {"time_limit": 0.3}}
    if seed is not None:  # other rates make other plans
        chance = random.Random(seed)
        section["h2d"] = section["d2h"] = round(10 ** chance.uniform(7.5, 9.5))
        section["compute"] = f"{chance.choice([3, 10, 30, 100])}GFLOPS"
    torch.manual_seed(0)
    with engine_of(deep(), config(block)) as engine:
        losses = []
        for call in tokens(2):
            loss = loss_of(engine(**call))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.optimizer.drain()
        book = engine._lt_book
        assert not book.plan.origin.startswith("ladder"), "it ran out of memory and went on under a safer plan"
        return book.device.ledger.peak_bytes, book.plan.prediction.peak_bytes("device"), losses


@pytest.fixture(scope="module")
def keep_all_peak() -> int:
    torch.manual_seed(0)
    with engine_of(deep(), config({"device": emulate(), **rule_block("keep_all")})) as engine:
        loss_of(engine(**tokens(1)[0]))
        return int(engine._lt_book.plan.prediction.peak_bytes("device"))


@pytest.fixture(scope="module")
def roomy_losses(keep_all_peak) -> list[float]:
    """With room for everything."""
    return peak_under(3 * keep_all_peak)[2]


def test_24_blocks_train_under_a_third_of_what_keeping_everything_needs(keep_all_peak, roomy_losses):
    cap = keep_all_peak // 3
    peak, predicted, losses = peak_under(cap)
    assert peak <= cap
    assert peak <= 1.04 * predicted  # blocks of a millisecond: copies out may end earlier than planned, never later
    assert losses == roomy_losses


SEEDS = 100


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s < 3 else [pytest.mark.exhaustive]) for s in range(SEEDS)]
)
def test_no_plan_of_the_planner_passes_its_cap(seed, keep_all_peak, roomy_losses):
    cap = round(keep_all_peak * random.Random(1000 + seed).uniform(0.12, 1.1))
    peak, predicted, losses = peak_under(cap, seed)
    assert losses == roomy_losses
    assert peak <= cap
    assert peak <= 1.04 * predicted  # blocks of a millisecond: copies out may end earlier than planned, never later
