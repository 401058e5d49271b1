"""Sentences about a plan: they say what the plan says, and their figures are the simulator's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazytrain_ds.errors import PlanError
from lazytrain_ds.planning.explain import WhatIf, block_reason, explain
from lazytrain_ds.planning.simulator import Simulator, simulate
from lazytrain_ds.report import explanation as words
from lazytrain_ds.report.run_directory import Source, read_source
from tests.report.reports import SMALL, planned, run_directory
from tests.report.test_tables import text_of


@pytest.fixture(scope="module")
def source() -> Source:
    return Source("x", planned(), SMALL)


def test_the_parts_of_the_step_add_up_in_the_table(source):
    found = explain(SMALL, source.plan, what_if=False)
    text = text_of(words.step_table(found), width=100)
    assert "recomputation" in text and "100.0 %" in text
    assert f"{found.objective.compute_seconds:.4g}" in text
    assert f"{source.plan.prediction.step_seconds:.4g}" in text


def test_what_binds_is_said_with_the_simulators_figures(source):
    lines = words.binding_lines(source)
    assert f"{source.plan.prediction.percent_of_bound:.0f} % of that bound" in lines[-1]
    waits = Simulator(SMALL).waits(source.plan)
    for seconds, block in waits[:3]:
        if seconds >= 0.01 * source.plan.prediction.step_seconds:
            assert any(line.startswith(f"block {block} ") for line in lines)
    tight = replace(SMALL, tiers=tuple(
        replace(t, capacity_bytes=source.plan.prediction.peak_bytes("device") + t.margin_bytes) if t.name == "device"
        else t for t in SMALL.tiers))  # fmt: skip
    assert any(
        line.startswith("device memory is full") for line in words.binding_lines(replace(source, instance=tight))
    )


def test_a_block_in_sentences(source):
    reason = block_reason(SMALL, source.plan, 3)
    lines = words.reason_lines(SMALL, source.plan, reason)
    assert lines[0] == (
        "Block 3 (block): is recomputed in backward; its input waits in host memory; its parameters come from host "
        f"memory, fetched {source.plan.blocks[3].parameter_lead} blocks ahead; its fp32 optimizer states are in host "
        "memory, updated on the host."
    ).replace("fetched 1 blocks", "fetched 1 block")
    assert [line.split("?")[0].strip() for line in lines[1:]] == [
        "Why not keep everything",
        "Why not keep its input on the device",
        "Why not keep its parameters on the device",
        "Why not keep its optimizer states on the device",
    ]
    everywhere = explain(SMALL, source.plan, what_if=False).blocks
    run = next(item for item in everywhere if item.first <= 3 <= item.last)
    assert words.reason_lines(SMALL, source.plan, run)[0].startswith(f"Blocks {run.first} to {run.last} (block): each")
    with pytest.raises(PlanError, match="no block 99"):
        block_reason(SMALL, source.plan, 99)


def test_a_dropped_boundary_names_the_block_it_is_made_from():
    plan = planned(kind="megatrain")
    dropped = next(index for index, block in enumerate(plan.blocks) if block.boundary == "dropped")
    line = words.reason_lines(SMALL, plan, block_reason(SMALL, plan, dropped))[0]
    assert f"its input is dropped and re-made from block {plan.segment_start(dropped)}" in line


def test_times_of_a_block_are_those_of_the_timeline(source):
    timeline = simulate(SMALL, source.plan)
    lines = words.block_lines(source, 3, timeline)
    forward = next(t for t in timeline.tasks if t.kind == "forward" and t.block == 3 and t.micro_step == 0)
    assert lines[0] == f"its forward runs from {forward.start_seconds:.4g} s to {forward.end_seconds:.4g} s"
    assert any("before they are needed" in line for line in lines)
    waits = {block: seconds for seconds, block in Simulator(SMALL).waits(source.plan)}
    expected = f"compute waits {words.seconds_words(waits[3])}" if waits.get(3) else "compute never waits for it"
    assert lines[-1].startswith(expected)
    text = text_of(words.block_table(source, 3), width=100)
    for word in ("parameters", "gradient", "optimizer states (fp32)", "input (boundary)", "while its backward runs"):
        assert word in text


def test_what_more_would_buy():
    plan = planned()
    now = plan.prediction.step_seconds
    lines = words.what_if_lines(
        SMALL,
        plan,
        (WhatIf("1 GB more device memory", 0.9 * now, 0.1 * now), WhatIf("1 GB more host memory", now, 0.0)),
    )
    assert lines[0].startswith("1 GB more device memory would shorten the step by") and "(10.0 %)" in lines[0]
    assert lines[1] == "1 GB more host memory would buy nothing"


def test_predicted_beside_measured(tmp_path, source):
    assert "nothing measured" in words.measured_line(source)
    run = read_source(run_directory(tmp_path, source.plan))
    assert "(10 % longer than predicted)" in words.measured_line(run)
    waited = words.seconds_words(0.2 * 1.1 * source.plan.prediction.step_seconds)
    said = f"measured up to step 5: compute waits 20 % of the step (copies to the device {waited})"
    assert said in words.binding_lines(run)


def test_durations_in_words():
    assert [words.seconds_words(s) for s in (12.345, 0.5, 0.00123, 4e-6, 0.0)] == [
        "12.3 s",
        "500 ms",
        "1.23 ms",
        "4 µs",
        "0 µs",
    ]
