"""Optimizers that the script passes, or that DeepSpeed builds by the config: they run, and the run says which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.training import config, engine_of, gpt, rule_block, tokens, train


def deepspeed_cpu_adam(model: nn.Module) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(model.parameters(), lr=1e-3, eps=1e-5)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-3)


ELEMENTWISE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch's SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "torch's AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5),
    "deepspeed's DeepSpeedCPUAdam": deepspeed_cpu_adam,
}


def settings(block: dict[str, Any] | None, named: bool = False) -> dict[str, Any]:
    result = config(block, zero_allow_untested_optimizer=True)
    if not named:
        del result["optimizer"]
    return result


def trained(make: Any, block: dict[str, Any] | None, named: bool = False) -> tuple[Any, type]:
    torch.manual_seed(0)
    model = gpt()
    optimizer = make(model) if make is not None else None
    with engine_of(model, settings(block, named), optimizer=optimizer) as engine:
        torch.manual_seed(7)
        return train(engine, tokens(3)), type(engine.optimizer.optimizer)


def said(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith("[lazytrain] optimizer: ")]
    return line


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_client_optimizer_runs_as_without_the_block(name, capsys):
    stock, kind = trained(ELEMENTWISE[name], None)
    capsys.readouterr()
    ours, same_kind = trained(ELEMENTWISE[name], rule_block("keep_all"))
    line = said(capsys.readouterr().out)
    assert issubclass(same_kind, kind)
    assert f"optimizer: {name}, as the script passed it" in line and "states stay in host memory" in line
    ours.assert_close(stock)
    trained(ELEMENTWISE[name], rule_block("megatrain"))[0].assert_identical(ours)


def test_one_that_looks_at_whole_tensors_is_the_same_under_every_plan():
    """Adafactor sees a block's parameters as one vector, so it differs from stock, whose groups are others."""
    results = [trained(adafactor, rule_block(rule))[0] for rule in ("keep_all", "megatrain")]
    results[1].assert_identical(results[0])
    assert all(torch.isfinite(loss) for loss in results[0].losses)
    assert results[0].losses[-1] != results[0].losses[0]


def test_passed_and_named_the_passed_one_runs_as_in_deepspeed(capsys):
    stock, kind = trained(ELEMENTWISE["torch's SGD"], None, named=True)
    capsys.readouterr()
    ours, same_kind = trained(ELEMENTWISE["torch's SGD"], rule_block("keep_all"), named=True)
    assert kind is torch.optim.SGD and issubclass(same_kind, kind)
    assert "torch's SGD, as the script passed it" in said(capsys.readouterr().out)
    ours.assert_close(stock)


def test_the_configs_adamw_is_ours_and_another_type_is_deepspeeds(capsys):
    torch.manual_seed(0)
    with engine_of(gpt(), config(rule_block("keep_all"))):
        line = said(capsys.readouterr().out)
        assert "optimizer: LazyTrain's FusedAdamW, from the config's \"optimizer\"" in line
    adagrad = {"type": "Adagrad", "params": {"lr": 1e-2}}
    with engine_of(gpt(), config(rule_block("keep_all"), optimizer=adagrad)) as engine:
        kind = type(engine.optimizer.optimizer)
        train(engine, tokens(2))
    line = said(capsys.readouterr().out)
    assert f'{kind.__name__}, from the config\'s "optimizer"' in line and "states stay in host memory" in line
