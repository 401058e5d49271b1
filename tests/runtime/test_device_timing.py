"""Clocks of the emulated device: what starts when, what counts as a stall, and who is late at whose cost."""

from __future__ import annotations

import time

import pytest
import torch

from lazytrain_ds.hardware.emulation import Emulation
from lazytrain_ds.runtime.device import timing
from lazytrain_ds.runtime.device.base import HostEvent
from lazytrain_ds.runtime.device.emulated import EmulatedDevice
from lazytrain_ds.runtime.device.timing import SLACK_SECONDS, ComputeClock, HostClock, Past, RateLimit


def moment(at: float) -> object:
    """Equal to `at`; a relative tolerance would grow with the uptime that perf_counter counts."""
    return pytest.approx(at, rel=0, abs=1e-6)


class Time:
    """A clock that only moves when someone sleeps or computes."""

    def __init__(self) -> None:
        self.moment, self.computed = 100.0, 0.0

    def perf_counter(self) -> float:
        return self.moment

    def thread_time(self) -> float:
        return self.computed

    def sleep(self, seconds: float) -> None:
        self.moment += max(seconds, 1e-5)

    def compute(self, seconds: float) -> None:
        self.moment += seconds
        self.computed += seconds


@pytest.fixture
def clock_time(monkeypatch) -> Time:
    fake = Time()
    monkeypatch.setattr(timing, "time", fake)
    return fake


def test_visits_follow_each_other_on_the_clock_and_not_when_python_comes_round(clock_time):
    clock = ComputeClock()
    clock.now()
    clock.visit_begins(0.03)
    clock_time.compute(0.004)
    first = clock.visit_ends()
    assert clock_time.moment == pytest.approx(first[1], abs=1e-4)
    clock_time.compute(SLACK_SECONDS - 1e-3)
    clock.visit_begins(0.03)
    second = clock.visit_ends()
    assert second == (first[1], moment(first[0] + 0.06))
    assert clock_time.moment == pytest.approx(second[1], abs=1e-4)


def test_a_host_that_comes_later_than_the_slack_counts_in_full(clock_time):
    clock = ComputeClock()
    clock.visit_begins(0.001)
    _, end = clock.visit_ends()
    clock_time.sleep(2 * SLACK_SECONDS)
    clock.visit_begins(0.001)
    assert clock.visit_ends()[0] == pytest.approx(end + 2 * SLACK_SECONDS, abs=1e-4)


def test_a_loaded_machine_is_made_up_for_inside_a_visit_but_own_computing_is_not(clock_time):
    clock = ComputeClock()
    clock.visit_begins(0.01)
    clock_time.sleep(0.03)  # others had the processor
    _, end = clock.visit_ends()
    clock.visit_begins(0.05)
    assert clock.visit_ends()[0] == end
    clock.visit_begins(0.01)
    clock_time.compute(0.03)
    start, end = clock.visit_ends()
    assert end - start == pytest.approx(0.03)
    clock.visit_begins(0.001)
    clock_time.sleep(0.5)  # no machine is that loaded: somebody waited for something
    _, end = clock.visit_ends()
    clock.visit_begins(0.001)
    assert clock.visit_ends()[0] - end == pytest.approx(0.5, abs=2e-3)


def test_what_arrives_late_delays_the_visit_that_waits_for_it_by_just_that(clock_time):
    clock = ComputeClock()
    now = clock.now()
    assert clock.wait_for(Past(now - 1.0)) == 0.0
    assert clock.wait_for(Past(now + 0.004)) == pytest.approx(0.004)
    clock.visit_begins(0.01)
    end = clock.record()
    assert clock.wait_for(Past(now + 0.007)) == pytest.approx(0.003)  # in the middle: its input comes late
    assert clock.wait_for(Past(now + 0.006)) == 0.0
    assert end.at == moment(now + 0.017)
    assert not end.done()
    end.wait()
    assert clock_time.moment >= now + 0.017
    assert clock.visit_ends() == (moment(now + 0.007), moment(now + 0.017))


def test_a_visit_inside_another_one_delays_its_end(clock_time):
    clock = ComputeClock()
    now = clock.now()
    clock.visit_begins(0.004)
    clock.visit_begins(0.003)
    assert clock.visit_ends()[1] == moment(now + 0.003)
    assert clock.visit_ends()[1] == moment(now + 0.007)


def test_an_error_reaches_whoever_waits():
    failed = HostEvent()
    failed.set(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        ComputeClock().wait_for(failed)


def test_host_work_in_a_row_takes_its_sum_and_idle_time_is_not_given_back(clock_time):
    clock = HostClock()
    started = clock_time.perf_counter()
    ends = [clock.ends(clock_time.perf_counter(), 0.004) for _ in range(3)]
    assert ends[2] - started == pytest.approx(0.012, abs=1e-3)
    clock_time.sleep(SLACK_SECONDS + 0.01)
    started = clock_time.perf_counter()
    assert clock.ends(started, 0.001) == moment(started + 0.001)
    clock.possible(started + 0.003)
    assert clock.ends(started, 0.001) == moment(started + 0.004)


def test_a_disk_moves_bytes_at_its_rate_however_many_workers_ask():
    limit = RateLimit({"read": 1e6, "write": None})
    started = time.perf_counter()
    assert limit("write", 10**9, started) is None
    assert time.perf_counter() - started < 0.5
    assert limit("read", 2000, started) == (started, moment(started + 0.002))
    other = limit("read", 3000, started)  # another worker's request of the same moment
    assert other == (moment(started + 0.002), moment(started + 0.005))
    assert time.perf_counter() - started >= 0.005


def test_a_disk_starts_on_the_clock_of_who_asks_and_is_slower_than_its_rate_where_it_really_is():
    limit = RateLimit({"read": 1e6}, behind=lambda: 0.01)
    started = time.perf_counter()
    assert limit("read", 1000, started) == (started - 0.01, moment(started - 0.009))
    long_ago = time.perf_counter() - 1.0
    begun, end = RateLimit({"read": 1e6})("read", 1000, long_ago)
    assert begun == long_ago and end - long_ago >= 1.0


def test_a_gradient_leaves_when_its_visit_ends_and_a_blocks_input_when_it_begins():
    device = EmulatedDevice(Emulation(10**9, h2d=1e9, d2h=1e9, flops_bf16=1.0, flops_fp32=1.0))
    seen = []
    device.on_copy = lambda kind, block, channel, start, end, byte_count: seen.append((kind, start))
    device._clock.visit_begins(0.02)
    begin, end = device._clock.now(), device.record().at
    source, target = torch.ones(1000), torch.zeros(1000)
    boundary = device.copy_async(target, source, "d2h", [device.record_entry()], ("activation_offload", 1))
    gradient = device.copy_async(target, source, "d2h", [device.record()], ("gradient", 1))
    boundary.wait()
    assert not gradient.done()
    gradient.wait()
    device.visit_ends()
    assert seen == [("activation_offload", moment(begin)), ("gradient", moment(end))]
    assert end - begin == pytest.approx(0.02)
    device.close()
