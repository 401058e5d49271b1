"""Record what a piece of model code does: every operator with its FLOPs, the bytes it moves and the storages it makes.

Works on fake and on real tensors: only shapes, dtypes and storage identities are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lazytrain_ds.workload.values import KnownValues

aten = torch.ops.aten


@dataclass(frozen=True)
class Operator:
    """One executed operator.

    `made`, `made_bytes`: serials and sizes of the storages it created (none for a view or an in-place operator).
    `written`: those it changed in place. `bytes_moved`: its inputs and outputs, 0 for a view. `keepable`: its
    output may be kept instead of running it again (it is no view and writes nothing).
    """

    name: str
    flops: int
    bytes_moved: int
    made: tuple[int, ...]
    made_bytes: tuple[int, ...]
    written: tuple[int, ...] = ()
    keepable: bool = False


class Storages:
    """Serial numbers for storages. An address may be used again after a storage died: then it gets a new number."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, StorageWeakRef]] = {}
        self._next = 0
        self.bytes: dict[int, int] = {}

    def serial(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage (given on first sight)."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._known.get(address)
        if known is not None and not known[1].expired():
            return known[0]
        serial = self._next
        self._next += 1
        self._known[address] = (serial, StorageWeakRef(storage))
        self.bytes[serial] = storage.nbytes()
        return serial

    def serials(self, tree: Any) -> set[int]:
        """Numbers of all tensors in a nest of containers."""
        return {self.serial(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}

    def reference(self, tensor: torch.Tensor) -> tuple[int, StorageWeakRef]:
        """(number, weak reference) of the tensor's storage."""
        serial = self.serial(tensor)
        return serial, self._known[tensor.untyped_storage()._cdata][1]


class OperatorTrace(TorchDispatchMode):
    """A dispatch mode that appends an `Operator` to `operators` for each one executed.

    After `start_watching` it follows the bytes that operators made since and that are still alive; `peak_bytes` is
    their maximum.
    """

    def __init__(self, storages: Storages, values: KnownValues | None = None) -> None:
        super().__init__()
        self.storages = storages
        self.values = values
        self.operators: list[Operator] = []
        self.watch = False
        self.live_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, tuple[int, StorageWeakRef]] = {}

    def start_watching(self) -> None:
        """Forget what was alive and follow from here."""
        self._live, self.live_bytes, self.peak_bytes, self.watch = {}, 0, 0, True

    def stop_watching(self) -> int:
        """Stop; returns the peak."""
        self.watch = False
        self._live = {}
        return self.peak_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.values is not None:
            scalar = self.values.scalar(func, args)
            if scalar is not None:
                return scalar
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = {self.storages.serial(tensor) for tensor in inputs}
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not outputs:
            return result  # questions such as prim.device
        if self.values is not None:
            self.values.follow(func, args, kwargs, result)
        made: dict[int, int] = {}
        for tensor in outputs:
            serial, reference = self.storages.reference(tensor)
            if serial not in before and serial not in made:
                made[serial] = self.storages.bytes[serial]
                if self.watch:
                    self._live[serial] = (made[serial], reference)
        mutates = func._schema.is_mutable
        moved = 0
        if made or mutates:
            moved = sum(_tensor_bytes(tensor) for tensor in inputs) + sum(_tensor_bytes(tensor) for tensor in outputs)
        flops = operator_flops(func, args, kwargs, result) if made or mutates else 0
        written = (
            tuple(self.storages.serial(tensor) for tensor in written_tensors(func, args, kwargs)) if mutates else ()
        )
        keepable = bool(made) and not mutates and not any(value.alias_info for value in func._schema.returns)
        self.operators.append(Operator(str(func), flops, moved, tuple(made), tuple(made.values()), written, keepable))
        if self.watch:
            self._live = {key: entry for key, entry in self._live.items() if not entry[1].expired()}
            self.live_bytes = sum(size for size, _ in self._live.values())
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments of a call that the operator writes to."""
    tensors = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tensors


def _tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def operator_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Matmul, convolution and attention FLOPs of one operator (0 for everything else), as `FlopCounterMode` counts
    them, and also for the CPU's flash attention and grouped matmuls, which it leaves out."""
    packet = func._overloadpacket
    counter = flop_registry.get(packet)
    if counter is not None:
        return int(counter(*args, **kwargs, out_val=result))
    extra = _EXTRA.get(str(packet))
    return int(extra(args)) if extra is not None else 0


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    batch, heads, queries, width = query.shape
    keys, value_width = key.shape[-2], value.shape[-1]
    return 2 * batch * heads * queries * keys * (width + value_width)


def _attention_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    # Scores again, and the gradients of value, scores, query and key.
    batch, heads, queries, width = query.shape
    keys, value_width = key.shape[-2], value.shape[-1]
    return 2 * batch * heads * queries * keys * (3 * width + 2 * value_width)


def _grouped(left: torch.Tensor, right: torch.Tensor) -> int:
    # (tokens, k) x (groups, k, n), or a weight gradient (k, tokens) x (tokens, n): 2 * tokens * k * n either way.
    return 2 * math.prod(left.shape[-2:]) * right.shape[-1]


_EXTRA: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda args: _attention(*args[:3]),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": lambda args: _attention_backward(*args[1:4]),
    "aten._scaled_dot_product_fused_attention_overrideable": lambda args: _attention(*args[:3]),
    "aten._scaled_dot_product_fused_attention_overrideable_backward": lambda args: _attention_backward(*args[1:4]),
    "aten._grouped_mm": lambda args: _grouped(args[0], args[1]),
}
