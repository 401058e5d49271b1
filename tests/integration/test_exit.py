"""A script that simply ends, with updates under way and no `engine.destroy()`, exits with status 0."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

SCRIPT = """
import sys
import deepspeed, torch
from torch import nn
from tests import models

model = models.GPT(width=256, length=32, dropout=0.0)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
    "lazytrain": {"sequence_length": 32},
}
engine, *_ = deepspeed.initialize(model=model, config=config)
tokens = models.batch(0)
engine.backward(engine(input_ids=tokens, labels=tokens))
engine.step()
assert engine.lazytrain_plan.optimizer_step == "hidden"
print("LAST LINE", flush=True)
"""


def test_a_script_that_ends_with_updates_under_way_exits_with_status_0(child_environment):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=child_environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert "LAST LINE" in done.stdout, done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
