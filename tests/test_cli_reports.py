"""explain, timeline, compare, convert, completion: answers on the screen and as JSON, statuses, no heavy imports."""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain_ds import cli
from lazytrain_ds.commands import explain
from lazytrain_ds.commands.completion import script
from lazytrain_ds.commands.plan import planned_config, write_config
from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.plan import Plan
from tests.report.reports import SMALL, plan_file, planned, run_directory

COMMANDS = ("plan", "explain", "timeline", "compare", "convert", "probe", "doctor", "completion")


@pytest.fixture
def plans(tmp_path: Path) -> tuple[str, str]:
    """A plan and a run of another plan."""
    return (
        plan_file(tmp_path / "a.json", planned()),
        run_directory(tmp_path / "run", planned(kind="megatrain"), steps=(5, 10)),
    )


def answer(capsys, *arguments: str):
    assert cli.main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


def fits(text: str, width: int = 100) -> bool:
    return max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_explain_on_the_screen_fits_100_columns(plans, capsys):
    for source in plans:
        assert cli.main(["explain", source, "--quick"]) == 0
        text = capsys.readouterr().out
        assert fits(text)
        for words in ("Where the predicted step goes", "What binds", "Why each block is where it is", "Why not"):
            assert words in text
    assert "measured" in text


def test_explain_asks_the_planner_what_more_would_buy(plans, capsys, monkeypatch):
    monkeypatch.setattr(explain, "WHAT_IF_SECONDS", 0.05)
    assert cli.main(["explain", plans[0]]) == 0
    text = capsys.readouterr().out
    for change in ("1 GB more device memory", "1 GB more host memory", "1 GB more NVMe space", "a 10 % faster link"):
        assert re.search(rf"\* {change} would", text), change


def test_explain_as_json(plans, capsys, tmp_path):
    found = answer(capsys, "explain", plans[1], "--quick", "--json")
    assert found["step"]["step_seconds"] == pytest.approx(planned(kind="megatrain").prediction.step_seconds)
    covered = [block for part in found["blocks"] for block in range(part["first"], part["last"] + 1)]
    assert covered == list(range(SMALL.block_count))
    assert [record["step"] for record in found["measured"]] == [5, 10]
    assert cli.main(["explain", plans[1], "--quick", "--json", str(tmp_path / "e.json")]) == 0
    assert json.loads((tmp_path / "e.json").read_text()) == found
    assert "What binds" in capsys.readouterr().out, "with a file the screen says it too"


def test_explain_one_block(plans, capsys):
    assert cli.main(["explain", plans[0], "--block", "3"]) == 0
    text = capsys.readouterr().out
    assert fits(text)
    assert "Block 3 (block)" in text and "its backward runs from" in text
    found = answer(capsys, "explain", plans[0], "--block", "0", "--json")
    assert (found["block"], found["class"]) == (0, "embedding")
    assert cli.main(["explain", plans[0], "--block", "99"]) == 2
    assert "has blocks 0 to 7" in capsys.readouterr().err


def test_timeline_writes_picture_and_trace(plans, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["timeline", plans[1]]) == 0
    text = capsys.readouterr().out
    assert fits(text)
    assert "measured" in text and "wrote timeline.png" in text
    assert Path("timeline.png").read_bytes()[:4] == b"\x89PNG"
    names = {e["args"]["name"] for e in json.loads(Path("timeline.trace.json").read_text())["traceEvents"]
             if e["name"] == "process_name"}  # fmt: skip
    assert names == {"predicted", "measured, step 10"}


def test_without_matplotlib_the_rest_is_still_written(plans, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["timeline", plans[1]]) == 0
    text = capsys.readouterr().out
    assert "lazytrain-ds[viz]" in text and "By channel" in text
    assert not Path("timeline.png").exists() and Path("timeline.trace.json").exists()


