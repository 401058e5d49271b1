"""Real values for the small integer tensors of a traced forward: ids, positions, masks.

Models branch on them ("is any token padded?"), and the branch decides which attention kernel runs and what it
saves. So next to the fake tensors, integer and boolean results are computed for real wherever all tensor inputs
are known; it costs a few bytes per token. Floats are never computed, random operators never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

# Above this many elements a value is not followed (a mask of 4 x 2048 x 2048).
LARGEST_NUMEL = 1 << 24


class KnownValues:
    """Fake tensor -> real tensor, for those whose value is known."""

    def __init__(self) -> None:
        self._real: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def note(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """`fake` has the value of `real` (copied to the CPU; ignored unless it is a small integer or boolean
        tensor).
        """
        if _followed(real):
            with _disable_current_modes():
                self._real[fake] = real.detach().cpu().clone()

    def scalar(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What `tensor.item()` gives, where known; None otherwise."""
        if func is not torch.ops.aten._local_scalar_dense.default or args[0] not in self._real:
            return None
        with _disable_current_modes():
            return self._real[args[0]].item()

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """After `func` ran on fake tensors: compute its result for real, if it is small, integer and determined."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        known = all(tensor in self._real for tensor in inputs)
        if not known or not outputs or not all(_followed(tensor) for tensor in outputs) or _undetermined(func):
            if func._schema.is_mutable:
                self._forget(inputs)
            return
        if any(argument.is_out for argument in func._schema.arguments):
            self._forget(inputs)
            return
        with _disable_current_modes():
            real_args, real_kwargs = tree_map(self._lookup, (args, {**kwargs}))
            if "device" in real_kwargs:
                real_kwargs["device"] = "cpu"
            try:
                real = func(*real_args, **real_kwargs)
            except (RuntimeError, NotImplementedError, TypeError):  # a device's own operator: the value is unknown
                self._forget(inputs)
                return
        reals = [leaf for leaf in tree_leaves(real) if isinstance(leaf, torch.Tensor)]
        for fake, value in zip(outputs, reals, strict=True):
            if fake.shape == value.shape:
                self._real[fake] = value

    def _lookup(self, value: Any) -> Any:
        return self._real[value] if isinstance(value, torch.Tensor) else value

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        """One of `tensors` is written with something unknown: drop every value that shares memory with them."""
        addresses = {self._real[tensor].untyped_storage()._cdata for tensor in tensors if tensor in self._real}
        for fake in [fake for fake, real in self._real.items() if real.untyped_storage()._cdata in addresses]:
            del self._real[fake]


def _followed(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= LARGEST_NUMEL


def _undetermined(func: Any) -> bool:
    """Random, or of uninitialized memory."""
    name = str(func._overloadpacket)
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in name


@contextmanager
def models_see_real_tensors() -> Iterator[None]:
    """transformers takes other branches when it meets a fake tensor, as for an export; while active it does not."""
    import sys

    utilities = sys.modules.get("transformers.utils.import_utils")
    original = getattr(utilities, "is_fake_tensor", None)
    if utilities is None or original is None:
        yield
        return
    utilities.is_fake_tensor = lambda _: False
    try:
        yield
    finally:
        utilities.is_fake_tensor = original
