"""Ctrl-C and a mistake in the user's code leave no swap file and no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.training import config

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).with_name("script_train.py")
PATIENCE_SECONDS = 240


def command(launcher: str, port: int, swap: Path, trouble: str) -> list[str]:
    block = {"activations": "nvme", "nvme_path": str(swap), "sequence_length": 128}
    options = json.dumps({"config": config(block), "steps": 2, "trouble": trouble})
    if launcher == "python":
        return [sys.executable, str(SCRIPT), options]
    return ["deepspeed", "--num_gpus", "1", "--master_port", str(port), str(SCRIPT), options]


def processes_of(session: int) -> list[psutil.Process]:
    """Living processes of a session (the launcher's children may change their group, not their session)."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.Error):
            continue
    return found


def assert_nothing_is_left(session: int, swap: Path) -> None:
    deadline = time.monotonic() + 30
    while processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = processes_of(session)
    for process in left:
        process.kill()
    assert not left, left
    assert not swap.exists() or not os.listdir(swap), list(swap.rglob("*"))


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """In a session of its own, where Ctrl-C works: a shell's background jobs ignore it, and so would their children."""
    environment = {**environment, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "1"}
    return subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def end(process: subprocess.Popen[str]) -> None:
    """Whatever a failed test leaves running."""
    for left in processes_of(process.pid):
        left.kill()
    process.wait()


def wait_for(process: subprocess.Popen[str], line_with: str) -> list[str]:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line_with in line:
            return lines
    raise AssertionError("".join(lines[-40:]))


def swap_files(swap: Path) -> list[Path]:
    return list(swap.rglob("*.swap"))


@pytest.mark.parametrize(
    ("launcher", "port", "to"),
    [("python", 0, "all"), ("deepspeed", 29794, "all"), ("deepspeed", 29795, "node launcher")],
    ids=["plain python", "launcher", "node launcher"],
)
def test_ctrl_c(launcher, port, to, tmp_path, child_environment):
    """A terminal sends the signal to every process of the foreground group; a scheduler to the node's launcher.

    Sent to DeepSpeed's outermost process alone it ends only that one: on one node upstream installs no handler there.
    """
    swap = tmp_path / "swap"
    process: subprocess.Popen[str] = start(command(launcher, port, swap, "sleep"), child_environment)
    try:
        wait_for(process, "READY")
        assert swap_files(swap), "the run does use its store"
        if to == "all":
            os.killpg(process.pid, signal.SIGINT)
        else:
            (node_launcher,) = psutil.Process(process.pid).children()
            node_launcher.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode != 0
        assert "Segmentation" not in output and "terminate called" not in output, output[-3000:]
        assert_nothing_is_left(process.pid, swap)
    finally:
        end(process)


@pytest.mark.parametrize(("launcher", "port"), [("python", 0), ("deepspeed", 29796)])
def test_a_mistake_in_the_users_code(launcher, port, tmp_path, child_environment):
    swap = tmp_path / "swap"
    process: Any = start(command(launcher, port, swap, "raise"), child_environment)
    try:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 1
        assert "ValueError: a mistake in the user's code" in output
        assert_nothing_is_left(process.pid, swap)
    finally:
        end(process)


def test_a_run_that_ends_without_destroy(tmp_path, child_environment):
    """No script calls `engine.destroy()`."""
    swap = tmp_path / "swap"
    process: Any = start(command("python", 0, swap, ""), child_environment)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0 and "LOSSES" in output, output[-3000:]
    assert_nothing_is_left(process.pid, swap)
