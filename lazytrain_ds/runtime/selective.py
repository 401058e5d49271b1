"""Selective recomputation: keep the outputs of chosen operators, run the cheap rest again.

A pair of dispatch modes for `torch.utils.checkpoint`'s `context_fn`. Torch has such a pair too; ours hands each kept
output to a *keeper*, so that it may live in host memory or on NVMe, allows more than one backward, and closes two gaps:

Note [In-place operators on kept outputs]
A 3-D `matmul` is `mm` and `_unsafe_view`, and a view made that way has a version counter of its own. So `y = x @ w;
y += b` changes the kept `mm` output unseen, and the second run adds the bias twice: silently wrong gradients. Here
every mutating operator is checked against the storages of kept outputs; a hit means that the output is recomputed.
DeepSpeed's ZeRO-3 linear does exactly this with its bias; to keep the benefit there, it adds out of place while a
selective block runs (`out_of_place_bias`).

Note [Kept random operators]
An operator that draws random numbers and is not run again must still move the generators on, or every later dropout of
the block draws another mask. Their states after the operator are kept with its output.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lazytrain_ds.errors import PlanError
from lazytrain_ds.runtime.activations.replay import RandomState
from lazytrain_ds.runtime.activations.storages import Handle, storage_key
from lazytrain_ds.workload.operators import written_tensors
from lazytrain_ds.workload.selective import can_be_kept, resolve_operator

__all__ = ["KeptOutputs", "find_operators", "linear_installation", "out_of_place_bias", "selective_contexts"]

logger = logging.getLogger(__name__)

LINEAR_MODULE = "deepspeed.runtime.zero.linear"


def find_operators(names: Sequence[str]) -> frozenset[Any]:
    """The operators called `names` ("aten.mm.default"). PlanError for an unknown one, or one that cannot be kept."""
    found = []
    for name in names:
        operator = resolve_operator(name)
        if operator is None:
            raise PlanError(
                f"activation choice: this PyTorch has no operator {name!r}; names are of the form 'aten.mm.default'"
            )
        if not can_be_kept(operator):
            raise PlanError(f"activation choice: {name!r} returns a view or writes in place, so it cannot be kept")
        found.append(operator)
    return frozenset(found)


class _Entry:
    """One kept output: a tree of handles and plain values."""

    __slots__ = ("random", "value")

    def __init__(self, value: Any, random: RandomState | None) -> None:
        self.value, self.random = value, random


class KeptOutputs:
    """Outputs kept by one forward of one block, by operator and count."""

    def __init__(self, operators: frozenset[Any], keep: Callable[[torch.Tensor], Handle], device: torch.device) -> None:
        self.operators, self.device = operators, device
        self.keep: Callable[[torch.Tensor], Handle] | None = keep
        self.entries: dict[tuple[Any, int], _Entry | None] = {}
        self._of_storage: dict[int, list[tuple[Any, int]]] = {}
        self._witnesses: list[tuple[torch.Tensor, int, int]] = []
        self.dropped: list[str] = []

    def add(self, key: tuple[Any, int], output: Any) -> None:
        """Keep what an operator returned."""
        operator = key[0]
        random = None
        if torch.Tag.nondeterministic_seeded in operator.tags:
            random = RandomState.capture(self.device)

        def kept(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            self._of_storage.setdefault(storage_key(leaf), []).append(key)
            assert self.keep is not None
            return self.keep(leaf)

        self.entries[key] = _Entry(pytree.tree_map(kept, output), random)

    def forget(self, key: tuple[Any, int]) -> None:
        """Let one output go."""
        self.entries.pop(key, None)
        for storage, keys in list(self._of_storage.items()):
            if key in keys:
                keys.remove(key)
                if not keys:
                    del self._of_storage[storage]

    def written(self, tensor: torch.Tensor, operator: Any) -> None:
        """An operator writes to `tensor`: what was kept of its storage is not what the operator returned any more."""
        for key in self._of_storage.pop(storage_key(tensor), ()):
            if self.entries.get(key) is not None:
                self.entries[key] = None  # in place: `entries` is in the order of execution
                self.dropped.append(f"{key[0]} (changed by {operator})")

    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """The block ended: what leaves it may be changed later by code that no mode of ours sees."""
        for tensor in outputs:
            key = storage_key(tensor)
            if key in self._of_storage and not tensor.is_inference():
                alias = tensor.detach()
                alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                self._witnesses.append((alias, tensor._version, key))
        watched = {key for _, _, key in self._witnesses}
        self._of_storage = {key: value for key, value in self._of_storage.items() if key in watched}

    def check(self) -> None:
        """Before a second run: drop what was changed after the block."""
        for alias, version, key in self._witnesses:
            if alias._version != version:
                for entry in self._of_storage.get(key, ()):
                    if self.entries.get(entry) is not None:
                        self.entries[entry] = None
                        self.dropped.append(f"{entry[0]} (changed after the block)")


class _FirstRun(TorchDispatchMode):
    """Runs everything, keeps what is wanted, notices writes to what was kept.

    A second run stops at the last tensor that autograd saved. Outputs made after that would never be asked for, so
    they are let go at the end; `checkpoint`'s own pack hook is wrapped to know which these are.
    """

    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__()
        self._kept = kept
        self._counts: dict[Any, int] = {}
        self._needed = 0
        self._hooks: Any = None

    def __enter__(self) -> Any:
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def note_and_pack(tensor: torch.Tensor) -> Any:
            self._needed = len(self._kept.entries)
            return pack(tensor)

        self._hooks = torch.autograd.graph.saved_tensors_hooks(note_and_pack, unpack)
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*exception)
        for key in list(self._kept.entries)[self._needed :]:
            self._kept.forget(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = self._kept
        output = func(*args, **(kwargs or {}))
        if func in kept.operators:
            count = self._counts[func] = self._counts.get(func, -1) + 1
            kept.add((func, count), output)
        elif kept._of_storage and func._schema.is_mutable:
            for tensor in written_tensors(func, args, kwargs or {}):
                kept.written(tensor, func)
        return output


class _SecondRun(TorchDispatchMode):
    """Returns what was kept, runs the rest."""

    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__()
        self._kept = kept
        self._counts: dict[Any, int] = {}

    def __enter__(self) -> Any:
        self._counts.clear()  # a second backward enters the same mode again
        self._kept.check()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = self._kept
        if func in kept.operators:
            count = self._counts[func] = self._counts.get(func, -1) + 1
            entry = kept.entries.get((func, count))
            if entry is not None:
                if entry.random is not None:
                    entry.random.set()
                # A fresh alias each time: autograd attaches this run's node to what it is given.
                return pytree.tree_map(
                    lambda leaf: leaf.restore().detach() if isinstance(leaf, Handle) else leaf, entry.value
                )
        return func(*args, **(kwargs or {}))


def selective_contexts(kept: KeptOutputs) -> tuple[Any, Any]:
    """The two context managers for `checkpoint(..., context_fn=lambda: selective_contexts(kept))`."""
    return _FirstRun(kept), _SecondRun(kept)


# -- DeepSpeed's linear ----------------------------------------------------------------------------------------------
class _Thread(threading.local):
    depth = 0


_thread = _Thread()


@contextlib.contextmanager
def out_of_place_bias() -> Iterator[None]:
    """On this thread, ZeRO-3's linear adds its bias out of place: the same bits, one more tensor."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


class _LinearInstallation:
    """Counts engines; while there is one, ZeRO-3's linear asks the thread how to add its bias."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._original: Any = None

    def add(self) -> None:
        with self._lock:
            self._count += 1
            module = sys.modules.get(LINEAR_MODULE)
            if self._count > 1 or module is None:
                return
            function = module.LinearFunctionForZeroStage3
            self._original = function.__dict__["forward"]
            run_original = function.forward

            def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
                if _thread.depth == 0 or bias is None or input.dim() == 2:
                    return run_original(input, weight, bias)
                output = input.matmul(weight.t())
                return (output + bias).to(output.dtype)  # adding in place never promotes

            function.forward = staticmethod(forward)

    def remove(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._original is not None:
                sys.modules[LINEAR_MODULE].LinearFunctionForZeroStage3.forward = self._original
                self._original = None


linear_installation = _LinearInstallation()
