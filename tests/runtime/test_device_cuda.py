"""The CUDA device against a recorded stream API: order, dependencies, errors, and that no step blocks the host."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from lazytrain_ds.runtime.device.base import HostEvent
from lazytrain_ds.runtime.device.cuda import CudaDevice


class FakeEvent:
    """`moment`: milliseconds on the device's clock; each recording of any event takes one."""

    clock = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream = None
        self.synchronized = 0
        self.moment = None
        self.timed = enable_timing
        self.over = True

    def record(self, stream) -> None:
        self.stream = stream
        FakeEvent.clock += 1.0
        self.moment = FakeEvent.clock
        stream.log.append(("record", id(self)))

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, other) -> float:
        assert self.timed and other.timed
        return other.moment - self.moment

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeStream:
    def __init__(self, device=None) -> None:
        self.log: list = []

    def wait_event(self, event) -> None:
        self.log.append(("wait", id(event)))


@pytest.fixture
def cuda(monkeypatch):
    compute = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    device = CudaDevice(torch.device("cpu"), pin_memory=False)
    device.compute = compute
    yield device
    device.close()


def copies(device, channel):
    return [entry for entry in device._channels[channel].stream.log if entry[0] == "record"]


def test_a_copy_with_no_host_work_is_queued_at_once_behind_its_events(cuda):
    source, target = torch.arange(3.0), torch.zeros(3)
    before = cuda.record()
    done = cuda.copy_async(target, source, "h2d", [before])
    assert torch.equal(target, source)
    assert cuda._channels["h2d"].stream.log == [("wait", id(before.event)), ("record", id(done.event))]
    assert cuda.compute_waits(done) == 0.0
    assert cuda.compute.log[-1] == ("wait", id(done.event))
    assert done.event.synchronized == 0


def test_a_copy_waits_for_host_work_in_its_channel_and_later_ones_keep_their_order(cuda):
    update = HostEvent()
    first, second = torch.zeros(2), torch.zeros(2)
    source = torch.ones(2)
    waiting = cuda.copy_async(first, source, "h2d", [update])
    behind = cuda.copy_async(second, source * 2, "h2d")
    other = cuda.copy_async(torch.zeros(2), source, "d2h")
    time.sleep(0.05)
    assert not waiting.queued
    assert not behind.queued
    assert other.queued  # the other direction goes on
    source.fill_(5.0)  # the update writes the source
    update.set()
    behind.wait_queued()
    assert first.tolist() == [5.0, 5.0]
    assert second.tolist() == [2.0, 2.0]
    assert copies(cuda, "h2d") == [("record", id(waiting.event)), ("record", id(behind.event))]


def test_compute_waits_tells_how_long_the_host_was_blocked_for_host_work(cuda):
    update = HostEvent()
    event = cuda.copy_async(torch.zeros(1), torch.ones(1), "h2d", [update])
    started = time.perf_counter()
    import threading

    threading.Timer(0.1, update.set).start()
    assert 0.05 < cuda.compute_waits(event) <= time.perf_counter() - started


def test_an_error_of_host_work_reaches_whoever_waits_for_the_copy(cuda):
    update = HostEvent()
    event = cuda.copy_async(torch.zeros(1), torch.ones(1), "h2d", [update])
    update.set(ValueError("update failed"))
    with pytest.raises(ValueError, match="update failed"):
        cuda.compute_waits(event)
    with pytest.raises(ValueError, match="update failed"):
        cuda.copy_async(torch.zeros(1), torch.ones(1), "h2d", [update])


def test_refused_page_locking_falls_back_once_and_says_so(cuda, monkeypatch, capsys):
    real = torch.empty

    def refusing(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("out of locked pages")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refusing)
    cuda.pin_memory = True
    assert cuda.empty_host(4, torch.float32).numel() == 4
    assert cuda.empty_host(4, torch.float32).numel() == 4
    assert capsys.readouterr().out.count("out of locked pages") == 1


def test_copies_visits_and_waits_are_reported_once_they_are_over(cuda, monkeypatch):
    copied, visited, waited = [], [], []
    cuda.on_copy = lambda kind, block, channel, start, end, byte_count: copied.append((kind, channel, end - start))
    cuda.on_visit = lambda phase, block, start, end: visited.append((phase, block, end - start))
    cuda.visit_begins("forward", 3)
    copy = cuda.copy_async(torch.zeros(2), torch.ones(2), "h2d", (), ("parameter_fetch", 4))
    assert cuda.visit_ends() is not None
    assert cuda.visit_ends() is None
    cuda.waits(copy, lambda end, seconds: waited.append(seconds))  # the copy was over before compute came to it
    late = cuda.copy_async(torch.zeros(2), torch.ones(2), "h2d")
    late.event.over = False
    cuda.waits(late, lambda end, seconds: waited.append(seconds))
    late.event.moment = FakeEvent.clock + 5.0
    cuda.report_times()
    assert copied == [("parameter_fetch", "h2d", pytest.approx(1e-3))]
    assert visited == [("forward", 3, pytest.approx(3e-3))]  # its end is recorded three events after its start
    assert waited == []
    late.event.over = True
    cuda.report_times()
    assert waited == [pytest.approx(5e-3)]
    cuda.report_times()
    assert (len(copied), len(visited), len(waited)) == (1, 1, 1)
    assert all(event.event.synchronized == 0 for event in (copy, late))  # nobody waited to know


def test_in_debug_mode_a_freed_slot_is_poisoned_before_it_may_be_written_again(cuda):
    slot = torch.zeros(4)
    assert cuda.retire(slot) is None
    cuda.debug = True
    poisoned = cuda.retire(slot)
    assert torch.isnan(slot).all()
    cuda.copy_async(slot, torch.ones(4), "h2d", [poisoned])
    assert ("wait", id(poisoned.event)) in cuda._channels["h2d"].stream.log
