"""Models that checkpoint by themselves: while our engine runs, the plan decides instead.

`torch.utils.checkpoint.checkpoint` is imported by name everywhere, so it is not replaced; the two names that it looks
up at each call are. The same goes for `deepspeed.checkpointing.checkpoint`. The replacements act only on a thread that
is inside `owned`, and otherwise pass on to the originals: a second, stock engine in the process sees no difference.

Note [Which calls are taken over]
Inside a planned block: every call. Outside: a call whose function refers to a planned block, or to something inside
one, is a checkpoint around blocks and is taken over. One that refers to no module that holds a block (a chunked loss)
stays the user's. One that refers to something *holding* blocks (a method of the model) may be either: it runs as the
user wrote it once, we watch whether a block runs in it, and know from then on.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

__all__ = ["Takeover", "installation", "note_block", "ours", "owned"]

DEEPSPEED_MODULE = "deepspeed.runtime.activation_checkpointing.checkpointing"


class _Thread(threading.local):
    takeover: Takeover | None = None
    inside_block = 0
    ours = False
    site: Any = None


_thread = _Thread()


class Takeover:
    """What one engine knows about its model's own checkpoint calls."""

    def __init__(self, blocks: list[nn.Module], holders: list[nn.Module]) -> None:
        self._inside = {id(module) for block in blocks for module in block.modules()}
        self._holding = {id(module) for module in holders} - self._inside
        self._sites: dict[Any, bool] = {}
        self.taken = 0

    def decides(self, function: Callable[..., Any]) -> bool:
        """Whether this call's checkpointing is the plan's business; see Note [Which calls are taken over]."""
        if _thread.inside_block:
            return True
        referred = list(_modules_of(function))
        if any(id(module) in self._inside for module in referred):
            return True
        if not any(id(module) in self._holding for module in referred):
            return False
        return self._sites.get(_site_of(function), False)

    def learn(self, site: Any) -> None:
        """A block ran inside the call of this site."""
        self._sites[site] = True


def _code_of(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(getattr(function, "__func__", function), "__code__", type(function))


_site_of = _code_of


def _modules_of(function: Any, depth: int = 4) -> Iterator[nn.Module]:
    """Modules that a function refers to: itself, its owner, what is bound, closed over, or a default."""
    if depth == 0:
        return
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, functools.partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            yield from _modules_of(value, depth - 1)
    elif isinstance(function, (list, tuple)):
        for value in function:
            yield from _modules_of(value, depth - 1)
    else:
        if (owner := getattr(function, "__self__", None)) is not None:
            yield from _modules_of(owner, depth - 1)
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield from _modules_of(cell.cell_contents, depth - 1)
        for value in getattr(function, "__defaults__", None) or ():
            yield from _modules_of(value, depth - 1)
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            yield from _modules_of(wrapped, depth - 1)


def note_block(takeover: Takeover) -> None:
    """A planned block is called: if that happens inside a user's checkpoint call, its site is now known."""
    if _thread.site is not None and _thread.takeover is takeover:
        takeover.learn(_thread.site)


@contextlib.contextmanager
def owned(takeover: Takeover, inside_block: bool = False) -> Iterator[None]:
    """This thread runs our engine's forward (`inside_block`: a planned block of it, first run or not)."""
    previous = _thread.takeover, _thread.inside_block
    _thread.takeover, _thread.inside_block = takeover, previous[1] + inside_block
    try:
        yield
    finally:
        _thread.takeover, _thread.inside_block = previous


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """The next checkpoint call of this thread is our own."""
    _thread.ours = True
    try:
        yield
    finally:
        _thread.ours = False


@contextlib.contextmanager
def _watched(function: Callable[..., Any]) -> Iterator[None]:
    previous, _thread.site = _thread.site, _site_of(function)
    try:
        yield
    finally:
        _thread.site = previous


def _taken_over(function: Callable[..., Any]) -> bool:
    takeover = _thread.takeover
    if takeover is None or not takeover.decides(function):
        return False
    takeover.taken += 1
    return True


def _watching() -> bool:
    return _thread.takeover is not None and not _thread.inside_block


# -- the replacements ----------------------------------------------------------------------------------------------
_original_generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_OriginalFunction = torch.utils.checkpoint.CheckpointFunction


def _generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of `_checkpoint_without_reentrant_generator`: `checkpoint` calls the function between two `next`."""
    if _thread.ours:
        _thread.ours = False
        return _original_generator(function, *args, **kwargs)
    if _taken_over(function):
        return _nothing()
    if _watching():
        return _watched_generator(function, _original_generator(function, *args, **kwargs))
    return _original_generator(function, *args, **kwargs)


def _nothing() -> Iterator[None]:
    """Stands for a checkpoint that is not made; an exception of the function is thrown into it and passes through."""
    yield


def _watched_generator(function: Callable[..., Any], inner: Any) -> Iterator[None]:
    next(inner)
    try:
        with _watched(function):
            yield
    except BaseException as error:
        inner.throw(error)
        raise
    with contextlib.suppress(StopIteration):
        next(inner)


class _SwitchedFunction(_OriginalFunction):
    """In place of `CheckpointFunction` (the reentrant mode)."""

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if _taken_over(function):
            return function(*args)
        if _watching():
            with _watched(function):
                return _OriginalFunction.apply(function, preserve, *args)
        return _OriginalFunction.apply(function, preserve, *args)


def _partitions_across_ranks(module: Any) -> bool:
    """Whether DeepSpeed's checkpoint really partitions activations: that stays as it is."""
    return bool(module.PARTITION_ACTIVATIONS) and (module.mp_size or 1) > 1


def _deepspeed_function(module: Any) -> type:
    original = module.CheckpointFunction

    class SwitchedDeepSpeedFunction(original):  # type: ignore[misc, valid-type]
        """In place of DeepSpeed's `CheckpointFunction`."""

        @classmethod
        def apply(cls, function: Callable[..., Any], outputs: list[Any], *args: Any) -> Any:
            if not _partitions_across_ranks(module) and _taken_over(function):
                result = function(*args)
                outputs += [result] if torch.is_tensor(result) else list(result)
                return result
            if _watching():
                with _watched(function):
                    return original.apply(function, outputs, *args)
            return original.apply(function, outputs, *args)

    return SwitchedDeepSpeedFunction


def _deepspeed_non_reentrant(module: Any) -> Callable[..., Any]:
    original = module.non_reentrant_checkpoint

    @functools.wraps(original)
    def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
        if not _partitions_across_ranks(module) and _taken_over(function):
            return function(*args)
        with _watched(function) if _watching() else contextlib.nullcontext():
            return original(function, *args)

    return non_reentrant_checkpoint


class _Installation:
    """Counts engines; the names are replaced while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._undo: list[tuple[Any, str, Any]] = []

    def _replace(self, module: Any, name: str, value: Any) -> None:
        self._undo.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def add(self) -> None:
        with self._lock:
            self._count += 1
            if self._count > 1:
                return
            self._replace(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _generator)
            self._replace(torch.utils.checkpoint, "CheckpointFunction", _SwitchedFunction)
            module = sys.modules.get(DEEPSPEED_MODULE)
            if module is not None:
                self._replace(module, "non_reentrant_checkpoint", _deepspeed_non_reentrant(module))
                self._replace(module, "CheckpointFunction", _deepspeed_function(module))

    def remove(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                while self._undo:
                    module, name, value = self._undo.pop()
                    setattr(module, name, value)


installation = _Installation()
