"""Properties over random instances and plans (hypothesis)."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain_ds.errors import InfeasibleError, SchemaError
from lazytrain_ds.planning import instance as I
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.schema import TRANSFER_CHANNELS
from lazytrain_ds.planning.simulator import Simulator, predict
from lazytrain_ds.planning.solve import solve
from lazytrain_ds.planning.timeline import Timeline
from tests.planning.oracle import random_instance
from tests.planning.random_plans import random_plan

seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None, derandomize=True)


@few
@given(seeds)
def test_bytes_are_conserved_per_channel(seed):
    instance = random_instance(seed)
    plan = random_plan(instance, random.Random(seed))
    timeline = Simulator(instance).timeline(plan)

    def moved(kind, channel):
        return sum(task.byte_count for task in timeline.tasks if task.kind == kind and task.channel == channel)

    # What leaves comes back, and what is on NVMe crosses the link as well.
    for out, back in (("d2h", "h2d"), ("nvme_write", "nvme_read")):
        assert moved("activation_offload", out) == moved("activation_prefetch", back)
    assert moved("activation_offload", "nvme_write") <= moved("activation_offload", "d2h")
    assert moved("parameter_fetch", "nvme_read") <= moved("parameter_fetch", "h2d")
    assert moved("state_read", "nvme_read") == moved("state_write", "nvme_write")
    host_stepped = [i for i, block in enumerate(plan.blocks) if block.optimizer.step_device == "host"]
    expected = plan.rounds * sum(instance.block_class(i).gradient_bytes for i in host_stepped)
    assert moved("gradient", "d2h") == expected
    # No channel does two things at once.
    for channel in ("compute", "host", *TRANSFER_CHANNELS):
        tasks = sorted((task.start_seconds, task.end_seconds) for task in timeline.tasks if task.channel == channel)
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(tasks))


@few
@given(seeds)
def test_no_plan_needs_more_than_what_counts_as_useful(seed):
    instance = random_instance(seed)
    plan = random_plan(instance, random.Random(seed))
    endless = replace(instance, tiers=tuple(replace(tier, capacity_bytes=10**18) for tier in instance.tiers))
    simulator = Simulator(endless)
    useful = simulator.costs(plan.micro_batch).useful
    outcome = simulator.run(plan)
    for tier, need in simulator.phase_needs(outcome.program, outcome.peaks).items():
        assert max(need.values()) <= useful[tier] < 10**18


@settings(few, max_examples=200)
@given(seeds)
def test_a_simulation_ends_early_only_where_the_plan_cannot_win(seed):
    instance = random_instance(seed)
    plan = random_plan(instance, random.Random(seed))
    simulator = Simulator(instance)
    outcome = simulator.run(plan)
    played = simulator.visits
    assert simulator.better(plan, outcome.step_seconds * 0.999) is None
    assert simulator.visits - played <= played
    found = simulator.better(plan, outcome.step_seconds * (1 + 1e-9))
    assert (found is not None) == outcome.fits
    if found is not None:
        assert (found.step_seconds, found.peaks) == (outcome.step_seconds, outcome.peaks)


@few
@given(seeds)
def test_timeline_and_fast_run_agree_on_any_plan(seed):
    instance = random_instance(seed)
    plan = random_plan(instance, random.Random(seed))
    simulator = Simulator(instance)
    outcome, timeline = simulator.run(plan), simulator.timeline(plan)
    assert timeline.step_seconds == pytest.approx(outcome.step_seconds)
    for tier in ("device", "host", "nvme"):
        assert timeline.peak_bytes(tier) <= outcome.peaks[tier]
    for channel, (byte_count, seconds) in outcome.program.moved.items():
        assert timeline.channel_bytes(channel) == byte_count
        assert timeline.busy_seconds(channel) == pytest.approx(seconds)


@few
@given(seeds)
def test_schemas_survive_json(seed):
    instance = random_instance(seed)
    plan = random_plan(instance, random.Random(seed))
    plan = plan.with_prediction(predict(instance, plan))
    assert I.Instance.from_json(instance.to_json()) == instance
    assert Plan.from_json(plan.to_json()) == plan
    timeline = Simulator(instance).timeline(plan)
    assert Timeline.from_json(timeline.to_json()) == timeline


def _step(instance):
    try:
        return solve(instance, time_limit_seconds=0.5).prediction.step_seconds
    except InfeasibleError:
        return float("inf")


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seeds, st.sampled_from(("device", "host", "link")))
def test_more_memory_or_bandwidth_never_hurts_beyond_the_gap(seed, what):
    instance = random_instance(seed)
    if what == "link":
        more = replace(
            instance,
            channels=tuple(replace(c, bytes_per_second=1.3 * c.bytes_per_second) for c in instance.channels),
        )
    else:
        more = replace(
            instance,
            tiers=tuple(
                replace(t, capacity_bytes=int(1.3 * t.capacity_bytes)) if t.name == what else t for t in instance.tiers
            ),
        )
    before, after = _step(instance), _step(more)
    assert after <= before * 1.01


@few
@given(seeds, st.sampled_from(("micro_batches", "order", "global_batch", "sequence_length")))
def test_an_invalid_instance_is_refused_with_its_field(seed, field):
    instance = random_instance(seed)
    broken = {"micro_batches": (7,), "order": ("nothing",), "global_batch": 0, "sequence_length": 0}[field]
    with pytest.raises(SchemaError) as caught:
        replace(instance, **{field: broken})
    assert caught.value.field.startswith(field)
    assert caught.value.reason
