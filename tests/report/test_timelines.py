"""Predicted and measured on one clock; the trace keeps every task; the picture is drawn with its cap."""

from __future__ import annotations

import json
import struct
import sys

import pytest

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.schema import CHANNELS
from lazytrain_ds.planning.simulator import simulate
from lazytrain_ds.planning.timeline import MemorySample, Task, Timeline
from lazytrain_ds.report.figure import draw
from lazytrain_ds.report.timelines import aligned, channel_table, chrome_trace, lanes_of
from tests.report.reports import SMALL, measured, planned
from tests.report.test_tables import text_of


def test_a_step_is_cut_at_the_end_of_its_last_backward():
    tasks = (
        Task("forward", 0, "compute", 0.0, 2.0),
        Task("backward", 0, "compute", 2.0, 5.0),
        Task("gradient", 0, "d2h", 4.5, 5.5, 8),
        Task("optimizer", 0, "host", 5.5, 6.5),
    )
    memory = (MemorySample("device", 0.0, 1), MemorySample("device", 5.0, 2), MemorySample("device", 6.0, 3))
    moved = aligned(Timeline(tasks, memory, (), step_seconds=7.0))
    where = {task.kind: (task.start_seconds, task.end_seconds) for task in moved.tasks}
    assert where == {"forward": (2.0, 4.0), "backward": (4.0, 7.0), "gradient": (6.5, 7.5), "optimizer": (0.5, 1.5)}
    assert [(sample.at_seconds, sample.byte_count) for sample in moved.memory] == [(0.0, 2), (1.0, 3), (2.0, 1)]
    assert aligned(moved).tasks == moved.tasks
    empty = Timeline((), (), (), 1.0)
    assert aligned(empty) is empty


def test_the_simulators_own_steps_are_cut_there_already():
    timeline = simulate(SMALL, planned())
    assert aligned(timeline).tasks == timeline.tasks


def test_the_table_has_bytes_busy_and_waits_of_both():
    plan = planned()
    lanes = lanes_of(SMALL, plan, measured(plan))
    text = text_of(channel_table(lanes), width=100)
    for channel in ("compute", "h2d", "d2h", "host"):
        assert channel in text
    assert "nvme_read" not in text, "nothing went there"
    busy = lanes[0].timeline.busy_seconds("h2d")
    assert f"{busy:.3g} s" in text and f"{1.1 * busy:.3g} s" in text


def test_the_trace_has_every_task_in_its_thread_and_the_memory_with_its_cap():
    plan = planned()
    lanes = lanes_of(SMALL, plan, measured(plan))
    trace = json.loads(json.dumps(chrome_trace(lanes, SMALL)))
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "predicted", 2: "measured, step 5"}
    for process, lane in zip((1, 2), lanes, strict=True):
        tasks = [event for event in events if event["ph"] == "X" and event["pid"] == process]
        assert len(tasks) == len(lane.timeline.tasks)
        for event, task in zip(tasks, lane.timeline.tasks, strict=True):
            assert CHANNELS[event["tid"]] == task.channel
            assert event["ts"] == pytest.approx(1e6 * task.start_seconds)
            assert event["dur"] == pytest.approx(1e6 * task.seconds)
            assert event["args"].get("bytes", 0) == task.byte_count
        levels = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "device bytes"]
        assert max(level["in use"] for level in levels) == lane.timeline.peak_bytes("device")
        assert {level["cap"] for level in levels} == {SMALL.tier("device").usable_bytes}


def test_the_picture_is_a_png_with_a_panel_per_lane_and_tier(tmp_path):
    plan = planned()
    sizes = []
    for lanes in (lanes_of(SMALL, plan, None), lanes_of(SMALL, plan, measured(plan))):
        target = tmp_path / "t.png"
        draw(lanes, SMALL, "title", target)
        data = target.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append(struct.unpack(">II", data[16:24]))
    assert sizes[0][0] == sizes[1][0] == 1540
    assert sizes[1][1] > sizes[0][1] + 100, "a second panel is taller"


def test_without_matplotlib_what_to_install_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"lazytrain-ds\[viz\]"):
        draw(lanes_of(SMALL, planned(), None), SMALL, "title", tmp_path / "t.png")


def test_a_picture_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        draw(lanes_of(SMALL, planned(), None), SMALL, "title", tmp_path / "none" / "t.png")
