from dataclasses import replace

import pytest

from benchmarks.planner_instances import instance as big_instance
from benchmarks.planner_instances import with_caps
from lazytrain_ds.errors import PlanError
from lazytrain_ds.planning.instance import Allowed
from lazytrain_ds.planning.rules import RULES, apply, best_rule, megatrain
from lazytrain_ds.planning.simulator import Simulator

INSTANCE = big_instance("7B", "rtx4090")


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_a_plan_of_the_space_with_its_flops(name):
    plan = RULES[name](INSTANCE)
    plan.check(INSTANCE)
    program = Simulator(INSTANCE).run(plan).program
    blocks = [index for index, kind in enumerate(INSTANCE.order) if kind == "block"]
    forward = INSTANCE.costs(blocks[0], 4).forward_seconds
    again = program.step_recompute_seconds / plan.rounds / forward / len(blocks)
    wanted = {"keep_all": 0, "checkpoint_all": 1, "checkpoint_all_host": 1, "megatrain": 1.75, "zero3_offload": 1}
    assert again == pytest.approx(wanted[name])


def test_states_move_to_nvme_where_the_host_is_too_small():
    tight = with_caps(INSTANCE, host=60 * 10**9)
    plan, outcome = apply("checkpoint_all", tight)
    assert outcome.fits
    assert {block.optimizer.tier for block in plan.blocks} == {"nvme"}
    tighter = with_caps(INSTANCE, host=38 * 10**9)
    assert {block.parameter_tier for block in apply("checkpoint_all", tighter)[0].blocks} == {"nvme"}


def test_a_rule_that_is_not_allowed_says_so_and_is_left_out():
    flat = replace(INSTANCE, allowed=Allowed(drop_boundaries=False, boundary_tiers=("host",), step_modes=("serial",)))
    with pytest.raises(PlanError, match="drops boundaries"):
        megatrain(flat)
    name, plan, _ = best_rule(flat)
    assert name in RULES
    plan.check(flat)
