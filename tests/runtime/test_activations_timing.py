"""Copies that take time, on their own threads: still exact, nothing reused too early, and look-ahead hides them."""

from __future__ import annotations

import queue
import random
import statistics
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from lazytrain_ds.runtime.activations import ActivationRuntime
from lazytrain_ds.runtime.device.base import Device, DoneEvent, Event, HostEvent
from tests.runtime.activation_tools import (
    GPT,
    FakeStore,
    action,
    assert_nothing_left,
    language_step,
    random_actions,
    run_pass,
    running,
    segments,
)

STEP = language_step()
DEPTH = 6


class Channel(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.jobs: queue.Queue = queue.Queue()
        self.start()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            event, target, source, after, seconds = job
            try:
                for each in after:
                    each.wait()
                time.sleep(seconds)
                target.copy_(source)
                event.set()
            except BaseException as error:
                event.set(error)


class SlowDevice(Device):
    """The CPU with two copy threads; a copy takes `seconds` (a function), and reads its source at the very end."""

    name = "slow"

    def __init__(self, seconds, cap_bytes: int | None = None) -> None:
        super().__init__(torch.device("cpu"), cap_bytes)
        self.seconds = seconds
        self.channels = {"h2d": Channel(), "d2h": Channel()}
        self.in_flight: list[HostEvent] = []

    def available_bytes(self) -> int:
        return 1 << 30

    def copy_async(self, target: torch.Tensor, source: torch.Tensor, channel, after: Sequence[Event] = ()) -> Event:
        event = HostEvent()
        self.in_flight.append(event)
        self.channels[channel].jobs.put((event, target, source, tuple(after), self.seconds()))
        return event

    def record(self) -> Event:
        return DoneEvent()

    def compute_waits(self, event: Event) -> float:
        started = time.perf_counter()
        event.wait()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        for event in self.in_flight:
            event.wait()

    def close(self) -> None:
        for channel in self.channels.values():
            channel.jobs.put(None)
            channel.join()


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(DEPTH)


@pytest.fixture(scope="module")
def reference(model):
    return run_pass(model, STEP)


def poison_returned_buffers(runtime: ActivationRuntime) -> None:
    """What is given back is overwritten at once, so that a late reader shows."""
    for pool in (runtime.mover.host, runtime.mover.staging):
        give = pool.give
        pool.give = lambda buffer, give=give: (buffer.fill_(255), give(buffer))[1]


@pytest.mark.parametrize("seed", range(6))
def test_random_delays_and_poisoned_buffers_change_nothing(model, reference, seed):
    draw = random.Random(seed)
    device = SlowDevice(lambda: draw.choice([0.0, 0.0, 0.001, 0.004]))
    plan = random_actions(DEPTH, seed) if seed % 2 else [action("keep", "nvme", "host", lead=seed // 2)] * DEPTH
    try:
        with running(model, list(model.blocks), plan, device=device, store=FakeStore(eager=bool(seed % 3))) as runtime:
            poison_returned_buffers(runtime)
            for _ in range(2):
                run_pass(model, STEP, runtime).assert_equal(reference)
            device.synchronize()
            assert_nothing_left(runtime)
    finally:
        device.close()


@pytest.mark.parametrize("seed", range(2))
def test_the_emulated_device_in_debug_mode_is_exact_and_reports_each_copy_once(model, reference, seed):
    from lazytrain_ds.runtime.device.emulated import EmulatedDevice, Emulation

    device = EmulatedDevice(Emulation(memory_bytes=10**8, h2d=3e8, d2h=3e8, debug=True, seed=seed))
    copies, tasks, stalls = [], [], []
    device.on_copy = lambda kind, block, channel, start, end, byte_count: copies.append((channel, byte_count))
    plan = [action("keep", "nvme", "host", lead=seed)] * DEPTH
    try:
        with running(model, list(model.blocks), plan, device=device, store=FakeStore(eager=True),
                     on_task=lambda kind, block, channel, *_: tasks.append(channel),
                     on_stall=lambda channel, seconds: stalls.append(seconds)) as runtime:  # fmt: skip
            run_pass(model, STEP, runtime).assert_equal(reference)
            device.synchronize()
            assert_nothing_left(runtime)
            counters = runtime.counters
            sent = sum(byte_count for channel, byte_count in copies if channel == "d2h")
            assert sent == sum(counters.offloaded_bytes.values())
            assert sum(byte_count for channel, byte_count in copies if channel == "h2d") == counters.prefetched_bytes
            assert not {"h2d", "d2h"} & set(tasks) and {"nvme_read", "nvme_write"} <= set(tasks)
            assert sum(stalls) == pytest.approx(sum(counters.stall_seconds.values()))
    finally:
        device.close()


def test_giving_up_with_copies_under_way_leaves_nothing(model, reference):
    device = SlowDevice(lambda: 0.002)
    plan = [action("keep", "nvme", "host")] * DEPTH
    try:
        with running(model, list(model.blocks), plan, device=device) as runtime:
            poison_returned_buffers(runtime)
            for _ in range(2):
                runtime.micro_step_begins()
                with runtime.outer_context():
                    loss = STEP(model, 0)
                runtime.abort()
                del loss
                assert_nothing_left(runtime)
            run_pass(model, STEP, runtime).assert_equal(reference)
            device.synchronize()
            assert_nothing_left(runtime)
    finally:
        device.close()


def test_a_failed_copy_is_raised_where_its_data_is_needed(model):
    device = SlowDevice(lambda: 0.0)
    try:
        with running(model, list(model.blocks), [action("boundary", "host")] * DEPTH, device=device) as runtime:
            runtime.micro_step_begins()
            with runtime.outer_context():
                loss = STEP(model, 0)
            device.synchronize()
            device.seconds = lambda: 1 / 0

            def failing(target, source, channel, after=()):
                event = HostEvent()
                event.set(OSError("the link is gone"))
                return event

            device.copy_async = failing
            with pytest.raises(OSError, match="the link is gone"):
                loss.backward()
            runtime.abort()
            del loss
            assert_nothing_left(runtime)
    finally:
        device.close()


def test_looking_ahead_hides_copies_behind_the_backward_of_later_blocks(model):
    """Stall time, not wall time: the noise-free observable (reference notes, section 3)."""
    stalls = {}
    per_copy = 0.004
    for lead in (0, 1, 3):
        device = SlowDevice(lambda: per_copy)
        plan = [action("boundary", "host", lead=lead)] * DEPTH
        try:
            with running(model, list(model.blocks), plan, device=device) as runtime:
                for block in model.blocks:  # make backward take longer than a copy
                    block.register_full_backward_pre_hook(_slow_backward)
                run_pass(model, STEP, runtime, micro_steps=1)
                device.synchronize()
                runtime.counters.reset()
                repeats = []
                for _ in range(3):
                    runtime.counters.reset()
                    run_pass(model, STEP, runtime, micro_steps=1)
                    repeats.append(runtime.counters.stall_seconds.get("h2d", 0.0))
                stalls[lead] = statistics.median(repeats)
        finally:
            for block in model.blocks:
                block._backward_pre_hooks.clear()
            device.close()
    assert stalls[0] > (DEPTH - 1) * per_copy * 0.8, stalls
    assert stalls[1] < stalls[0] * 0.4, stalls
    assert stalls[3] < stalls[0] * 0.4, stalls


def _slow_backward(module, gradient) -> None:
    time.sleep(0.008)


def test_prefetches_are_issued_in_the_order_of_use_when_the_gradient_arrives(model):
    order: list[tuple[str, int]] = []
    plan = segments(DEPTH, 2, "host", lead=1)
    with running(model, list(model.blocks), plan,
                 on_task=lambda kind, block, channel, *_: order.append((kind, block))) as runtime:  # fmt: skip
        run_pass(model, STEP, runtime, micro_steps=1)
    offloads = [block for kind, block in order if kind == "activation_offload"]
    backward = [entry for entry in order if entry[0] != "activation_offload"]
    assert offloads == [0, 2, 4]
    # A segment's input is back when its last block's backward begins; then the first block is re-run, then
    # the last and the first one are recomputed.
    assert backward == [
        ("activation_prefetch", 4), ("recompute", 4), ("recompute", 5), ("activation_prefetch", 2), ("recompute", 4),
        ("recompute", 2), ("recompute", 3), ("activation_prefetch", 0), ("recompute", 2),
        ("recompute", 0), ("recompute", 1), ("recompute", 0),
    ]  # fmt: skip