def test_timeline_of_a_step_and_as_json(plans, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = answer(capsys, "timeline", plans[1], "--step", "5", "--json")
    assert [lane["name"] for lane in found["lanes"]] == ["predicted", "measured, step 5"]
    predicted, measured = found["lanes"]
    for channel, figures in predicted["channels"].items():
        assert measured["channels"][channel]["bytes"] == figures["bytes"]
        assert measured["channels"][channel]["busy_seconds"] == pytest.approx(1.1 * figures["busy_seconds"])
    assert not list(tmp_path.glob("timeline*")), "JSON on stdout alone writes no files"
    assert cli.main(["timeline", plans[1], "--step", "7"]) == 2
    assert "there are: 5, 10" in capsys.readouterr().err
    assert cli.main(["timeline", plans[1], "--trace", str(tmp_path / "no" / "t.json")]) == 2
    assert "--trace: cannot write" in capsys.readouterr().err


def test_compare(plans, capsys):
    assert cli.main(["compare", *plans]) == 0
    text = capsys.readouterr().out
    assert fits(text)
    assert "same numerics" in text and "Where they differ" in text
    found = answer(capsys, "compare", plans[0], plans[0], "--json")
    assert found["differences"] == []
    assert all(item["first"] == item["second"] for item in found["figures"])


def test_errors_are_said_in_one_line_and_raised_with_debug(capsys, tmp_path, monkeypatch):
    missing = str(tmp_path / "none")
    assert cli.main(["explain", missing]) == cli.BAD_INPUT
    told = capsys.readouterr().err
    assert told.startswith("lazytrain: ") and "Traceback" not in told and told.count("\n") == 1
    for argv in (["--debug", "explain", missing], ["explain", missing, "--debug"]):
        with pytest.raises(Exception, match="no file or directory"):
            cli.main(argv)

    def broken(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(explain, "run", broken)
    assert cli.main(["explain", missing]) == cli.INTERNAL
    told = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: oops" in told and "--debug" in told and "Traceback" not in told
    with pytest.raises(ZeroDivisionError):
        cli.main(["explain", missing, "--debug"])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, "run", interrupted)
    assert cli.main(["explain", missing]) == cli.INTERRUPTED


def test_unknown_commands_and_missing_arguments_are_bad_input(capsys):
    for argv in (["explian"], [], ["compare", "one"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == cli.BAD_INPUT
    assert "usage: lazytrain" in capsys.readouterr().err


def test_what_needs_no_torch_imports_neither_torch_nor_deepspeed(plans, child_environment, tmp_path):
    old = tmp_path / "old.json"
    old.write_text('{"zero_optimization": {"stage": 3}}')
    code = f"""
import sys
import lazytrain_ds.cli as cli
for argv in (
    ["--help"], ["--version"], *([name, "--help"] for name in {COMMANDS!r}),
    ["explain", {plans[1]!r}, "--quick"], ["explain", {plans[1]!r}, "--block", "1"], ["timeline", {plans[1]!r}],
    ["compare", {plans[0]!r}, {plans[1]!r}], ["convert", {str(old)!r}], ["completion", "bash"], ["probe", "--list"],
):
    try:
        assert cli.main(argv) == 0, argv
    except SystemExit as stop:
        assert stop.code == 0, argv
    assert not {{"torch", "deepspeed", "transformers"}} & set(sys.modules), argv
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_package_imports_quickly_and_without_a_warning(child_environment):
    command = [sys.executable, "-W", "error", "-c", "import lazytrain_ds"]
    seconds = []
    for _ in range(4):  # processor time: a loaded machine is not our doing
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, env=child_environment, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stderr == ""
    assert min(seconds) < 0.3


def test_every_command_takes_json_and_debug(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        text = capsys.readouterr().out
        assert "--debug" in text
        assert ("--json" in text) == (name != "completion")
        assert fits(text)


def test_plans_written_by_the_command_are_read_back(plans, capsys):
    plan = json.loads(Path(plans[0]).read_text())["plan"]
    assert Plan.from_json(json.dumps(plan)) == planned()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_every_command_and_option(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", text)
    option = "-l device-memory" if shell == "fish" else "--device-memory"
    assert option in text
    assert ("bashcompinit" in text) == (shell == "zsh")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lazytrain ti", {"timeline"}),
        ("lazytrain --de", {"--debug"}),
        ("lazytrain explain --b", {"--block"}),
        ("lazytrain --debug explain x --q", {"--quick"}),
        ("lazytrain completion z", {"zsh"}),
    ],
)
def test_bash_completes(words, expected, tmp_path):
    (tmp_path / "lazytrain.sh").write_text(script("bash"))
    typed = words.split(" ")
    code = (
        f"cd {tmp_path}; . ./lazytrain.sh; COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _lazytrain; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected, done.stderr


def test_a_planned_config_keeps_the_rest_and_says_how_it_was_made(tmp_path):
    old = {
        "_comment": "an older one", "train_batch_size": 8, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3}, "lazytrain": {"micro_batch": "auto", "report_dir": "r"},
    }  # fmt: skip
    typed = ["plan", "my config.json", "--model", "m"]
    new = planned_config(old, SMALL, planned(), typed)
    comment = new.pop("_comment")
    assert shlex.split(comment[0]) == ["lazytrain", *typed]
    assert (
        f"predicted: {planned().prediction.step_seconds:.3g} s a step" in comment[1] and "peaks: device" in comment[1]
    )
    old.pop("_comment")
    assert new == {
        **old, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "lazytrain": {"report_dir": "r", "sequence_length": 2048},
    }  # fmt: skip
    target = tmp_path / "new.json"
    write_config(str(target), new)
    assert json.loads(target.read_text()) == new
    with pytest.raises(ConfigError, match="--write-config: cannot write"):
        write_config(str(tmp_path / "none" / "new.json"), new)
