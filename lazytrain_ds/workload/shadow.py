"""A model's structure without its weights: same modules and code, other parameters of full shape, no hooks.

Tracing must not touch the model that trains: not its weights (which ZeRO-3 may have partitioned to size 0), not
DeepSpeed's hooks (they would gather), not its attributes. So a shadow is built: for each module an object of the
same class, with a copy of its attributes in which every module, parameter, buffer and method bound to a module is
the shadow's own.

Note [Instance forwards]
A `forward` set on the instance as a bound method (a fused kernel's patch) is carried over. One set as a closure
still points at the real module, so the class's own forward is used instead; our own activation wrappers are of
that kind.

Note [Closures over the model]
A patch often remembers what it replaced (`original = model.forward`, TRL's fused head) and calls it. Functions are
therefore copied with the modules, and the methods bound to them, in their closures replaced by the shadow's: the
real model's forward would fetch real weights in the middle of a trace.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lazytrain_ds.workload.signature import parameter_shape

_HOOK_DICTS = tuple(name for name, value in nn.Module().__dict__.items() if isinstance(value, OrderedDict | dict)
                    and "hook" in name)  # fmt: skip


class FakeTensors:
    """Makes tensors of `mode` that pretend to be on `device`."""

    def __init__(self, mode: FakeTensorMode, device: str = "cpu") -> None:
        self.mode, self.device = mode, device

    def make(self, original: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor of the original's full shape."""
        with self.mode:
            return torch.empty(parameter_shape(original), dtype=dtype, device=self.device)


class RealTensors:
    """Makes real tensors on the CPU, except for those whose ids are in `absent`: they stay on the meta device."""

    def __init__(self, absent: set[int]) -> None:
        self.absent = absent
        self.generator = torch.Generator("cpu").manual_seed(0)

    def make(self, original: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A random matrix of a trained one's scale; vectors of ones (norms); a buffer's own values where it has any."""
        shape = parameter_shape(original)
        if id(original) in self.absent:
            return torch.empty(shape, dtype=dtype, device="meta")
        if not isinstance(original, nn.Parameter) and original.device.type != "meta":
            return original.detach().to("cpu", dtype, copy=True)
        made = torch.ones(shape, dtype=dtype, device="cpu")
        if made.is_floating_point() and made.dim() >= 2:
            made.normal_(0.0, 0.02, generator=self.generator)
        return made


def make_shadow(model: nn.Module, tensors: FakeTensors | RealTensors, *, dtype: torch.dtype | None = None) -> nn.Module:
    """The shadow of `model` with parameters and buffers made by `tensors`.

    `dtype`: what floating-point parameters and buffers become (None: as they are).
    """
    return _Builder(tensors, dtype).module(model)


class _Builder:
    def __init__(self, tensors: FakeTensors | RealTensors, dtype: torch.dtype | None) -> None:
        self.tensors, self.dtype = tensors, dtype
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
        made = self.tensors.make(tensor, dtype)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        return self._remember(tensor, made)

    def value(self, value: Any, depth: int = 0) -> Any:
        """A copy of an attribute that shares nothing which a forward could write to, as far as plain containers go."""
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(self.value(value.__func__, depth + 1), self.module(value.__self__))
        if depth > 4:
            return value
        kind = type(value)
        if kind is types.FunctionType:
            return self.function(value, depth)
        if kind is functools.partial:
            args = tuple(self.value(item, depth + 1) for item in value.args)
            named = {key: self.value(item, depth + 1) for key, item in value.keywords.items()}
            return functools.partial(self.value(value.func, depth + 1), *args, **named)
        if kind in (list, tuple, set):
            return kind(self.value(item, depth + 1) for item in value)
        if kind in (dict, OrderedDict):
            return kind((key, self.value(item, depth + 1)) for key, item in value.items())
        return value

    def function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        """The function itself, or a copy whose closure has shadows where the original has modules."""
        if id(function) in self.done:
            return self.done[id(function)]
        self._remember(function, function)  # one that is in its own closure keeps pointing at the original
        cells, changed = [], False
        for cell in function.__closure__ or ():
            try:
                before = cell.cell_contents
            except ValueError:  # not assigned yet
                cells.append(cell)
                continue
            after = self.value(before, depth + 1) if _may_hold_a_module(before) else before
            changed = changed or after is not before
            cells.append(cell if after is before else types.CellType(after))
        if not changed:
            return function
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(function.__dict__)
        return self._remember(function, copied)

    def _remember(self, original: Any, copy: Any) -> Any:
        self.done[id(original)] = copy
        self.alive.append(original)
        return copy


def _may_hold_a_module(value: Any) -> bool:
    """Containers are left alone: a closure may hold any of them, large ones too."""
    return isinstance(value, nn.Module | types.MethodType | types.FunctionType | functools.partial)
