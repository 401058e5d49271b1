"""A model's structure without its weights: same modules and code, fake parameters of full shape, no hooks.

Tracing must not touch the model that trains: not its weights (which ZeRO-3 may have partitioned to size 0), not
DeepSpeed's hooks (they would gather), not its attributes. So a shadow is built: for each module an object of the
same class, with a copy of its attributes in which every module, parameter, buffer and method bound to a module is
the shadow's own.

Note [Instance forwards]
A `forward` set on the instance as a bound method (a fused kernel's patch) is carried over. One set as a closure
still points at the real module, so the class's own forward is used instead; our own activation wrappers are of
that kind.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lazytrain_ds.workload.signature import parameter_shape

_HOOK_DICTS = tuple(name for name, value in nn.Module().__dict__.items() if isinstance(value, OrderedDict | dict)
                    and "hook" in name)  # fmt: skip


def make_shadow(
    model: nn.Module, mode: FakeTensorMode, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> nn.Module:
    """The shadow of `model` with fake tensors of `mode` on `device`.

    `dtype`: what floating-point parameters and buffers become (None: as they are).
    """
    return _Builder(mode, dtype, device).module(model)


class _Builder:
    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None, device: str) -> None:
        self.mode, self.dtype, self.device = mode, dtype, device
        self.done: dict[int, Any] = {}
        # Keeps ids in `done` from being reused while we build.
        self.alive: list[Any] = []

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) in self.done:
            return self.done[id(module)]
        shadow = module.__class__.__new__(module.__class__)
        self._remember(module, shadow)
        special = {"_parameters", "_buffers", "_modules", "forward", *_HOOK_DICTS}
        state = {}
        shadow.__dict__.update(
            _parameters={name: self.tensor(value) for name, value in dict.items(module._parameters)},
            _buffers={name: self.tensor(value) for name, value in dict.items(module._buffers)},
            _modules={
                name: None if child is None else self.module(child) for name, child in dict.items(module._modules)
            },
        )
        for name, value in module.__dict__.items():
            if name in _HOOK_DICTS:
                state[name] = OrderedDict()
            elif name not in special:
                state[name] = self.value(value)
        shadow.__dict__.update(state)
        forward = module.__dict__.get("forward")
        if isinstance(forward, types.MethodType) and isinstance(forward.__self__, nn.Module):
            shadow.__dict__["forward"] = self.value(forward)
        return shadow

    def tensor(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) in self.done:
            return self.done[id(tensor)]
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        with self.mode:
            fake = torch.empty(parameter_shape(tensor), dtype=dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return self._remember(tensor, fake)

    def value(self, value: Any, depth: int = 0) -> Any:
        """A copy of an attribute that shares nothing which a forward could write to, as far as plain containers go."""
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self.module(value.__self__))
        if depth > 4:
            return value
        kind = type(value)
        if kind in (list, tuple, set):
            return kind(self.value(item, depth + 1) for item in value)
        if kind in (dict, OrderedDict):
            return kind((key, self.value(item, depth + 1)) for key, item in value.items())
        return value

    def _remember(self, original: Any, copy: Any) -> Any:
        self.done[id(original)] = copy
        self.alive.append(original)
        return copy
