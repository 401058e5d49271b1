"""Two plans or runs side by side: figures of both, blocks that differ, and whether results would be equal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazytrain_ds.planning.plan import SubGroupPlan
from lazytrain_ds.report.comparison import (
    difference_table,
    differences,
    figure_table,
    figures,
    numerics_line,
)
from lazytrain_ds.report.run_directory import Source, read_source
from tests.report.reports import SMALL, planned, run_directory
from tests.report.test_tables import text_of


def sources(*kinds):
    return [Source(kind, planned(kind=kind), SMALL) for kind in kinds]


def test_figures_of_both_sides(tmp_path):
    (first, _) = sources("checkpoint_all_host", "megatrain")
    second = read_source(run_directory(tmp_path, planned(kind="megatrain")))
    found = {item.name: item for item in figures(first, second)}
    assert found["predicted step"].first == first.plan.prediction.step_seconds
    assert found["predicted step"].second == second.plan.prediction.step_seconds
    assert (found["measured step"].first, found["measured step"].second) == (
        None,
        pytest.approx(1.1 * second.plan.prediction.step_seconds),
    )
    assert found["measured wait for h2d"].second == pytest.approx(0.2 * found["measured step"].second)
    assert "predicted bytes, nvme_read" not in found, "0 on both sides"
    text = text_of(figure_table(first, second), width=100)
    assert "B / A" in text and "measured step" in text


def test_equal_plans_differ_nowhere_and_unlike_ones_by_class():
    same = sources("megatrain", "megatrain")
    assert differences(*same) == []
    first, second = sources("checkpoint_all_host", "megatrain")
    found = differences(first, second)
    assert found
    for item in found:
        assert item.first != item.second
        assert {SMALL.order[block] for block in item.blocks} == {item.class_name}
    covered = [block for item in found for block in item.blocks]
    assert len(covered) == len(set(covered))
    text = text_of(difference_table(found), width=100)
    assert "dropped" in text


def test_what_changes_numbers_is_named_and_what_does_not_is_not():
    first, second = sources("checkpoint_all_host", "megatrain")
    assert numerics_line(first, second) == "same numerics: both train bit-identically"
    one = first.plan.blocks
    eight = (one[0], replace(one[1], optimizer=SubGroupPlan("host", "8bit")), *one[2:])
    other = replace(second, plan=replace(first.plan, blocks=eight))
    assert "state precision of 1 blocks" in numerics_line(first, other)
    rounds = replace(second, plan=replace(second.plan, micro_batch=2, rounds=4))
    assert "micro-batch and rounds (4 x 2, 2 x 4)" in numerics_line(first, rounds)
    longer = replace(second, instance=replace(SMALL, sequence_length=99))
    assert "sequence length (2048, 99)" in numerics_line(first, longer)
    short = replace(second, plan=replace(second.plan, blocks=second.plan.blocks[:-1]))
    assert "the model (8 blocks, 7 blocks)" in numerics_line(first, short)
    assert differences(first, short) == []
