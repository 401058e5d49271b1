"""Autograd functions outside the blocks that gather a weight themselves, in forward and again in backward."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.autograd.function import Function, FunctionCtx
from torch.nn import functional

from tests.integration.training import config, engine_of, rule_block, run, run_plain, tokens
from tests.models import GPT


def gathered(weight: nn.Parameter) -> Any:
    """As TRL's fused head does: nothing to do where ZeRO-3 is off or the weight is there."""
    missing = hasattr(weight, "ds_id") and weight.ds_status != ZeroParamStatus.AVAILABLE
    return deepspeed.zero.GatheredParameters([weight] if missing else [])


class FusedHead(Function):
    """Loss of a head whose module is never called. Saves the weight or a view of it, and computes again in backward."""

    view = False

    @classmethod
    def loss(cls, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(torch.matmul(x, weight.t()).flatten(0, 1), targets.flatten())

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight[:] if FusedHead.view else weight, targets)
        return FusedHead.loss(x, weight, targets)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        x, weight, targets = ctx.saved_tensors
        if not FusedHead.view:
            assert isinstance(weight, nn.Parameter)
            context = gathered(weight)
        else:
            context = deepspeed.zero.GatheredParameters([])
        with context, torch.enable_grad():
            inputs = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            gradients = torch.autograd.grad(FusedHead.loss(*inputs, targets), inputs, upstream)
        return *gradients, None


class WithFusedHead(GPT):
    def __init__(self) -> None:
        super().__init__(length=256, dropout=0.0)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        with gathered(self.head.weight):
            return FusedHead.apply(x, self.head.weight, labels)


@pytest.mark.parametrize("view", [False, True], ids=["saves the parameter", "saves a view of it"])
@pytest.mark.parametrize("rule", ["keep_all", "megatrain"])
def test_a_fused_head_trains_as_in_plain_pytorch(rule, view, monkeypatch):
    monkeypatch.setattr(FusedHead, "view", view)
    emulate = {"memory": "64MB", "h2d": "4GB/s", "d2h": "4GB/s", "debug": True}  # slots given back become NaN
    settings = config({**rule_block(rule), "device": {"emulate": emulate}})
    run(WithFusedHead, settings, tokens(3)).assert_close(run_plain(WithFusedHead, settings, tokens(3)))


def test_torch_is_as_before_without_an_engine():
    before = Function.__dict__["apply"], FunctionCtx.save_for_backward
    with engine_of(WithFusedHead(), config({})):
        assert Function.__dict__["apply"] is not before[0]
    assert (Function.__dict__["apply"], FunctionCtx.save_for_backward) == before
