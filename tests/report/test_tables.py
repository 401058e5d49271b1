"""Tables and figures of a plan."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lazytrain_ds.planning.simulator import predict
from lazytrain_ds.planning.solve import solve
from lazytrain_ds.report.tables import (
    block_ranges,
    decision_table,
    describe,
    format_count,
    format_number,
    memory_table,
    plan_tables,
    speed_lines,
    speed_of,
)
from tests.workload.models import TinyLM
from tests.workload.test_build import build


def text_of(*tables: object, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, color_system="standard", force_terminal=True)
    for table in tables:
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_speed_follows_from_the_prediction():
    instance = build(TinyLM(), sizes=(2,), global_batch=4)
    plan = solve(instance, kind="checkpoint_all")
    speed = speed_of(instance, plan)
    tokens = 4 * 16
    assert speed.tokens_per_second == pytest.approx(tokens / plan.prediction.step_seconds)
    assert speed.model_flops == pytest.approx(6 * instance.parameter_count * speed.tokens_per_second)
    blocks = [instance.costs(index, 2) for index in range(instance.block_count)]
    recomputed = sum(
        costs.choice(block.choice).recompute_flops for costs, block in zip(blocks, plan.blocks, strict=True)
    )
    executed = 3 * sum(costs.forward_flops for costs in blocks) + recomputed
    assert recomputed > 0
    assert speed.executed_flops == pytest.approx(2 * executed / plan.prediction.step_seconds)
    busiest = max(plan.prediction.channels, key=lambda channel: channel.busy_seconds)
    assert speed.bottleneck == busiest.channel


def test_a_plan_without_a_prediction_has_no_speed():
    instance = build(TinyLM())
    plan = solve(instance)
    bare = type(plan)(plan.blocks, plan.micro_batch, plan.rounds)
    with pytest.raises(ValueError, match="no prediction"):
        speed_of(instance, bare)


def test_tables_count_blocks_by_decision():
    instance = build(TinyLM(), sizes=(2,))
    plan = solve(instance, kind="checkpoint_all_host")
    text = text_of(*plan_tables(instance, plan))
    assert "ResidualMLP" in text
    assert " 3 " in text
    assert describe(instance, plan, 1)[:2] == ("boundary", "host")
    for phase in ("load", "initialize", "step", "save", "resume"):
        assert phase in text
    assert any("best fixed rule" in line for line in speed_lines(instance, plan))


def test_a_need_above_the_cap_is_red():
    instance = build(TinyLM(), sizes=(2,), margins={"host": 10**10})
    plan = solve(build(TinyLM(), sizes=(2,)), kind="keep_all")
    plan = plan.with_prediction(predict(instance, plan))
    assert "\x1b[31m" in text_of(memory_table(instance, plan))
    assert "\x1b[31m" not in text_of(memory_table(build(TinyLM(), sizes=(2,)), plan))


def test_numbers_have_no_exponents():
    assert [format_number(v) for v in (0.1234, 12.34, 123.4, 2174.0, 1.5e6)] == [
        "0.123", "12.3", "123", "2,170", "1,500,000",
    ]  # fmt: skip


def test_counts_in_words():
    assert [format_count(count) for count in (5, 1500, 847_000, 23_366_898_688)] == ["5", "1.5 k", "847 k", "23.4 B"]


def test_decisions_name_their_blocks():
    instance = build(TinyLM(), sizes=(2,))
    plan = solve(instance, kind="checkpoint_all_host")
    text = text_of(decision_table(instance, plan), width=100)
    assert "1-3" in text and "ResidualMLP" in text and "boundary" in text
    assert block_ranges([1, 2, 3, 5, 7, 8]) == "1-3, 5, 7-8"
    assert block_ranges([4]) == "4"
