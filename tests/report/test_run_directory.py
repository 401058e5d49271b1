"""What a run leaves is read back as it was; what cannot be read is named."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import pytest

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.schema import from_json, to_json
from lazytrain_ds.report.run_directory import KEPT_TIMELINES, RunDirectory, StepRecord, read_source
from tests.report.reports import SMALL, measured, plan_file, planned, record, run_directory


def test_a_run_is_read_back_as_it_was_written(tmp_path):
    plan = planned()
    source = read_source(run_directory(tmp_path / "run", plan, steps=(5, 10)))
    assert (source.plan, source.instance) == (plan, SMALL)
    assert [timeline.step for timeline in source.timelines] == [5, 10]
    assert source.timelines[0] == measured(plan, 5)
    assert source.records == (record(5, 1.1 * plan.prediction.step_seconds), record(10, source.records[0].step_seconds))
    assert source.about == {"torch": "2.13.0"}
    assert source.measured and source.timeline() is source.timelines[1] and source.timeline(5) is source.timelines[0]
    with pytest.raises(ConfigError, match="no timeline of step 7; there are: 5, 10"):
        source.timeline(7)


def test_the_first_and_the_newest_timelines_are_kept(tmp_path):
    plan = planned()
    directory = RunDirectory(tmp_path)
    for step in range(5, 60, 5):
        directory.write_timeline(measured(plan, step))
        kept = [int(path.stem[5:]) for path in sorted(tmp_path.glob("timelines/*.json"))]
        expected = list(range(5, step + 1, 5))
        assert kept == expected if len(expected) <= KEPT_TIMELINES else [5, *expected[1 - KEPT_TIMELINES :]]
    assert len(kept) == KEPT_TIMELINES


def test_a_new_run_removes_what_an_earlier_one_measured(tmp_path):
    run_directory(tmp_path, planned())
    RunDirectory(tmp_path).begin({"torch": "later"})
    source = read_source(str(tmp_path))
    assert not source.measured
    assert source.about == {"torch": "later"}


def test_only_the_user_may_look(tmp_path):
    run_directory(tmp_path / "a" / "run", planned())
    for path in (tmp_path / "a" / "run", tmp_path / "a" / "run" / "timelines"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not [path for path in (tmp_path / "a").rglob("*") if path.name.startswith(".")]


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    run_directory(tmp_path, planned(), steps=(5, 10))
    file = tmp_path / "steps.jsonl"
    file.write_text(file.read_text()[:-20])
    assert [item.step for item in read_source(str(tmp_path)).records] == [5]


def test_plan_files_with_and_without_their_instance(tmp_path):
    plan = planned()
    assert read_source(plan_file(tmp_path / "both.json", plan)).plan == plan
    (tmp_path / "plan.json").write_text(plan.to_json())
    with pytest.raises(ConfigError, match=r"put its instance\.json beside it"):
        read_source(str(tmp_path / "plan.json"))
    (tmp_path / "instance.json").write_text(SMALL.to_json())
    assert read_source(str(tmp_path / "plan.json")).instance == SMALL
    assert read_source(str(tmp_path)).plan == plan
    bare = replace(plan, prediction=None)
    predicted = read_source(plan_file(tmp_path / "bare.json", bare)).plan.prediction
    assert predicted.step_seconds == plan.prediction.step_seconds


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[1]", "holds a list"),
        ('{"a": 1}', "is neither a plan nor what lazytrain plan"),
        ('{"plan": null, "instance": {}}', "nothing fits"),
        ('{"plan": {"blocks": []}, "instance": {}}', r"x\.json: micro_batch"),
    ],
)
def test_what_is_no_plan_is_named(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_source(str(tmp_path / "x.json"))


def test_missing_files_and_a_plan_of_another_model(tmp_path):
    with pytest.raises(ConfigError, match="no file or directory"):
        read_source(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r'no plan\.json; a run writes it when its config says .*"report_dir"'):
        read_source(str(tmp_path))
    plan = planned()
    short = replace(plan, blocks=plan.blocks[:-1], prediction=None)
    with pytest.raises(ConfigError, match="has 7 blocks, the model has 8"):
        read_source(plan_file(tmp_path / "x.json", short))
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "instance.json").write_text(SMALL.to_json())
    (tmp_path / "steps.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(ConfigError, match="steps"):
        read_source(str(tmp_path))


def test_records_are_a_schema_of_their_own():
    one = record(10, 2.0)
    assert from_json(StepRecord, to_json(one)) == one
    assert one.stall_share == pytest.approx(0.2)
    assert replace(one, step_seconds=0.0).stall_share == 0.0
