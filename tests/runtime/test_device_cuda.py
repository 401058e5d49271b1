"""The CUDA device against a recorded stream API: order, dependencies, errors, and that no step blocks the host."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from lazytrain_ds.runtime.device.base import HostEvent
from lazytrain_ds.runtime.device.cuda import CudaDevice


class FakeEvent:
    def __init__(self) -> None:
        self.stream = None
        self.synchronized = 0

    def record(self, stream) -> None:
        self.stream = stream
        stream.log.append(("record", id(self)))

    def query(self) -> bool:
        return True

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
