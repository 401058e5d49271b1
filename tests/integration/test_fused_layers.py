"""Layers that do their own thing: torch.func inside a forward (as Liger's losses), packed weights (as QLoRA's)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lazytrain_ds.errors import UnsupportedError
from tests.integration.training import config, engine_of, gpt, rule_block, run, run_plain, tokens
from tests.models import GPT


class LossWithItsGradient(torch.autograd.Function):
    """The head's loss, whose gradients are taken inside the forward by torch.func."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        def loss_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(functional.linear(x, weight).flatten(0, 1), targets.flatten())

        gradients, loss = torch.func.grad_and_value(loss_of, argnums=(0, 1))(x, weight)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        by_x, by_weight = ctx.saved_tensors
        return upstream * by_x, upstream * by_weight, None


class Head(nn.Linear):
    """A head that is called with the targets and gives the loss."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return LossWithItsGradient.apply(x, self.weight, targets)


class FusedLoss(GPT):
    def __init__(self) -> None:
        super().__init__(length=256, dropout=0.0)
        self.head = Head(64, 211, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), labels)


@pytest.mark.parametrize("rule", ["keep_all", "megatrain"])
def test_u56_torch_func_inside_a_forward(rule):
    settings = config(rule_block(rule))
    run(FusedLoss, settings, tokens(3)).assert_close(run_plain(FusedLoss, settings, tokens(3)))


def test_u55_packed_weights_are_refused_by_name():
    model = gpt()
    model.blocks[1].packed = nn.Parameter(torch.zeros(64, dtype=torch.uint8), requires_grad=False)
    with (
        pytest.raises(UnsupportedError, match=r"parameter blocks\.1\.packed is uint8: packed weights"),
        engine_of(model, config({})),
    ):
        pass
