"""Measured seconds: who is timed, how they enter an Instance, the cache."""

from __future__ import annotations

import itertools

import pytest
import torch

from lazytrain_ds.planning.solve import solve
from lazytrain_ds.planning.timeline import Task, Timeline
from lazytrain_ds.workload.blocks import find_blocks
from lazytrain_ds.workload.measure import BlockTimer, MeasuredCache, Seconds, from_timeline, with_measured, workload_key
from tests.workload.models import EncoderDecoder, TinyLM
from tests.workload.test_build import build


class Clock:
    """Advances only when told to, so that every duration is known."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(torch.autograd.Function):
    """Takes 2 in forward and 5 in backward."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        clock.now += 2
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += 5
        return gradient, None


def slow_model(clock: Clock, *, frozen_front: bool = False) -> TinyLM:
    model = TinyLM(depth=3)
    if frozen_front:
        model.embed.requires_grad_(False)
        model.position.requires_grad_(False)
    for block in model.blocks:
        original = block.forward
        block.forward = lambda x, original=original: Slow.apply(original(x), clock)
    head = model.head.forward
    model.head.forward = lambda x: Slow.apply(head(x), clock)
    return model


@pytest.mark.parametrize("frozen_front", [False, True])
def test_every_block_is_charged_with_its_own_time(frozen_front):
    clock = Clock()
    model = slow_model(clock, frozen_front=frozen_front)
    table = find_blocks(model)
    ids = torch.zeros(1, 4, dtype=torch.long)
    with BlockTimer(model, table, clock) as timer:
        for _ in range(3):
            model(ids, labels=ids).backward()
    for block in table.repeated:
        assert timer.forward[block.index] == [2, 2, 2]
        # without a gradient for its input nobody tells when the first block ends
        assert timer.backward[block.index] == ([] if frozen_front and block.index == 1 else [5, 5, 5])
    head = len(table) - 1
    assert timer.forward[head] == [2, 2, 2]
    assert timer.backward[head] == [5, 5, 5]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_medians_skip_the_warm_up():
    table = find_blocks(TinyLM(depth=2))
    timer = BlockTimer(TinyLM(depth=2), table)
    timer.forward[1], timer.forward[2] = [99.0, 1.0, 2.0], [99.0, 3.0, 4.0]
    seconds = timer.seconds({1: "block", 2: "block", 3: "head"})
    assert seconds["block"] == Seconds(2.5, None)
    assert seconds["head"] == Seconds(None, None)


def test_rest_between_families_is_timed():
    model = EncoderDecoder()
    table = find_blocks(model)
    ticks = itertools.count()
    with BlockTimer(model, table, lambda: float(next(ticks))) as timer:
        model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    assert all(len(times) == 1 for times in timer.forward.values())
    # two blocks share the shared embedding's gradient, all others are told apart
    assert sum(len(times) for times in timer.backward.values()) >= len(table) - 2


def test_measured_seconds_replace_estimates_and_scale_the_rest():
    instance = build(TinyLM(), sizes=(1, 2))
    name = instance.order[1]
    before = instance.block_class(1)
    seconds = Seconds(3 * before.at(1).forward_seconds, 2 * before.at(1).backward_seconds)
    after = with_measured(instance, {name: seconds}, 1).block_class(1)
    assert after.at(1).forward_seconds == pytest.approx(seconds.forward)
    assert after.at(1).backward_seconds == pytest.approx(seconds.backward)
    assert after.at(2).forward_seconds == pytest.approx(3 * before.at(2).forward_seconds)
    for old, new in zip(before.at(1).menu, after.at(1).menu, strict=True):
        assert new.recompute_seconds == pytest.approx(3 * old.recompute_seconds)
        assert new.kept_bytes == old.kept_bytes
    untouched = with_measured(instance, {name: Seconds(), "other": seconds}, 1)
    assert untouched == instance


def test_a_timeline_gives_medians_by_class():
    instance = build(TinyLM(), sizes=(1,), global_batch=1)
    plan = solve(instance, kind="keep_all")
    forward = ((1, 0.2), (2, 0.4), (3, 0.9))
    tasks = [Task("forward", block, "compute", block, block + seconds) for block, seconds in forward]
    tasks += [Task("backward", 2, "compute", 5, 6), Task("recompute", 2, "compute", 6, 9)]
    tasks += [Task("gradient", 1, "d2h", 0, 9)]
    measured = from_timeline(instance, Timeline(tuple(tasks), (), (), 10.0), plan)
    assert measured[instance.order[1]] == Seconds(pytest.approx(0.4), pytest.approx(1.0))
    assert measured[instance.order[0]] == Seconds(None, None)


def test_recomputation_is_taken_off_a_backward():
    instance = build(TinyLM(), sizes=(1,), global_batch=1)
    plan = solve(instance, kind="checkpoint_all")
    costs = instance.costs(2, 1)
    share = costs.choice(plan.blocks[2].choice).recompute_seconds / costs.forward_seconds
    assert 0 < share <= 1
    tasks = (Task("forward", 2, "compute", 0, 3), Task("backward", 2, "compute", 3, 12))
    measured = from_timeline(instance, Timeline(tasks, (), (), 12.0), plan)
    assert measured[instance.order[2]].backward == pytest.approx(9 - 3 * share)


def test_cache_round_trip_and_key(tmp_path):
    instance = build(TinyLM(), sizes=(1, 2))
    key = workload_key(instance, 1, "machine")
    cache = MeasuredCache(tmp_path / "cache")
    assert cache.load(key) is None
    assert cache.store(key, {"a": Seconds(1.5, None)})
    assert cache.load(key) == {"a": Seconds(1.5, None)}
    assert workload_key(instance, 2, "machine") != key
    assert workload_key(instance, 1, "other") != key
    assert workload_key(build(TinyLM(), sizes=(1, 2), length=17), 1, "machine") != key


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": ["x", 1]}', '{"a": [-1, 1]}', '{"a": [1e999, 1]}'])
def test_a_broken_cache_counts_as_absent(tmp_path, text):
    cache = MeasuredCache(tmp_path)
    (tmp_path / "measured-k.json").write_text(text)
    assert not cache.load("k")


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert not MeasuredCache(tmp_path / "file").store("k", {})
