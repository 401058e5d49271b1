"""Engines, as users make them, of one small model under plans that place everything differently. Not a test module."""

from __future__ import annotations

import functools
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.integration.training import config, engine_of, loss_of
from tests.runtime.test_nvme_tiers import Wide
from tests.runtime.test_tiers import covering_plan
from tests.runtime.zero3 import full_parameters

WIDTH = 131
OPTIMIZERS = {
    "fp32": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95]}},
    "8bit": {"type": "HybridAdamW8bit", "params": {"lr": 1e-2, "betas": [0.9, 0.95]}},
    "8bit saved as fp32": {
        "type": "HybridAdamW8bit",
        "params": {"lr": 1e-2, "betas": [0.9, 0.95], "state_dict_precision": "fp32"},
    },
}
PLANS = ("host", "nvme", "device", "mixed")


class Partly(Wide):
    """With frozen parameters beside trained ones of the same blocks, a frozen block, and a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("offset", torch.full((WIDTH,), 0.25))
        for parameter in (self.entry.bias, self.blocks[0][0].weight, *self.blocks[2].parameters()):
            parameter.requires_grad_(False)


def wide() -> Wide:
    """Everything trains."""
    return Wide(WIDTH)


def settings(block: dict[str, Any] | None, dtype: str = "fp32", optimizer: str = "fp32") -> dict[str, Any]:
    """A user's config with a warm-up schedule and two micro-steps per step."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}}
    result = config(block, dtype, 2, optimizer=OPTIMIZERS[optimizer], scheduler=schedule, gradient_clipping=0.05)
    result["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return result


def block_of(plan: str, directory: Path, dtype: str, optimizer: str, make: Any = wide) -> dict[str, Any]:
    """The lazytrain block of a plan: all in one tier, or rows of the covering plan over the blocks."""
    base = {"sequence_length": 64, "nvme_path": str(directory / "swap"), "planner": {"kind": "keep_all"}}
    if plan == "mixed":
        path = directory / "plan.json"
        path.write_text(covering_plan(0, "hidden")(host_plan(make, dtype, optimizer)).to_json())
        return {**base, "plan_file": str(path)}
    return {**base, "parameters": plan, "optimizer_states": plan}


@functools.cache
def host_plan(make: Any, dtype: str, optimizer: str) -> Any:
    """The plan of the all-host engine, to draw others from."""
    with tempfile.TemporaryDirectory() as directory, engine_under("host", Path(directory), dtype, optimizer, make) as e:
        return e.lazytrain_plan


@contextmanager
def engine_under(plan: str, directory: Path, dtype: str = "fp32", optimizer: str = "fp32", make: Any = wide) -> Any:
    """An engine of a fresh model under one of PLANS; `directory` for swap and plan files."""
    directory.mkdir(exist_ok=True)
    block = block_of(plan, directory, dtype, optimizer, make)
    torch.manual_seed(0)
    with engine_of(make(), settings(block, dtype, optimizer)) as engine:
        yield engine


def batch(number: int, dtype: str) -> torch.Tensor:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(100 + number))
    return x.to(torch.bfloat16) if dtype == "bf16" else x


def steps(engine: Any, first: int, last: int, dtype: str = "fp32") -> list[float]:
    """Optimizer steps `first` to `last` - 1: losses of their micro-steps and their norms."""
    seen = []
    for number in range(2 * first, 2 * last):
        loss = loss_of(engine(batch(number, dtype)))
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    return [*seen, float(engine.get_global_grad_norm())]


def everything(engine: Any) -> dict[str, Any]:
    """Weights, masters, moments, rates and counters."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {f"weight {name}": value for name, value in full_parameters(engine).items()}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"master {name}"] = safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{key} {name}"] = safe_get_full_optimizer_state(parameter, key)
    found["rates"] = engine.get_lr()
    found["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    return found


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if torch.is_tensor(value):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name
