"""U29: an interrupted kernel build left its lock; the next run says within seconds which file to delete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.integration.training import config

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).with_name("script_train.py")


def test_a_run_that_waits_for_a_dead_build_names_the_file_to_delete(tmp_path, child_environment):
    lock = tmp_path / "deepspeed_shm_comm" / "lock"  # the operator that every DeepSpeed run on a CPU loads first
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    options = json.dumps({"config": config({"sequence_length": 128}), "steps": 1, "trouble": ""})
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), options],
        env={**child_environment, "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    patience = threading.Timer(180, process.kill)
    patience.start()
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if "rm " in line:
                break
    finally:
        patience.cancel()
        process.kill()
        process.wait()
    assert f"{lock} is there since 60 minutes" in said[-1] and said[-1].endswith(f": rm {lock}\n"), "".join(said[-20:])
    assert "10 s so far" in said[-1], "at the first heartbeat"
