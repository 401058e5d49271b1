"""Optimizer updates of sub-groups: by our fused kernel where the optimizer has one, by the user's optimizer else.

An update reads the gradient in its accumulation dtype, multiplies it by `gradient_scale` (1 / (loss scale * clip)),
steps the fp32 master and writes the low-precision copy. `hyper` are the parameter group's values captured at `step()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Update", "Updater", "make_updater"]


@dataclass(frozen=True)
class Update:
    """One sub-group's update. `spans`: (offset, numel) of the parameters that got a gradient, None for all."""

    sub_group: int
    master: torch.Tensor
    gradient: torch.Tensor
    low_precision: torch.Tensor
    hyper: dict[str, Any]
    gradient_scale: float
    spans: tuple[tuple[int, int], ...] | None = None


class Updater:
    """Applies updates; `state` is the inner optimizer's, keyed by the master tensor."""

    def prepare(self, master: torch.Tensor, spans: Sequence[tuple[int, int, str]]) -> None:
        """Allocate the states of a sub-group before training starts, so that memory does not grow at step one."""

    def apply(self, update: Update) -> None:
        """Run one update in the calling thread."""
        raise NotImplementedError


class TorchUpdater(Updater):
    """Any torch optimizer, on a shadow of it, so that schedulers and wrappers on the instance do not interfere."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not copy.copy: Optimizer.__getstate__ drops attributes; LR schedulers patch `step` on the instance.
        self.shadow = object.__new__(type(optimizer))
        self.shadow.__dict__.update(optimizer.__dict__)
        self.shadow.__dict__.pop("step", None)
        self.optimizer = optimizer

    def apply(self, update: Update) -> None:
        gradient = update.gradient.to(torch.float32)
        if gradient is update.gradient:
            gradient = gradient.clone()
        gradient.mul_(update.gradient_scale)
        if update.spans is not None:
            keep = torch.zeros(gradient.numel(), dtype=torch.bool)
            for offset, numel in update.spans:
                keep[offset : offset + numel] = True
            gradient.masked_fill_(~keep, 0.0)
        self.shadow.state = self.optimizer.state
        self.shadow.param_groups = [{**update.hyper, "params": [update.master]}]
        update.master.grad = gradient
        try:
            type(self.shadow).step(self.shadow)
        finally:
            update.master.grad = None
            self.shadow.param_groups = []
        if update.low_precision.data_ptr() != update.master.data_ptr():
            update.low_precision.copy_(update.master.detach())


def make_updater(optimizer: torch.optim.Optimizer) -> Updater:
    """The fastest updater that gives this optimizer's numerics."""
    return TorchUpdater(optimizer)
