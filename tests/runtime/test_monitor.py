"""The measured timeline: the bytes the plan says, on the channels it says, and an optimizer step that hides."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lazytrain_ds.planning.simulator import simulate
from lazytrain_ds.planning.timeline import Timeline
from lazytrain_ds.runtime import updates
from lazytrain_ds.runtime.device.emulated import EmulatedDevice, Emulation
from tests import models
from tests.runtime.test_stage3 import Tower, features, train
from tests.runtime.zero3 import engine_for, zero3_config

pytest.importorskip("deepspeed")


def steps(engine, count):
    monitor = engine.optimizer.lazytrain.monitor
    timelines = []
    for step in range(count):
        train(engine, [((features(step),), {})])
        timelines.append(monitor.step_ended(step + 1))
    return timelines


@pytest.mark.parametrize("seed", [0, 3])
def test_channels_carry_the_bytes_that_the_simulator_says(seed):
    torch.manual_seed(0)
    device = EmulatedDevice(Emulation(10**9, h2d=400e6, d2h=400e6))
    engine = engine_for(Tower(), zero3_config(), seed, device=device)
    setup = engine.optimizer.lazytrain
    measured = steps(engine, 3)[2]
    predicted = simulate(setup.instance, setup.plan)
    # The flat buffers start each sub-group on a 256-byte boundary: at most that much more per block and copy.
    padding = 256 * 3 * setup.plan.block_count
    assert 0 <= measured.channel_bytes("h2d") - predicted.channel_bytes("h2d") <= padding
    assert measured.channel_bytes("d2h") == predicted.channel_bytes("d2h")
    kinds = [(task.kind, task.block) for task in measured.tasks if task.channel == "compute"]
    assert [block for kind, block in kinds if kind == "forward"] == list(range(setup.plan.block_count))
    assert next(block for kind, block in kinds if kind == "backward") == setup.plan.block_count - 1
    assert measured.peak_bytes("device") <= device.ledger.peak_bytes
    assert Timeline.from_json(measured.to_json()) == measured
    engine.destroy()
    device.close()


def test_a_hidden_step_runs_while_compute_does_and_a_serial_one_does_not(monkeypatch):
    slow = updates.TorchUpdater.apply
    monkeypatch.setattr(updates.TorchUpdater, "apply", lambda *a: (time.sleep(0.01), slow(*a))[1])

    def overlap(mode):
        torch.manual_seed(0)
        device = EmulatedDevice(Emulation(10**9, h2d=4e9, d2h=4e9))
        seed = {"hidden": 1, "serial": 0}[mode]
        engine = engine_for(Tower(), zero3_config(), seed, device=device)
        assert engine.optimizer.lazytrain.plan.optimizer_step == mode
        timelines = steps(engine, 3)
        engine.optimizer.drain()
        engine.destroy()
        device.close()
        compute = [t for t in timelines[1].tasks + timelines[2].tasks if t.kind == "forward"]
        updating = [t for t in timelines[1].tasks + timelines[2].tasks if t.channel == "host"]
        return sum(
            max(0.0, min(a.end_seconds, b.end_seconds) - max(a.start_seconds, b.start_seconds))
            for a in compute
            for b in updating
        ), timelines[2].stall_seconds("h2d")

    hidden, serial = overlap("hidden"), overlap("serial")
    assert serial[0] == 0.0
    assert hidden[0] > 0.0


@pytest.mark.slow  # a measurement near its limit: needs an idle machine
def test_it_costs_the_training_thread_at_most_one_percent_of_its_time():
    """Reports are counted in a run and timed one by one outside it: what they add up to is noise in the run itself."""
    from lazytrain_ds.runtime.monitor import Monitor

    torch.manual_seed(0)
    device = EmulatedDevice(Emulation(10**9, h2d=4e9, d2h=4e9))
    engine = engine_for(models.GPT(width=128, blocks=6, length=128), zero3_config(), 1, device=device)
    monitor = engine.optimizer.lazytrain.monitor
    counts = dict.fromkeys(("task", "visit", "memory", "stall"), 0)
    user = threading.get_ident()

    def counting(name):
        original = getattr(monitor, name)

        def report(*arguments):
            if threading.get_ident() == user or name == "visit":
                counts[name] += 1
            original(*arguments)

        return report

    for name in counts:
        setattr(monitor, name, counting(name))
    setup = engine.optimizer.lazytrain
    setup.attach(setup.store, setup.coordinator)  # bound methods were taken before
    calls = [((), dict.fromkeys(("input_ids", "labels"), models.batch(step, length=128))) for step in range(6)]
    train(engine, calls[:1])
    ending = []
    monitor.step_ended(0)
    counts.update(dict.fromkeys(counts, 0))
    started = time.thread_time()
    for call in calls[1:]:
        train(engine, [call])
        begun = time.thread_time()
        monitor.step_ended(1)
        ending.append(time.thread_time() - begun)
    total = time.thread_time() - started
    engine.destroy()
    device.close()
    assert counts["visit"] >= 5 * 2 * 8 and counts["memory"] >= counts["visit"]

    fresh = Monitor()
    samples = {
        "task": ("gradient", 1, "d2h", 0.0, 1.0, 10),
        "visit": ("forward", 1, 0.0, 1.0),
        "memory": ("device", 10),
        "stall": ("h2d", 1e-3),
    }
    cost = sum(ending)
    for name, arguments in samples.items():
        report, rounds = getattr(fresh, name), 2000
        begun = time.thread_time()
        for _ in range(rounds):
            report(*arguments)
        cost += (time.thread_time() - begun) / rounds * counts[name]
    assert cost <= 0.01 * total, (cost, total, counts)
