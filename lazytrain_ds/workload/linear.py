"""`F.linear` as it behaves under ZeRO-3, so that a trace sees what the real run keeps.

DeepSpeed's memory-efficient linear (deepspeed/runtime/zero/linear.py) is an autograd Function that saves the input
as it came, the weight and the bias themselves; our runtime makes it add the bias out of place. The stock one may
save a contiguous copy of the input instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F


class _ZeroLinear(torch.autograd.Function):
    @staticmethod
    def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if input.dim() == 2 and bias is not None:
            return torch.addmm(bias, input, weight.t())
        output = input.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, bias = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad_input = grad.matmul(weight) if needs_input else None
        grad_weight = flat.t().matmul(input.reshape(-1, input.shape[-1])) if needs_weight else None
        grad_bias = flat.sum(0) if bias is not None and needs_bias else None
        return grad_input, grad_weight, grad_bias


def _zero_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _ZeroLinear.apply(input, weight, bias)


@contextmanager
def zero3_linear(enabled: bool = True) -> Iterator[None]:
    """While active, `torch.nn.functional.linear` is ZeRO-3's; whatever was there before comes back at the end."""
    if not enabled:
        yield
        return
    before = F.linear
    F.linear = _zero_linear
    try:
        yield
    finally:
        F.linear = before
