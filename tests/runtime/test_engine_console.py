"""What a run says: the plan at its start, predicted against measured after five steps; and what it leaves behind."""

from __future__ import annotations

import re

import pytest
import torch

from lazytrain_ds import cli
from lazytrain_ds.errors import ConfigError, format_bytes
from lazytrain_ds.planning.simulator import simulate
from lazytrain_ds.report.run_directory import RunDirectory, StepRecord, read_source
from lazytrain_ds.runtime.console import record_line
from tests.integration.training import config, engine_of, gpt, loss_of, rule_block, tokens


def steps(engine, count):
    for call in tokens(count):
        engine.backward(loss_of(engine(**call)))
        engine.step()


def said(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(("[lazytrain]", "  "))]


def test_the_plan_is_a_table_at_the_start_one_row_per_decision(capsys):
    torch.manual_seed(0)
    with engine_of(gpt(), config(rule_block("megatrain"))) as engine:
        lines = capsys.readouterr().out.splitlines()
        start = lines.index("[lazytrain] plan (placement) by megatrain:")
        assert max(len(line) for line in lines[start + 2 :] if line[:1] in "┏┡│└") <= 100
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[start:] if line.startswith("│")]
        memory, decisions = [row for row in rows if len(row) == 7], [row for row in rows if len(row) == 6]
        prediction = lines[start + 1]
        instance, predicted = engine.lazytrain_instance, engine.lazytrain_plan.prediction
        found = re.fullmatch(
            r"  predicted step (\S+) s \(1 x micro-batch 2, optimizer serial\), (\d+) % of bound; "
            r"peaks: device (.+) of (.+), host (.+) of (.+)",
            prediction,
        )
        assert float(found[1]) == pytest.approx(predicted.step_seconds, rel=0.01)
        assert int(found[2]) == round(predicted.percent_of_bound)
        for number, tier in ((3, "device"), (5, "host")):
            assert found[number] == format_bytes(predicted.peak_bytes(tier))
            assert found[number + 1] == format_bytes(instance.tier(tier).usable_bytes)
        for row, tier in zip(memory, ("device", "host"), strict=True):
            assert row[0] == tier
            assert row[3] == format_bytes(predicted.peak_bytes(tier, "step"))
            assert row[6] == format_bytes(instance.tier(tier).usable_bytes)
        assert [row[:2] for row in decisions] == [
            ["0", "embedding"], ["1, 5", "Block"], ["2-4", "Block"], ["6", "head"],
        ]  # fmt: skip
        assert decisions[2][2:] == ["boundary", "dropped", "host", "host fp32"]
        assert not any("activations) by" in line for line in lines)
        steps(engine, 1)
        assert "[lazytrain] plan (activations) by megatrain:" in said(capsys)
        steps(engine, 1)
        assert said(capsys) == [], "a batch of the same size is not planned again, and nothing is said"


def test_an_equal_plan_for_the_real_shapes_is_not_drawn_again(capsys):
    torch.manual_seed(0)
    with engine_of(gpt(), config(rule_block("megatrain"))) as engine:
        capsys.readouterr()
        engine._lt_console.plan(engine.lazytrain_instance, engine.lazytrain_plan, "activations")
        assert capsys.readouterr().out.splitlines()[-1] == "  decisions as in the table above"


def test_one_line_per_steps_per_print(capsys):
    torch.manual_seed(0)
    settings = config(rule_block("megatrain"), accumulation=2, steps_per_print=3)
    with engine_of(gpt(), settings) as engine:
        steps(engine, 13)
        lines = [line for line in said(capsys) if re.match(r"\[lazytrain\] step \d", line)]
        found = [re.match(r"\[lazytrain\] step (\d+): (\S+) s, (\S+) samples/s; compute waits (\d+) %", line)
                 for line in lines]  # fmt: skip
        assert [int(match[1]) for match in found] == [3, 6]
        for match in found:
            assert float(match[2]) * float(match[3]) == pytest.approx(4, rel=0.02), "4 samples a step"


def test_a_record_in_one_line():
    record = StepRecord(
        20, 10, 2.0, 4.0, 10**9, 10**9, 3e12, {"h2d": 0.2, "host": 0.3, "d2h": 0.001}, {"h2d": 2e9, "nvme_write": 5e8}
    )
    assert record_line(record, 5 * 10**12) == (
        "step 20: 2 s, 4 samples/s; compute waits 25 % (host 15 %, h2d 10 %); per step h2d 2 GB, nvme_write 500 MB; "
        "3 TB written to NVMe per day of 5 TB allowed"
    )
    quiet = StepRecord(20, 10, 2.0, 4.0, 10**9, 10**9)
    assert record_line(quiet, None) == "step 20: 2 s, 4 samples/s; compute waits 0 %"


