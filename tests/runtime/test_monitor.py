"""The measured timeline: the bytes the plan says, on the channels it says, and an optimizer step that hides."""

from __future__ import annotations

import time

import pytest
import torch

from lazytrain_ds.planning.simulator import simulate
from lazytrain_ds.planning.timeline import Timeline
from lazytrain_ds.runtime import updates
from lazytrain_ds.runtime.device.emulated import EmulatedDevice, Emulation
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
