"""The emulated device: time on channels, order, caps, and races that show (freed slots NaN, random delays)."""

from __future__ import annotations

import time

import pytest
import torch

from lazytrain_ds.errors import ConfigError, DeviceMemoryError
from lazytrain_ds.runtime.device.base import HostEvent
from lazytrain_ds.runtime.device.emulated import EmulatedDevice, Emulation
from tests import models
from tests.runtime.test_stage3 import Tower, assert_same, features, run, token_calls


def test_copies_take_their_time_in_order_and_directions_run_at_once():
    seen = []
    device = EmulatedDevice(Emulation(10**9, h2d=40e6, d2h=40e6))
    device.on_copy = lambda kind, block, *copy: seen.append(copy)
    source, target = torch.ones(10**5), torch.zeros(4, 10**5)  # 0.4 MB: 10 ms
    started = time.perf_counter()
    up = [device.copy_async(target[i], source, "h2d", (), ("parameter_fetch", i)) for i in range(2)]
    down = [device.copy_async(target[2 + i], source, "d2h", (), ("gradient", i)) for i in range(2)]
    for event in (*up, *down):
        event.wait()
    assert time.perf_counter() - started >= 0.0195
    assert target.sum() == 4 * 10**5
    for channel in ("h2d", "d2h"):
        (_, start_one, end_one, bytes_one), (_, start_two, end_two, _) = [c for c in seen if c[0] == channel]
        assert bytes_one == 400_000
        assert end_one - start_one == pytest.approx(0.01)
        assert start_two >= end_one
        assert end_two - start_two == pytest.approx(0.01)
    device.close()


def test_a_copy_waits_for_its_dependency_inside_the_channel_and_carries_its_error():
    device = EmulatedDevice(Emulation(10**9, h2d=1e9, d2h=1e9))
    update, source, target = HostEvent(), torch.zeros(3), torch.ones(3)
    copied = device.copy_async(target, source, "h2d", [update])
    source.fill_(7.0)
    update.set()
    assert device.compute_waits(copied) >= 0.0
    assert target.tolist() == [7.0] * 3
    failed = HostEvent()
    failed.set(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        device.compute_waits(device.copy_async(target, source, "h2d", [failed]))
    device.close()


def test_the_cap_is_a_cap_and_the_error_says_what_is_held():
    device = EmulatedDevice(Emulation(1000, h2d=1e9, d2h=1e9))
    device.allocate(200, torch.float32, "parameters")
    with pytest.raises(DeviceMemoryError, match=r"200 B of 1 kB are free \(held: parameters 800 B\)"):
        device.allocate(200, torch.float32, "parameters")
    device.close()


def test_at_the_cap_whoever_can_give_memory_back_is_asked_in_order_before_there_is_an_error():
    device = EmulatedDevice(Emulation(1000, h2d=1e9, d2h=1e9))
    held = {"a copy out": [300], "a gradient": [200, 200], "a prefetch": [300]}
    asked: list[str] = []

    def reliever(name):
        def relieve() -> bool:
            if not held[name]:
                return False
            asked.append(name)
            device.ledger.discharge(held[name].pop(), name)
            return True

        return relieve

    for order, name in ((2, "a gradient"), (3, "a prefetch"), (1, "a copy out")):
        for byte_count in held[name]:
            device.charge(byte_count, name)
        device.add_reliever(order, reliever(name))
    with pytest.raises(DeviceMemoryError):
        device.allocate(100, torch.uint8, "optional", must=False)
    assert asked == []
    device.charge(600, "a visit")
    assert asked == ["a copy out", "a gradient", "a gradient"]
    device.allocate(100, torch.uint8, "a fetch")
    with pytest.raises(DeviceMemoryError, match="a fetch 100 B, a visit 600 B"):
        device.charge(400, "too much")
    assert asked[3:] == ["a prefetch"], "everybody was asked before the error"
    assert device.ledger.live_bytes == 700
    device.close()


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"memory": "1GB", "h2d": "fast", "d2h": "1GB/s"}, "h2d.*rate"),
        ({"memory": "1GB", "h2d": "1GB/s"}, "needs 'd2h'"),
        ({"memory": "lots", "h2d": "1GB/s", "d2h": "1GB/s"}, "memory"),
        ({"memory": "1GB", "h2d": "1GB/s", "d2h": "1GB/s", "speed": 1}, "speed"),
    ],
)
def test_a_bad_section_names_the_key(section, reason):
    with pytest.raises(ConfigError, match=reason):
        Emulation.parse(section)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_with_nan_in_freed_slots_and_random_delays_results_do_not_change(accumulation):
    from tests.runtime.zero3 import zero3_config

    config = zero3_config(accumulation=accumulation)
    calls = token_calls(3 * accumulation)
    reference = run(models.GPT, calls, 0, config)
    for seed in range(3):
        device = EmulatedDevice(Emulation(10**9, h2d=400e6, d2h=400e6, debug=True, seed=seed))
        assert_same(run(models.GPT, calls, seed, config, device=device), reference)
        assert device.ledger.live_bytes == 0
        device.close()


def test_the_debug_mode_catches_a_fetch_that_does_not_wait_for_its_update(monkeypatch):
    from lazytrain_ds.runtime.parameters import ParameterStore

    calls = [((features(step),), {}) for step in range(4)]
    reference = run(Tower, calls, 2)
    real = ParameterStore.issue

    def hasty(self, index, must=False):
        self.ready = lambda block: ()
        return real(self, index, must)

    monkeypatch.setattr(ParameterStore, "issue", hasty)
    from lazytrain_ds.runtime import updates

    slow = updates.TorchUpdater.apply
    monkeypatch.setattr(updates.TorchUpdater, "apply", lambda *a: (time.sleep(0.02), slow(*a))[1])
    different = False
    for seed in (2, 4, 6):
        device = EmulatedDevice(Emulation(10**9, h2d=400e6, d2h=400e6, debug=True, seed=seed))
        losses, _ = run(Tower, calls, seed, device=device)
        device.close()
        different |= losses != reference[0]
    assert different
