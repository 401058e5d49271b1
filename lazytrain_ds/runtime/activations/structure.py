"""Arguments and outputs of any shape: which tensors are in them, and copies that a re-run may consume."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["copy_structure", "is_stateful", "tensors_among", "tensors_in", "tree_flatten", "tree_unflatten"]

tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten

DEEPEST = 4


def tensors_in(value: Any, depth: int = DEEPEST) -> list[torch.Tensor]:
    """Tensors inside `value` in a fixed order: containers, dataclasses, and attributes of plain objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or value is None or isinstance(value, (str, bytes, int, float, complex, type, nn.Module)):
        return []
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif hasattr(value, "__dict__") and not callable(value):
        items = vars(value).values()
    else:
        return []
    return [tensor for item in items for tensor in tensors_in(item, depth - 1)]


def tensors_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that `tree_flatten((args, kwargs))` would give, in its order, faster where they are not nested."""
    tensors = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif value is not None and not isinstance(value, (int, float, str)):
            tensors += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tensors


def is_stateful(leaf: Any) -> bool:
    """Whether a call may change `leaf` so that a second call would not see what the first saw: a key/value cache.

    Recognised by what such objects offer (`update` and `get_seq_length`), as transformers' caches do.
    """
    return (
        not isinstance(leaf, (torch.Tensor, nn.Module, type)) and hasattr(leaf, "update")
        and hasattr(leaf, "get_seq_length")
    )  # fmt: skip


def copy_structure(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of `value`'s objects and containers with the same tensors, detached.

    Detached, because a saved copy must not hold the graph that holds it; whether a tensor requires a gradient stays,
    because that decides what autograd saves. An in-place write to a tensor of it would still be seen by the original.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        result: Any = value.detach()
        if value.requires_grad:
            result.requires_grad_()
    elif isinstance(value, dict):
        result = copy.copy(value)
        memo[id(value)] = result
        for key, item in value.items():
            result[key] = copy_structure(item, memo)
    elif isinstance(value, list):
        result = copy.copy(value)
        memo[id(value)] = result
        result[:] = [copy_structure(item, memo) for item in value]
    elif isinstance(value, tuple):
        items = [copy_structure(item, memo) for item in value]
        result = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
        result = copy.copy(value)
        memo[id(value)] = result
        for key, item in vars(value).items():
            result.__dict__[key] = copy_structure(item, memo)
    else:
        result = value
    memo[id(value)] = result
    return result
