"""Two ranks on the CPU under the `deepspeed` launcher: the same losses as stock ZeRO-3 under two ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.training import config

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).with_name("script_train.py")
STEPS = 4


def launch(
    port: int, settings: dict[str, Any], environment: dict[str, str], processes: int = 2
) -> tuple[list[float], str]:
    """(summed losses of the ranks, everything printed)."""
    options = json.dumps({"config": settings, "steps": STEPS, "trouble": ""})
    command = ["deepspeed", "--num_gpus", str(processes), "--master_port", str(port), str(SCRIPT), options]
    environment = {**environment, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(processes)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOSSES "))
    return [float.fromhex(value) for value in json.loads(line.removeprefix("LOSSES "))], done.stdout


def test_two_ranks_train_like_stock(child_environment):
    stock, said = launch(29791, config(None), child_environment)
    assert "[lazytrain]" not in said
    for port, rule in ((29792, "keep_all"), (29793, "megatrain")):
        block = {"planner": {"kind": rule}, "sequence_length": 128}
        losses, said = launch(port, config(block), child_environment)
        assert losses == pytest.approx(stock, rel=1e-6)
        assert said.count("plan (activations) by " + rule) == 1, "rank 0 speaks, and only it"
