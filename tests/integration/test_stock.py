"""A config without the block is stock DeepSpeed, bit for bit, whatever else ran or runs in the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.training import Result, config, engine_of, gpt, llama, loss_of, rule_block, run, tokens
from tests.runtime.zero3 import full_parameters, one_process_group

STEPS = 4


def stock_engine_is_stock(engine: Any) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    assert type(engine) is DeepSpeedEngine
    assert type(engine.optimizer) is DeepSpeedZeroOptimizer_Stage3
    assert type(engine.optimizer.parameter_offload.param_coordinator) is PartitionedParameterCoordinator
    assert not any("forward" in module.__dict__ for module in engine.module.modules())


# What a process does in which nobody has heard of LazyTrain.
UNTOUCHED = """
import json, sys
import torch, deepspeed
assert "lazytrain_ds" not in sys.modules or not hasattr(deepspeed.initialize, "__wrapped__")
sys.path.insert(0, {root!r})
from tests import models
torch.manual_seed(0)
model = models.GPT(length=256) if {name!r} == "gpt" else models.llama(length=256)
engine, *_ = deepspeed.initialize(model=model, config={config!r})
torch.manual_seed(7)
losses = []
for step in range({steps}):
    tokens = models.batch(step, length=256)
    output = engine(input_ids=tokens, labels=tokens)
    loss = output if torch.is_tensor(output) else output.loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
print("LOSSES", json.dumps([loss.hex() for loss in losses]))
"""


def untouched_losses(name: str, settings: dict[str, Any], repository: Path, environment: dict[str, str]) -> list[float]:
    """Losses in a process of its own, with the hooks off."""
    code = UNTOUCHED.format(root=str(repository), name=name, config=settings, steps=STEPS)
    environment = {**environment, "LAZYTRAIN_AUTOLOAD": "0", "MASTER_PORT": "29790", "MASTER_ADDR": "127.0.0.1"}
    environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOSSES "))
    return [float.fromhex(value) for value in json.loads(line.removeprefix("LOSSES "))]


def make(name: str) -> Any:
    return gpt if name == "gpt" else llama


@pytest.mark.parametrize(("name", "dtype"), [("gpt", "fp32"), ("llama", "bf16")])
def test_stock_after_an_engine_with_the_block_is_stock_bit_for_bit(name, dtype, repository, child_environment):
    settings = config(None, dtype)
    untouched = untouched_losses(name, settings, repository, child_environment)
    before = run(make(name), settings, tokens(STEPS), check=stock_engine_is_stock)
    planned = run(make(name), config(rule_block("megatrain"), dtype), tokens(STEPS))
    after = run(make(name), settings, tokens(STEPS), check=stock_engine_is_stock)
    assert [loss.item() for loss in before.losses] == untouched
    after.assert_identical(before)
    again = run(make(name), config(rule_block("megatrain"), dtype), tokens(STEPS))
    again.assert_identical(planned)


@pytest.mark.parametrize("first", ["stock", "planned"])
def test_two_engines_in_one_process_do_not_notice_each_other(first):
    """Made in both orders, then stepped in turn; each as if it were alone."""
    settings = {"stock": config(None), "planned": config(rule_block("megatrain"))}
    alone = {name: run(gpt, each, tokens(STEPS)) for name, each in settings.items()}
    one_process_group()
    import deepspeed

    engines, states, results = {}, {}, {}
    for name in sorted(settings, key=lambda name: name != first):
        torch.manual_seed(0)
        engines[name], *_ = deepspeed.initialize(model=gpt(), config=settings[name])
        torch.manual_seed(7)
        states[name], results[name] = torch.get_rng_state(), Result()
    try:
        stock_engine_is_stock(engines["stock"])
        for call in tokens(STEPS):
            losses = {}
            for name, engine in engines.items():  # both forwards, then both backwards
                torch.set_rng_state(states[name])
                losses[name] = loss_of(engine(**call))
                states[name] = torch.get_rng_state()
            for name, engine in engines.items():
                torch.set_rng_state(states[name])
                engine.backward(losses[name])
                engine.step()
                states[name] = torch.get_rng_state()
                results[name].losses.append(losses[name].detach().clone())
        for name, engine in engines.items():
            results[name].weights = full_parameters(engine)
            results[name].gradients = alone[name].gradients
            results[name].assert_identical(alone[name])
    finally:
        for engine in engines.values():
            engine.destroy()


@pytest.mark.slow  # two minutes on a loaded machine
def test_two_planned_engines_share_nothing(tmp_path):
    """Both with activations on NVMe under one path: directories of their own, gone with their engines."""
    swap = tmp_path / "swap"
    block = {"activations": "nvme", "nvme_path": str(swap)}
    one_process_group()
    import deepspeed

    alone = run(gpt, config(block), tokens(2))
    engines = []
    for _ in range(2):
        torch.manual_seed(0)
        engines.append(deepspeed.initialize(model=gpt(), config=config(block))[0])
    for call_number, call in enumerate(tokens(2)):
        for engine in engines:
            torch.manual_seed(100 + call_number)
            engine.backward(loss_of(engine(**call)))
            engine.step()
    directories = {engine._lt_book.nvme_store.directory for engine in engines}
    assert len(directories) == 2 and all(directory.is_dir() for directory in directories)
    first, second = map(full_parameters, engines)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    engines[0].destroy()
    assert sum(directory.exists() for directory in directories) == 1
    engines[1].destroy()
    assert not any(directory.exists() for directory in directories)
    assert all(torch.isfinite(loss) for loss in alone.losses)


def test_the_model_is_as_before_after_destroy():
    torch.manual_seed(0)
    model = gpt()
    forwards = [dict(module.__dict__).get("forward") for module in model.modules()]
    with engine_of(model, config(rule_block("checkpoint_all"))) as engine:
        engine.backward(loss_of(engine(**tokens(1)[0])))
        engine.step()
        assert any("forward" in module.__dict__ for module in model.modules())
    assert [dict(module.__dict__).get("forward") for module in model.modules()] == forwards
    from torch.utils import checkpoint as upstream

    assert upstream._checkpoint_without_reentrant_generator.__module__ == "torch.utils.checkpoint"
    assert upstream.CheckpointFunction.__module__ == "torch.utils.checkpoint"
