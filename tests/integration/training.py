"""Engines in this process, made as users make them, and everything a step leaves behind. Not a test module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lazytrain_ds  # noqa: F401 - hooks DeepSpeed
from tests import models
from tests.runtime.zero3 import full_parameters, one_process_group

# Long enough for a boundary of 64 KiB in bf16 at the models' width of 64: smaller storages are never offloaded.
LENGTH = 256
RULES = ("keep_all", "checkpoint_all", "checkpoint_all_host", "megatrain", "zero3_offload")
# A large epsilon: some gradients (the bias of attention's keys) are zero but for rounding, and Adam with its default
# would turn their noise, which differs between stock and us, into steps of full size.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1}}

Calls = Sequence[dict[str, Any]]


def config(block: dict[str, Any] | None, dtype: str = "fp32", accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    """A user's config; without a block (None) the stock one that it is compared with."""
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": ADAMW,
    }
    if dtype == "bf16":
        result["bf16"] = {"enabled": True}
    result.update(changes)
    if block is not None:
        result["lazytrain"] = {"sequence_length": LENGTH, **block}
    return result


def tokens(count: int, vocabulary: int = 211, length: int = LENGTH) -> list[dict[str, Any]]:
    """Keyword arguments of `count` micro-steps of a language model."""
    return [
        dict.fromkeys(("input_ids", "labels"), models.batch(step, vocabulary=vocabulary, length=length))
        for step in range(count)
    ]


def gpt(**changes: Any) -> nn.Module:
    """The example-like GPT: five blocks, dropout, biases."""
    return models.GPT(**{"length": LENGTH, **changes})


def llama(**changes: Any) -> nn.Module:
    """A Hugging Face Llama."""
    return models.llama(**{"length": LENGTH, **changes})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "gpt-tied": lambda: gpt(tied=True),
    "llama": llama,
    "llama-tied": lambda: llama(tied=True),
}


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned."""
    return output if torch.is_tensor(output) else output.loss


@dataclass
class Result:
    """Losses of every micro-step, gradients of every optimizer step (flat, per sub-group), weights at the end."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def assert_identical(self, other: Result) -> None:
        """Bit for bit."""
        assert len(self.losses) == len(other.losses)
        for step, (mine, theirs) in enumerate(zip(self.losses, other.losses, strict=True)):
            assert torch.equal(mine, theirs), f"loss of micro-step {step}: {mine} {theirs}"
        for step, (mine, theirs) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            for group, (one, two) in enumerate(zip(mine, theirs, strict=True)):
                assert torch.equal(one, two), f"gradient of step {step}, sub-group {group}"
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            assert torch.equal(weight, other.weights[name]), f"weight {name}"

    def assert_close(self, other: Result, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Losses and weights within a tolerance (other sums of the norm, other order of additions)."""
        torch.testing.assert_close(torch.stack(self.losses), torch.stack(other.losses), rtol=rtol, atol=0.0)
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            torch.testing.assert_close(weight, other.weights[name], rtol=rtol, atol=atol, msg=lambda m, n=name: n + m)


@contextlib.contextmanager
def engine_of(model: nn.Module, settings: dict[str, Any], **arguments: Any) -> Iterator[Any]:
    """`deepspeed.initialize`, and `destroy` afterwards; with the block, nothing may be left on the device then."""
    one_process_group()
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=settings, **arguments)
    try:
        yield engine
    finally:
        book = getattr(engine, "_lt_book", None)
        engine.destroy()
    if book is not None:
        assert book.device.ledger.live_bytes == 0, book.device.ledger.by_purpose()


def train(engine: Any, calls: Calls, between: Callable[[Any, int], None] | None = None) -> Result:
    """A user's loop. `between(engine, micro_step)` runs after each forward, before its backward."""
    result = Result()
    for number, call in enumerate(calls):
        loss = loss_of(engine(**call))
        if between is not None:
            between(engine, number)
        engine.backward(loss)
        if hasattr(engine.optimizer, "_lt_group_gradients") and engine.is_gradient_accumulation_boundary():
            engine.optimizer._lt_gradients.settle()
            result.gradients.append([gradient.clone() for gradient in engine.optimizer._lt_group_gradients])
        engine.step()
        result.losses.append(loss.detach().clone())
        del loss
    result.weights = full_parameters(engine)
    return result


def run(
    make: Callable[[], nn.Module],
    settings: dict[str, Any],
    calls: Calls,
    between: Callable[[Any, int], None] | None = None,
    check: Callable[[Any], None] | None = None,
) -> Result:
    """A whole run from fixed seeds. `check(engine)` looks at the engine at its end."""
    torch.manual_seed(0)
    model = make()
    with engine_of(model, settings) as engine:
        torch.manual_seed(7)
        result = train(engine, calls, between)
        if check is not None:
            check(engine)
    return result


def run_plain(make: Callable[[], nn.Module], settings: dict[str, Any], calls: Calls) -> Result:
    """The same run in plain PyTorch: fp32, AdamW of the config, clipping by the global norm."""
    torch.manual_seed(0)
    model = make()
    model.train()
    parameters = settings["optimizer"]["params"]
    optimizer = torch.optim.AdamW(model.parameters(), **{**parameters, "betas": tuple(parameters["betas"])})
    rounds = settings["gradient_accumulation_steps"]
    torch.manual_seed(7)
    result = Result()
    for number, call in enumerate(calls):
        loss = loss_of(model(**call))
        (loss / rounds).backward()
        result.losses.append(loss.detach().clone())
        if number % rounds == rounds - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["gradient_clipping"])
            optimizer.step()
            optimizer.zero_grad()
    result.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return result


def rule_block(name: str) -> dict[str, Any]:
    """The block that asks for one planner."""
    return {"planner": {"kind": name}}


def plan_block(plan: Any, directory: Path, **keys: Any) -> dict[str, Any]:
    """The block that executes `plan` from a file."""
    path = directory / "plan.json"
    path.write_text(plan.to_json())
    return {"plan_file": str(path), **keys}
