"""No plan beats a bound, and the count model ranks plans as the simulator does."""

import random
from dataclasses import replace

import numpy
import pytest

from benchmarks.planner_instances import instance as big_instance
from lazytrain_ds.planning.bounds import bounds, lower_bound
from lazytrain_ds.planning.milp import CountModel, objective
from lazytrain_ds.planning.relaxation import Relaxation
from lazytrain_ds.planning.rules import best_rule
from lazytrain_ds.planning.simulator import Simulator
from tests.planning.oracle import random_instance
from tests.planning.random_plans import random_plan
from tests.planning.tiny import DEVICE_GROUP, tiny_instance, uniform


@pytest.mark.parametrize("seed", range(10))
def test_no_fitting_plan_beats_a_bound(seed):
    instance = random_instance(seed)
    rng = random.Random(seed)
    simulator = Simulator(instance)
    whole = lower_bound(instance, simulator)
    known = {}
    for _ in range(20):
        plan = random_plan(instance, rng)
        plan.check(instance)
        outcome = simulator.run(plan)
        key = plan.micro_batch, plan.optimizer_step
        model = Relaxation(instance, simulator.costs(plan.micro_batch), plan.optimizer_step)
        counts = model.counts(plan)
        assert model.least_excess(counts) <= outcome.excess + 1e-6
        assert model.least_seconds(counts) <= outcome.step_seconds * (1 + 1e-9)
        if not outcome.fits:
            continue
        found = known.setdefault(key, bounds(instance, simulator, *key))
        parts = (found.compute_seconds, found.recompute_seconds, found.link_seconds, found.nvme_seconds)
        for value in (*parts, found.host_seconds, found.aggregated_seconds, whole):
            assert value <= outcome.step_seconds * (1 + 1e-6)


@pytest.mark.parametrize("shape", ["7B", "moe-47B"])
def test_no_fitting_plan_of_a_large_instance_beats_its_bound(shape):
    instance = big_instance(shape, "h200", micro_batches=(2, 4), rounds_of_first=4, precisions=("fp32", "8bit"))
    simulator = Simulator(instance)
    whole = lower_bound(instance, simulator)
    rng = random.Random(1)
    fitting = 0
    for _ in range(30):
        plan = random_plan(instance, rng)
        outcome = simulator.run(plan)
        model = Relaxation(instance, simulator.costs(plan.micro_batch), plan.optimizer_step)
        assert model.least_seconds(model.counts(plan)) <= outcome.step_seconds * (1 + 1e-9)
        if outcome.fits:
            fitting += 1
            assert whole <= outcome.step_seconds
    assert fitting >= 2


def ranks(values):
    order = numpy.argsort(values)
    result = numpy.empty(len(values))
    result[order] = numpy.arange(len(values))
    return result


@pytest.mark.slow
def test_the_model_ranks_a_thousand_plans_of_27b_like_the_simulator():
    instance = big_instance("27B", "h200", device_bytes=70 * 10**9)
    simulator = Simulator(instance)
    models = {mode: Relaxation(instance, simulator.costs(4), mode) for mode in instance.allowed.step_modes}
    rng = random.Random(0)
    pairs = []
    for _ in range(1000):
        plan = random_plan(instance, rng)
        pairs.append((objective(models[plan.optimizer_step], plan), simulator.run(plan).step_seconds))
    model, simulated = numpy.array(pairs).T
    correlation = numpy.corrcoef(ranks(model), ranks(simulated))[0, 1]
    print(f"rank correlation {correlation:.4f}")
    assert correlation >= 0.95


def test_relaxed_model_bounds_the_integer_one_and_both_bound_the_rule():
    instance = big_instance("7B", "rtx4090")
    simulator = Simulator(instance)
    _, plan, outcome = best_rule(instance, simulator)
    relaxation = Relaxation(instance, simulator.costs(4), plan.optimizer_step)
    relaxed = CountModel(relaxation, relaxed=True).solve()
    integer = CountModel(relaxation).solve()
    assert relaxed.bound_seconds <= integer.bound_seconds * (1 + 1e-6) <= outcome.step_seconds
    # The solver's counts, put into the rows by hand, give the solver's time (the reliefs of prefetching aside).
    assert relaxation.least_seconds(integer.counts) <= integer.seconds * (1 + 1e-6)


def waiting(name, rate, **fields):
    """Six blocks, three rounds; channel `name` at `rate`, the others much faster; (instance, uniform plan)."""
    base = tiny_instance(6, rounds=3)
    channels = tuple(replace(c, bytes_per_second=rate if c.name == name else 100.0) for c in base.channels)
    instance = replace(base, channels=channels, allowed=replace(base.allowed, longest_lead=2))
    return instance, uniform(instance, "hidden", **fields)


def least_and_simulated(instance, plan):
    relaxation = Relaxation(instance, Simulator(instance).costs(1), plan.optimizer_step)
    return relaxation.least_seconds(relaxation.counts(plan)), Simulator(instance).run(plan).step_seconds


def test_the_bound_knows_that_gradients_set_the_pace_of_backward():
    # Every gradient takes longer to leave (30 s) than a backward (20 s); three rounds of 6 * 30 s of compute.
    least, simulated = least_and_simulated(*waiting("d2h", 0.1, parameter_tier="device"))
    assert simulated > 3 * 180 * 1.15
    assert 0.95 * simulated <= least <= simulated


def test_the_bound_knows_that_a_fetch_longer_than_its_lead_is_waited_for():
    # Two of six blocks are fetched, 25 s each while two forwards of 10 s run: 2 * 5 s of waiting a forward.
    instance, plan = waiting("h2d", 0.16, parameter_tier="device", keep_parameters=True, parameter_lead=2)
    blocks = [replace(block, parameter_tier="host") if i in (2, 4) else block for i, block in enumerate(plan.blocks)]
    plan = replace(plan, blocks=tuple(replace(block, optimizer=DEVICE_GROUP) for block in blocks))
    least, simulated = least_and_simulated(instance, plan)
    compute = 3 * 180 + 6 * 1  # with the steps on the device
    assert simulated >= compute + 3 * 10
    assert compute + 3 * 10 <= least <= simulated


def test_blocks_run_again_fetch_their_parameters_again():
    base = tiny_instance(8, rounds=2)
    channels = tuple(replace(c, bytes_per_second=0.1 if c.name == "h2d" else 10.0) for c in base.channels)
    instance = replace(base, channels=channels, allowed=replace(base.allowed, longest_lead=1))
    blocks = [
        replace(block, boundary="dropped" if index % 4 else "device")
        for index, block in enumerate(uniform(instance, choice="boundary").blocks)
    ]
    plan = replace(uniform(instance, "hidden"), blocks=tuple(blocks))
    plan.check(instance)
    relaxation = Relaxation(instance, Simulator(instance).costs(1), "hidden")
    counts = relaxation.counts(plan)
    # Six dropped boundaries, none of them held or resident: six more fetches a micro-step.
    assert relaxation.refetches.value(counts) == 6
    assert relaxation.least_seconds(counts) <= Simulator(instance).run(plan).step_seconds
