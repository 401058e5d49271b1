import pytest

from benchmarks.planner_instances import instance as big_instance
from lazytrain_ds.planning.explain import explain
from lazytrain_ds.planning.solve import solve

INSTANCE = big_instance("0.5B", "rtx3090", rounds_of_first=2, device_bytes=8 * 10**9)


@pytest.fixture(scope="module")
def explained():
    plan = solve(INSTANCE, time_limit_seconds=0.3)
    return plan, explain(INSTANCE, plan, time_limit_seconds=0.3)


def test_the_objective_adds_up(explained):
    plan, found = explained
    parts = found.objective
    total = parts.compute_seconds + parts.recompute_seconds + parts.device_step_seconds
    assert total + sum(seconds for _, seconds in parts.exposed_seconds) == pytest.approx(parts.step_seconds)
    assert parts.step_seconds == pytest.approx(plan.prediction.step_seconds)


def test_every_block_is_explained_and_the_binding_cap_is_named(explained):
    plan, found = explained
    covered = [block for reason in found.blocks for block in range(reason.first, reason.last + 1)]
    assert covered == list(range(plan.block_count))
    reasons = [why for reason in found.blocks for _, why in reason.hindrances]
    assert any("device would exceed its cap by" in why for why in reasons)
    assert f"blocks {found.blocks[1].first}" in found.text() or f"block {found.blocks[1].first}" in found.text()


def test_more_memory_or_link_is_never_said_to_hurt(explained):
    _, found = explained
    assert [item.change for item in found.what_if] == [
        "1 GB more device memory",
        "1 GB more host memory",
        "1 GB more NVMe space",
        "a 10 % faster link",
    ]
    assert all(item.saved_seconds >= 0 for item in found.what_if)
    assert found.what_if[0].saved_seconds > 0
