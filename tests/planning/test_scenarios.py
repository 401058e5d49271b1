"""The stored scenarios: a seeded part here, the whole by `python -m benchmarks.planner_scenarios check`."""

import random

import pytest

from benchmarks.planner_scenarios import STORE, build, failures, load, run, specifications

SEED = 3
QUICK = ("0.5B", "1.5B", "3B", "7B")


def test_the_store_has_at_least_150_scenarios_and_is_small():
    stored = load()
    assert len(stored) >= 150
    assert STORE.stat().st_size < 1_000_000
    machines = {name.split("-")[-2] for name in stored}
    assert {"rtx3090", "rtx4090", "a100", "h100", "h800", "h200", "cpu"} <= machines


def test_stored_scenarios_are_the_ones_the_script_makes():
    made = specifications()
    for name, entry in load().items():
        assert build(entry["spec"], name) == build(made[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(4))
def test_a_seeded_part_is_no_worse_than_stored(index):
    names = sorted(name for name in load() if name.split("-")[0] in QUICK)
    name = random.Random(SEED).sample(names, 4)[index]
    stored = load()[name]
    value = build(stored["spec"], name)
    assert failures(run(name, value), stored, value) == []
