"""Small random instances against exhaustive search: within 1 % of the optimum, feasible whenever a plan is."""

import pytest

from lazytrain_ds.errors import InfeasibleError
from lazytrain_ds.planning.solve import solve
from tests.planning.oracle import LIMIT, optimum, random_instance, size_of

SEEDS = range(200)
QUICK = range(0, 200, 25)


def judge(seed):
    instance = random_instance(seed)
    assert size_of(instance) <= LIMIT
    best = optimum(instance)
    try:
        plan = solve(instance)
    except InfeasibleError:
        assert best is None, f"seed {seed}: enumeration fits a plan, the planner does not"
        return
    assert best is not None
    plan.check(instance)
    optimal = best[1].step_seconds
    assert plan.prediction.step_seconds <= optimal * 1.01, f"seed {seed}"
    assert plan.prediction.step_seconds >= optimal * (1 - 1e-9), f"seed {seed}: enumeration missed a plan"
    assert plan.prediction.lower_bound_seconds <= optimal * (1 + 1e-9), f"seed {seed}: the bound is no bound"


@pytest.mark.parametrize("seed", QUICK)
def test_the_planner_matches_exhaustive_search(seed):
    judge(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_the_planner_matches_exhaustive_search_on_200(part):
    for seed in SEEDS[part::10]:
        judge(seed)


def test_the_set_covers_every_dimension():
    instances = [random_instance(seed) for seed in SEEDS]

    def some(condition):
        assert sum(map(bool, map(condition, instances))) >= 5

    some(lambda i: len(i.micro_batches) > 1)
    some(lambda i: i.allowed.drop_boundaries and i.allowed.longest_segment > 1)
    some(lambda i: "nvme" in i.allowed.saved_tiers and i.tier("nvme").usable_bytes)
    some(lambda i: {"host", "device"} <= set(i.allowed.parameter_tiers))
    some(lambda i: "nvme" in i.allowed.parameter_tiers)
    some(lambda i: {"host", "device"} <= set(i.allowed.optimizer_tiers) and len(i.optimizer_modes) > 1)
    some(lambda i: i.optimizer_mode("host", "8bit"))
    some(lambda i: i.allowed.longest_lead > 0)
    some(lambda i: len(i.allowed.step_modes) == 2)
    some(lambda i: len(i.classes) == 2)
    some(lambda i: i.borrows)