def test_a_run_leaves_what_reports_need(tmp_path, capsys):
    torch.manual_seed(0)
    directory = tmp_path / "run"
    settings = config({**rule_block("megatrain"), "report_dir": str(directory)}, steps_per_print=4)
    with engine_of(gpt(), settings) as engine:
        steps(engine, 9)
        source = read_source(str(directory))
        assert (source.plan, source.instance) == (engine.lazytrain_plan, engine.lazytrain_instance)
        assert [record.step for record in source.records] == [4, 8]
        assert [timeline.step for timeline in source.timelines] == [2, 4, 5, 8]
        record, predicted = source.records[-1], simulate(source.instance, source.plan)
        assert record.step_seconds > 0 and record.device_bytes == engine._lt_book.device.ledger.peak_bytes
        padding = 256 * 3 * source.plan.block_count
        for channel in ("h2d", "d2h"):
            carried = record.byte_counts.get(channel, 0.0)
            assert carried == source.timelines[-1].channel_bytes(channel)
            assert carried <= predicted.channel_bytes(channel) + padding
        assert source.about["torch"] == torch.__version__
        assert set(source.about) >= {"started", "model", "hardware", "deepspeed"}
    capsys.readouterr()
    for command in (
        ["explain", "--quick"],
        ["timeline", "--trace", str(tmp_path / "t.json")],
        ["compare", str(directory)],
    ):
        assert cli.main([command[0], str(directory), *command[1:]]) == 0
    assert "measured" in capsys.readouterr().out


def test_a_report_directory_that_cannot_be_made_is_refused_at_once_and_a_full_disk_later_is_not(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    torch.manual_seed(0)
    wrong = config({"report_dir": str(tmp_path / "file" / "run")})
    with pytest.raises(ConfigError, match=r'"lazytrain\.report_dir": cannot write'), engine_of(gpt(), wrong):
        pass

    def full(*_):
        raise OSError(28, "No space left on device")

    with engine_of(gpt(), config({"report_dir": str(tmp_path / "run")})) as engine:
        monkeypatch.setattr(RunDirectory, "write_timeline", full)
        capsys.readouterr()
        steps(engine, 6)
        told = [line for line in said(capsys) if "nothing more is written" in line]
        assert len(told) == 1 and "No space left on device" in told[0]


def test_deepspeeds_own_monitor_gets_the_figures(tmp_path):
    torch.manual_seed(0)
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    with engine_of(gpt(), config(rule_block("megatrain"), csv_monitor=csv)) as engine:
        steps(engine, 4)
        expected = engine.lazytrain_timeline
    files = {path.name: path.read_text().splitlines() for path in (tmp_path / "job").glob("LazyTrain_*.csv")}
    assert {"LazyTrain_step_seconds.csv", "LazyTrain_stall_share.csv", "LazyTrain_device_bytes.csv"} <= set(files)
    rows = [line.split(",") for line in files["LazyTrain_step_seconds.csv"][1:]]
    assert [int(row[0]) for row in rows] == [4, 6, 8], "by samples, as DeepSpeed's own; the first step warms up"
    assert all(float(row[1]) > 0 for row in rows)
    if expected.channel_bytes("h2d"):
        assert float(files["LazyTrain_bytes_h2d.csv"][-1].split(",")[1]) == expected.channel_bytes("h2d")


def test_predicted_against_measured_after_five_steps_and_only_then(capsys):
    torch.manual_seed(0)
    with engine_of(gpt(), config({"replan": False}, accumulation=2)) as engine:
        steps(engine, 9)
        assert not any("measured" in line for line in said(capsys))
        steps(engine, 1)
        lines = said(capsys)
        assert lines[0] == "[lazytrain] predicted against measured after 5 steps:"
        step, device, host = lines[1:4]
        predicted, measured = map(float, re.match(r"  step +(\S+) s +(\S+) s", step).groups())
        assert predicted == pytest.approx(engine.lazytrain_plan.prediction.step_seconds, rel=0.01)
        assert 0 < measured < 60
        assert re.match(r"  device +\S+ [kMG]?B +\S+ [kMG]?B", device)
        assert re.match(r"  host +\S+ [kMG]?B +\S+ [kMG]?B \(process\)", host)
        steps(engine, 4)
        assert said(capsys) == []


def test_notes_are_said_once(capsys):
    """A model that names no length: which one the placement was planned for has to be said."""
    torch.manual_seed(0)
    settings = config({})
    del settings["lazytrain"]["sequence_length"]
    with engine_of(gpt(), settings) as engine:
        steps(engine, 2)
        notes = [line for line in said(capsys) if "no sequence length given" in line]
        assert len(notes) == 1 and '"lazytrain.sequence_length"' in notes[0]


def test_destroy_frees_everything_even_with_a_graph_still_alive():
    """Also after an error of the user's: the loss of a step that never had its backward."""
    import threading

    before = {thread.name for thread in threading.enumerate()}
    torch.manual_seed(0)
    with engine_of(gpt(), config(rule_block("keep_all"))) as engine:
        steps(engine, 1)
        loss = loss_of(engine(**tokens(1)[0]))
        ledger = engine._lt_book.device.ledger
        assert ledger.live_bytes > 0
    assert ledger.live_bytes == 0  # `engine_of` asserts it as well
    del loss
    left = {thread.name for thread in threading.enumerate()} - before
    assert not any("lazytrain" in name for name in left), left


def test_an_error_in_the_middle_of_destroy_still_closes_the_rest(monkeypatch):
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="upstream failed"), engine_of(gpt(), config({})) as engine:
        steps(engine, 1)
        closed = []
        monkeypatch.setattr(engine._lt_book, "close", lambda: closed.append(True))
        monkeypatch.setattr(
            type(engine).__mro__[1], "destroy", lambda self: (_ for _ in ()).throw(RuntimeError("upstream failed"))
        )
    assert closed == [True]
