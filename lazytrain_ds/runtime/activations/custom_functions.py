"""Autograd functions of users and libraries, called outside the blocks, get back the Parameters that they saved.

Under saved-tensor hooks autograd hands a function's backward a copy of what `unpack` returned: a plain tensor without
the attributes of the Parameter that was saved. Functions that gather a weight themselves (TRL's fused head asks for
`weight.ds_status` and enters `GatheredParameters([weight])` in its backward) need the Parameter. So around such a
function, one that is given a Parameter, the hooks are off. What they protect is protected otherwise: a view of a
parameter slot that the function saves is replaced by a copy, since the slot is used again before the backward.

Inside blocks nothing changes: there the plan decides what is kept of what is saved.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import Function, FunctionCtx
from torch.nn import Parameter

__all__ = ["installation", "outside_blocks"]

# torch's and DeepSpeed's own functions know about hooks, and are counted among what the plan keeps.
_KNOWN = ("torch", "deepspeed", "lazytrain_ds")

Pack = Callable[[torch.Tensor], Any]
ViewOf = Callable[[torch.Tensor], Any]


class _Thread(threading.local):
    pack: Pack | None = None
    unpack: Callable[[Any], torch.Tensor] | None = None
    view_of: ViewOf | None = None
    hooks_are_off = False


_thread = _Thread()


@contextlib.contextmanager
def outside_blocks(pack: Pack, unpack: Callable[[Any], torch.Tensor], view_of: ViewOf | None) -> Iterator[None]:
    """Saved-tensor hooks of an engine's whole forward, in this thread. `view_of(tensor)`: its slot view or None."""
    before = _thread.pack, _thread.unpack, _thread.view_of
    _thread.pack, _thread.unpack, _thread.view_of = pack, unpack, view_of
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _thread.pack, _thread.unpack, _thread.view_of = before


def _needs_its_parameters(function: type, args: tuple[Any, ...]) -> bool:
    if _thread.pack is None or not any(type(arg) is Parameter for arg in args):
        return False
    if function.__module__.partition(".")[0] in _KNOWN:
        return False
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and top[0] is _thread.pack


def _applied(original: Any) -> classmethod[Any, ..., Any]:
    """In place of `Function.apply`."""

    @functools.wraps(original.__func__)
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        call = original.__get__(None, cls)
        if not _needs_its_parameters(cls, args):
            return call(*args, **kwargs)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        _thread.hooks_are_off = True
        try:
            return call(*args, **kwargs)
        finally:
            _thread.hooks_are_off = False
            torch._C._autograd._push_saved_tensors_default_hooks(_thread.pack, _thread.unpack)

    return classmethod(apply)


def _saved(original: Callable[..., None]) -> Callable[..., None]:
    """In place of `FunctionCtx.save_for_backward`."""

    @functools.wraps(original)
    def save_for_backward(self: FunctionCtx, *tensors: Any) -> None:
        if _thread.hooks_are_off and _thread.view_of is not None:
            tensors = tuple(map(_not_in_a_slot, tensors))
        original(self, *tensors)

    return save_for_backward


def _not_in_a_slot(tensor: Any) -> Any:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # of a graph that torch.func walks inside the forward
        return tensor
    return tensor if _thread.view_of(tensor) is None else tensor.detach().clone()


class _Installation:
    """Counts engines; the two names of torch are replaced while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._originals: tuple[Any, Any] | None = None

    def add(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._originals = Function.__dict__["apply"], FunctionCtx.save_for_backward
                Function.apply = _applied(self._originals[0])  # type: ignore[method-assign, assignment]
                FunctionCtx.save_for_backward = _saved(self._originals[1])  # type: ignore[method-assign]

    def remove(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._originals is not None:
                Function.apply, FunctionCtx.save_for_backward = self._originals  # type: ignore[method-assign]
                self._originals = None


installation = _Installation()
