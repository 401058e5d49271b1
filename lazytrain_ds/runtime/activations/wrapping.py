"""The wrapper around one block module's forward, on the instance: inside all module hooks, DeepSpeed's included."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lazytrain_ds.runtime.activations.blocks import BlockCall
from lazytrain_ds.runtime.activations.replay import Buffers
from lazytrain_ds.runtime.activations.storages import storage_key
from lazytrain_ds.runtime.activations.structure import tensors_in
from lazytrain_ds.runtime.activations.takeover import note_block, owned

if TYPE_CHECKING:
    from lazytrain_ds.runtime.activations.runtime import ActivationRuntime

__all__ = ["BlockForward", "is_compiled"]


def is_compiled(module: nn.Module) -> bool:
    """Whether `module`'s forward belongs to torch.compile or TorchScript, so that nothing can be put inside it."""
    return (
        type(module).__name__ == "OptimizedModule"  # by name: importing torch._dynamo takes seconds
        or isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


class BlockForward:
    """Callable in place of `module.forward`. A copy of the module (an averaged model) gets its plain forward back."""

    def __init__(self, runtime: ActivationRuntime, module: nn.Module, blocks: list[int], name: str) -> None:
        self.runtime, self.module, self.blocks, self.name = runtime, module, blocks, name
        self._on_instance = "forward" in module.__dict__
        self.original = module.forward
        self.buffers = Buffers(module)
        self.proven = False
        self.plannable = True
        functools.update_wrapper(self, self.original, updated=())

    def install(self) -> None:
        """Put the wrapper in place."""
        self.module.forward = self

    def remove(self) -> None:
        """Exactly undo `install`."""
        if self.module.__dict__.get("forward") is self:
            if self._on_instance:
                self.module.forward = self.original
            else:
                del self.module.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.module))
        if copied is None or self._on_instance:
            return self.original
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")  # when it is read back there is no wrapper yet: the class's own

    def own_storages(self, with_parameters: bool) -> frozenset[int]:
        """Storages of the block's buffers (and parameters): saved or not, they are never activations."""
        keys = {storage_key(buffer) for buffer in self.buffers.present()}
        if with_parameters:
            keys.update(storage_key(parameter) for parameter in self.module.parameters())
        return frozenset(keys)

    def cannot_be_planned(self, reason: str) -> None:
        """Keep this block's activations from now on; said once."""
        self.plannable = False
        self.runtime.say_once((self.name, "unplannable"), f"block {self.name}: {reason}; its activations are kept")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runtime = self.runtime
        note_block(runtime.takeover)
        frame = runtime.frame
        if frame is None or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        block = self._block_of_this_call(frame.seen)
        # Inside a backward this is a second run that somebody else asked for: its activations are used at once.
        again = torch._C._current_graph_task_id() != -1
        action = runtime.keep if again or not self.plannable else runtime.action(block)
        call = BlockCall(self, frame, block, action)
        with owned(runtime.takeover, inside_block=True):
            output = call.run_first(args, kwargs)
        if not again and self.plannable and not tensors_in(output):
            self.cannot_be_planned("it returns no tensor")
        return output

    def _block_of_this_call(self, seen: dict[int, int]) -> int:
        """A module that stands for several blocks (shared layers) is the next one at each call."""
        count = seen.get(id(self), 0)
        seen[id(self)] = count + 1
        return self.blocks[min(count, len(self.blocks) - 1)]
