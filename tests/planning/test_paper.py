"""The published instance and its variants, in re-run blocks (benchmarks/planner_published.py)."""

import time
from dataclasses import replace

import pytest

from benchmarks.planner_published import BLOCKS, cases, published, published_edges
from lazytrain_ds.errors import InfeasibleError
from lazytrain_ds.planning.paper import solve_paper


@pytest.mark.parametrize("name", cases())
def test_published_cases_are_solved_to_their_known_optimum(name):
    problem, expected = cases()[name]
    begin = time.process_time()
    schedule = solve_paper(problem)
    seconds = time.process_time() - begin
    assert len(schedule.recomputed) == expected
    assert schedule.recompute_seconds == pytest.approx(expected)
    assert schedule.exposed_seconds == pytest.approx(0, abs=1e-6)
    assert schedule.status == "optimal"
    assert schedule.objective_bound == pytest.approx(schedule.objective, rel=1e-4, abs=1e-6)
    assert schedule.homes[0] == schedule.homes[BLOCKS] == "device"
    assert seconds < 2  # CPU seconds; under 1 on an idle core


def test_the_published_schedule_is_what_its_edges_say():
    edges = published_edges()
    assert edges[0][0] == 0 and edges[-1][1] == BLOCKS
    again = sum(stop - start - 1 for start, stop in edges)
    assert again == 13 and max(stop - start for start, stop in edges) <= 8


def test_a_budget_that_cannot_work_is_infeasible():
    with pytest.raises(InfeasibleError, match="no boundary schedule fits"):
        solve_paper(replace(published(), device_budget_bytes=1.0))
