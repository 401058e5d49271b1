from dataclasses import replace

import pytest
from ortools.math_opt.python import mathopt

from benchmarks.planner_instances import instance as big_instance
from benchmarks.planner_instances import with_caps
from lazytrain_ds.errors import InfeasibleError, PlanError
from lazytrain_ds.planning.milp import SOLVERS, CountModel
from lazytrain_ds.planning.relaxation import Relaxation
from lazytrain_ds.planning.rules import checkpoint_all
from lazytrain_ds.planning.simulator import Simulator
from lazytrain_ds.planning.solve import activation_ladder, solve

INSTANCE = big_instance("0.5B", "rtx3090", rounds_of_first=2, device_bytes=10 * 10**9)


def test_a_plan_is_checked_predicted_and_no_worse_than_any_rule():
    plan = solve(INSTANCE, time_limit_seconds=0.5)
    plan.check(INSTANCE)
    prediction = plan.prediction
    assert prediction.step_seconds <= prediction.best_rule_seconds
    assert prediction.lower_bound_seconds <= prediction.step_seconds
    assert prediction.peak_bytes("device") <= INSTANCE.tier("device").usable_bytes
    assert plan == solve(INSTANCE, time_limit_seconds=0.5)


@pytest.mark.parametrize("host", (64 * 10**9, 91_300_000_000, 200 * 10**9))
def test_what_a_machine_happens_to_have_free_beyond_all_need_changes_nothing(host):
    def plan(byte_count):
        found = solve(with_caps(INSTANCE, host=byte_count), time_limit_seconds=0.5)
        return replace(found, instance="")

    assert plan(host) == plan(10**12)


def test_with_a_placement_only_activations_are_decided():
    placement = checkpoint_all(INSTANCE)
    plan = solve(INSTANCE, placement=placement, time_limit_seconds=0.5)
    assert [block.optimizer for block in plan.blocks] == [block.optimizer for block in placement.blocks]
    assert [block.parameter_tier for block in plan.blocks] == [block.parameter_tier for block in placement.blocks]
    assert (plan.micro_batch, plan.optimizer_step) == (placement.micro_batch, placement.optimizer_step)
    assert [block.choice for block in plan.blocks] != [block.choice for block in placement.blocks]


@pytest.mark.parametrize("gigabytes", [7, 8, 9])
def test_with_a_placement_each_block_keeps_its_own_home(gigabytes):
    """Not only as many of each kind: blocks of one class may not change places."""
    instance = with_caps(INSTANCE, device=gigabytes * 10**9)
    found = solve(instance, time_limit_seconds=0.5)
    blocks = list(found.blocks)
    for index in (1, 2, 5, 11, 12):  # in an order that no planner would choose
        blocks[index] = replace(blocks[index], parameter_tier="device")
    for index in (3, 4, 9, 14):
        blocks[index] = replace(blocks[index], parameter_tier="host")
    placement = replace(found, blocks=tuple(blocks), prediction=None)
    plan = solve(with_caps(INSTANCE, device=2 * gigabytes * 10**9), placement=placement, time_limit_seconds=0.5)
    for mine, wanted in zip(plan.blocks, placement.blocks, strict=True):
        assert (mine.parameter_tier, mine.optimizer) == (wanted.parameter_tier, wanted.optimizer)
    assert [block.choice for block in plan.blocks] != [block.choice for block in placement.blocks]


@pytest.mark.parametrize("gigabytes", [7, 9])
def test_with_a_placement_a_plan_is_no_worse_than_the_one_it_comes_from(gigabytes):
    instance = with_caps(INSTANCE, device=gigabytes * 10**9)
    found = solve(instance, time_limit_seconds=1.0)
    again = solve(instance, placement=found, time_limit_seconds=0.05)
    assert again.prediction.step_seconds <= found.prediction.step_seconds
    assert again.prediction.peak_bytes("device") <= instance.tier("device").usable_bytes


def test_ladder_needs_less_and_less_device_memory():
    plan = solve(INSTANCE, time_limit_seconds=0.5)
    rungs = activation_ladder(INSTANCE, plan, 3)
    peaks = [rung.prediction.peak_bytes("device") for rung in (plan, *rungs)]
    assert len(rungs) >= 2
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    assert all(rung.blocks[3].optimizer == plan.blocks[3].optimizer for rung in rungs)


def test_what_does_not_fit_is_refused_with_its_shortages():
    with pytest.raises(InfeasibleError, match=r"device: needs .* has .* short") as caught:
        solve(with_caps(INSTANCE, device=10**9), time_limit_seconds=0.2)
    tier, need, have = caught.value.shortages[0]
    assert tier == "device" and need > have


@pytest.mark.parametrize("kind", ["paper", "megatrain", "keep_all"])
def test_named_kinds_give_their_plan(kind):
    assert solve(with_caps(INSTANCE, device=20 * 10**9), kind=kind).origin == kind


def test_an_unknown_kind_or_solver_is_named():
    with pytest.raises(PlanError, match="unknown planner kind 'best'"):
        solve(INSTANCE, kind="best")
    with pytest.raises(PlanError, match="'cp_sat' takes integers only"):
        solve(INSTANCE, kind="paper", solver="cp_sat")
    with pytest.raises(PlanError, match="unknown solver 'cplex'"):
        solve(INSTANCE, kind="paper", solver="cplex")


@pytest.mark.parametrize("relaxed", (False, True))
@pytest.mark.parametrize("name", ("highs", "scip"))
def test_a_named_solver_is_the_one_that_solves(name, relaxed, monkeypatch):
    used = []
    original = mathopt.solve

    def noted(model, kind, **rest):
        used.append(kind)
        return original(model, kind, **rest)

    monkeypatch.setattr(mathopt, "solve", noted)
    relaxation = Relaxation(INSTANCE, Simulator(INSTANCE).costs(INSTANCE.micro_batches[0]), "hidden")
    assert CountModel(relaxation, relaxed=relaxed).solve(solver=name).counts is not None
    assert used == [SOLVERS[name]]


def test_fractions_are_rounded_to_as_many_blocks_as_there_are():
    relaxation = Relaxation(INSTANCE, Simulator(INSTANCE).costs(INSTANCE.micro_batches[0]), "hidden")
    counts = CountModel(relaxation, relaxed=True).solve().counts
    for g, group in enumerate(relaxation.groups):
        for kind in ("activation", "parameter", "optimizer"):
            taken = [count for key, count in counts.items() if (key.group, key.kind) == (g, kind)]
            assert sum(taken) == group.size and all(count == int(count) for count in taken)
