"""The model with positions bounds every plan: with a plan's decisions fixed it asks for no more time than simulated."""

import random

import pytest

from benchmarks.planner_instances import instance as big_instance
from lazytrain_ds.planning.counts import Key
from lazytrain_ds.planning.milp import CountModel
from lazytrain_ds.planning.positions import PositionModel
from lazytrain_ds.planning.relaxation import Relaxation
from lazytrain_ds.planning.rules import best_rule
from lazytrain_ds.planning.simulator import Simulator
from lazytrain_ds.planning.solve import solve
from tests.planning.oracle import random_instance
from tests.planning.random_plans import random_plan


def relaxation_of(simulator, plan):
    return Relaxation(simulator.instance, simulator.costs(plan.micro_batch), plan.optimizer_step)


def bound_of(relaxation, plan):
    """What the model says of this very plan."""
    model = PositionModel(relaxation)
    for block, decided in enumerate(plan.blocks):
        g = relaxation.group_of[block]
        group = relaxation.groups[g]
        taken = {
            Key(g, "activation", group.activation_index[relaxation.option_of(block, decided)]),
            Key(g, "parameter", group.parameter_index[relaxation.parameter_of(decided)]),
        }
        if group.numbers.trainable:
            taken.add(Key(g, "optimizer", group.optimizer_index[decided.optimizer]))
        for key, variable in model.share[block].items():
            if key.kind in ("activation", "parameter", "optimizer"):
                variable.lower_bound = variable.upper_bound = float(key in taken)
    return model.solve()


@pytest.mark.parametrize("seed", range(8))
def test_a_fitting_plan_is_feasible_and_no_faster_than_its_bound(seed):
    instance = random_instance(seed)
    simulator = Simulator(instance)
    rng = random.Random(seed + 7)
    for _ in range(10):
        plan = random_plan(instance, rng)
        outcome = simulator.run(plan)
        if not outcome.fits:
            continue
        solution = bound_of(relaxation_of(simulator, plan), plan)
        assert solution.counts is not None
        assert solution.bound_seconds <= outcome.step_seconds * (1 + 1e-6)


@pytest.mark.parametrize("shape,machine", [("0.5B", "rtx3090"), ("1.5B", "h800")])
def test_good_plans_of_larger_instances_respect_it(shape, machine):
    instance = big_instance(shape, machine, micro_batches=(1,), rounds_of_first=3)
    simulator = Simulator(instance)
    plans = [best_rule(instance, simulator)[1], solve(instance, time_limit_seconds=0.3)]
    for plan in plans:
        outcome = simulator.run(plan)
        assert outcome.fits
        relaxation = relaxation_of(simulator, plan)
        counted = relaxation.least_seconds(relaxation.counts(plan))
        placed = bound_of(relaxation, plan)
        assert placed.counts is not None
        # Positions say at least as much as the counts' share of the same rows.
        assert placed.bound_seconds >= counted * 0.999
        assert placed.bound_seconds <= outcome.step_seconds * (1 + 1e-6)


def test_positions_never_lower_the_bound_of_counts():
    instance = big_instance("0.5B", "rtx4090", micro_batches=(1,), device_bytes=6 * 10**9)
    relaxation = Relaxation(instance, Simulator(instance).costs(1), "hidden")
    counted = CountModel(relaxation, relaxed=True).solve().bound_seconds
    placed = PositionModel(relaxation).solve().bound_seconds
    assert counted * (1 - 1e-6) <= placed
