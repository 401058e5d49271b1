"""Optimizer updates of sub-groups: by our fused kernel where the optimizer has one, by the user's optimizer else.

An update reads the gradient in its accumulation dtype, multiplies it by `gradient_scale` (1 / (loss scale * clip)),
steps the fp32 master and writes the low-precision copy. `hyper` are the parameter group's values captured at `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazytrain_ds.runtime.optimizer_states import Span, States

__all__ = ["FusedUpdater", "TorchUpdater", "Update", "Updater", "make_updater"]


@dataclass(frozen=True)
class Update:
    """One sub-group's update. `spans`: (offset, numel) of the parameters that got a gradient, None for all."""

    sub_group: int
    gradient: torch.Tensor
    hyper: dict[str, Any]
    gradient_scale: float
    spans: tuple[tuple[int, int], ...] | None = None


class Updater:
    """Makes states and applies updates to them.

    `convert_state(saved, mine)` turns a saved state of another format into that of `mine`; None: taken as it is.
    """

    convert_state: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None

    def new_state(self, master: torch.Tensor, spans: Sequence[Span]) -> dict[str, Any]:
        """State of a sub-group before its first step, allocated, so that memory does not grow at step one."""
        return {}

    def apply(self, update: Update, states: States, low_precision: torch.Tensor) -> None:
        """Run one update in the calling thread; the new weights also go to `low_precision`."""
        raise NotImplementedError


class FusedUpdater(Updater):
    """Our optimizers (`FusedAdamW`, `HybridAdamW8bit`): one pass over master, moments, gradient and copy, GIL free."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.convert_state = getattr(optimizer, "convert_state", None)

    def new_state(self, master: torch.Tensor, spans: Sequence[Span]) -> dict[str, Any]:
        return self.optimizer.new_state(master, spans)

    def apply(self, update: Update, states: States, low_precision: torch.Tensor) -> None:
        self.optimizer.update(
            states.master.detach(),
            states.state,
            update.gradient,
            update.hyper,
            grad_scale=update.gradient_scale,
            out=low_precision,
            spans=update.spans,
        )


class TorchUpdater(Updater):
    """Any torch optimizer, on a shadow of it, so that schedulers and wrappers on the instance do not interfere."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not copy.copy: Optimizer.__getstate__ drops attributes; LR schedulers patch `step` on the instance.
        self.shadow = object.__new__(type(optimizer))
        self.shadow.__dict__.update(optimizer.__dict__)
        self.shadow.__dict__.pop("step", None)
        self.optimizer = optimizer

    def apply(self, update: Update, states: States, low_precision: torch.Tensor) -> None:
        master = states.master
        gradient = update.gradient.to(torch.float32)
        if gradient is update.gradient:
            gradient = gradient.clone()
        gradient.mul_(update.gradient_scale)
        before = None
        if update.spans is not None:
            # A torch optimizer skips whole parameters only: step the sub-group, then put the others back.
            before = (master.detach().clone(), {name: _copy(value) for name, value in states.state.items()})
        self.shadow.state = self.optimizer.state
        self.shadow.param_groups = [{**update.hyper, "params": [master]}]
        master.grad = gradient
        try:
            type(self.shadow).step(self.shadow)
        finally:
            master.grad = None
            self.shadow.param_groups = []
        if before is not None:
            self._put_back(update, master, before)
        if low_precision.data_ptr() != master.data_ptr():
            low_precision.copy_(master.detach())

    def _put_back(self, update: Update, master: torch.Tensor, before: tuple[torch.Tensor, dict[str, Any]]) -> None:
        untouched = torch.ones(master.numel(), dtype=torch.bool)
        for offset, numel in update.spans:
            untouched[offset : offset + numel] = False
        master.detach()[untouched] = before[0][untouched]
        for name, value in self.optimizer.state[master].items():
            if torch.is_tensor(value) and value.shape == master.shape:
                old = before[1].get(name)
                value[untouched] = 0 if old is None else old[untouched]


def _copy(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def make_updater(optimizer: torch.optim.Optimizer) -> Updater:
    """The fastest updater that gives this optimizer's numerics."""
    if hasattr(optimizer, "new_state") and hasattr(optimizer, "update"):
        return FusedUpdater(optimizer)
    return TorchUpdater(optimizer)
