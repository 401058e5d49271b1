"""A block's parameters through DeepSpeed's own hooks: with more than one rank it gathers and partitions them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from lazytrain_ds.errors import PlanError
from lazytrain_ds.runtime.setup import Setup

__all__ = ["HookAccess"]


class HookAccess:
    """Parameters through DeepSpeed's fetch and release of modules."""

    def __init__(self, optimizer: Any, setup: Setup) -> None:
        self._offload = optimizer.parameter_offload
        self._modules = setup.block_modules

    @contextmanager
    def hold(self, block: int) -> Any:
        from deepspeed.runtime.zero import parameter_offload

        module = self._modules.get(block)
        if module is None:
            raise PlanError(f"block {block} is a group of modules and cannot be re-run")
        self._offload.pre_sub_module_forward_function(module)
        try:
            yield
        finally:
            self._offload.post_sub_module_forward_function(module)
            parameter_offload.FWD_MODULE_STACK.pop()  # the pre function pushed; only the real hook pops

    def backward_begins(self, block: int) -> None:
        return None  # DeepSpeed's own pre-backward hooks gather

    def view_of(self, tensor: torch.Tensor) -> None:
        return None
