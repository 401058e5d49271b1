"""Running a micro-batch a second time after the device ran out of memory in it, so that nobody can tell.

The first attempt has drawn random numbers, changed buffers, and, in a backward, handed in some gradients. Random
numbers and buffers are put back. Gradients stay: a plan never changes their bits, so those that are in are what the
second attempt would hand in again, and it leaves them out (`GradientStore.again`). So nothing has to be copied ahead
of a backward, with or without accumulation.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

from lazytrain_ds.errors import DeviceMemoryError
from lazytrain_ds.runtime.activations.replay import (
    Buffers,
    PythonStates,
    RandomState,
    model_parallel_random_states,
)
from lazytrain_ds.runtime.activations.structure import copy_structure, is_stateful, tensors_in
from lazytrain_ds.runtime.device.base import OutOfDeviceMemoryError

__all__ = ["OUT_OF_MEMORY", "Generators", "MicroBatch", "forget_attempt", "without_frames"]

OUT_OF_MEMORY = (DeviceMemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Generators:
    """Every random state that a model's code may draw from: Python's, numpy's, torch's, DeepSpeed's."""

    python: PythonStates
    tensors: RandomState
    model_parallel: dict[str, Any] | None

    @classmethod
    def capture(cls, device: torch.device) -> Generators:
        """The present states."""
        return cls(PythonStates.capture(), RandomState.capture(device), model_parallel_random_states())

    def set(self) -> None:
        """Make these the present states."""
        self.python.set()
        self.tensors.set()
        if self.model_parallel is not None:
            from deepspeed.runtime.activation_checkpointing import checkpointing

            checkpointing.get_cuda_rng_tracker().set_states(self.model_parallel)


class MicroBatch:
    """One training forward, from its start to the end of its backward: what a second attempt needs.

    Holds the call's arguments, no graph. Buffers are the model's that its forward changes.
    """

    def __init__(self, buffers: Buffers, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        if any(is_stateful(value) for value in (*args, *kwargs.values())):  # the first attempt fills what it was given
            self.args = tuple(copy_structure(value) if is_stateful(value) else value for value in args)
            self.kwargs = {
                name: copy_structure(value) if is_stateful(value) else value for name, value in kwargs.items()
            }
        self._all_buffers = buffers
        self._buffers = buffers.before()
        self._generators = Generators.capture(device)
        self._versions = [
            (tensor, tensor._version) for tensor in tensors_in((args, kwargs)) if not tensor.is_inference()
        ]
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self.alone = True  # no other forward still waits for its backward

    def restore(self) -> None:
        """Random states and buffers as they were before the first attempt."""
        self._generators.set()
        with torch.no_grad():
            for owner, name, copy in self._buffers:
                now = owner._buffers.get(name)
                if now is not None and now.shape == copy.shape and now.dtype == copy.dtype:
                    now.copy_(copy)
                else:
                    owner._buffers[name] = copy.clone()

    def ran(self, output: Any) -> None:
        """The forward is over and this is what it returned."""
        self._buffers = self._all_buffers.after(self._buffers)
        self._outputs = [weakref.ref(tensor) for tensor in tensors_in(output)]

    def position_of(self, loss: torch.Tensor) -> int | None:
        """Which of the tensors that the model returned `loss` is; None for none of them."""
        return next((index for index, each in enumerate(self._outputs) if each() is loss), None)

    def obstacle(self, position: int | None = 0, retain_graph: bool = False) -> str | None:
        """Why there can be no second attempt, in words; None where there can.

        `position`: of the loss among what the model returned (None: the script computed it); `retain_graph`: whether
        the graph was to be kept.
        """
        if not self.alone:
            return "an earlier forward still waits for its backward"
        if position is None:
            return "the loss was computed outside the model, by code that cannot be run again"
        if retain_graph:
            return "its graph was to be retained"
        if any(tensor._version != version for tensor, version in self._versions):
            return "what was passed to the model has been overwritten since"
        return None

    def returned(self, output: Any, position: int | None, expected: torch.Tensor) -> torch.Tensor:
        """The loss in a second forward's `output`; DeviceMemoryError where it is not, bit for bit, the first one's."""
        loss = tensors_in(output)[position or 0]
        if not torch.equal(loss.detach(), expected):
            raise OutOfDeviceMemoryError(
                "out of device memory in a backward, and the micro-batch cannot be run again: its loss is "
                f"{loss.item()} the second time, not {expected.item()}. Something in the model's forward depends on "
                "more than its arguments, parameters, buffers and random numbers. Use a smaller micro-batch, or a plan "
                "that needs less (lazytrain.activations)."
            )
        return loss


def without_frames(error: BaseException) -> BaseException:
    """The error without the stack frames that hold the failed attempt's tensors; causes and contexts as well."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        pending += [each.__cause__, each.__context__]
    return error


def forget_attempt(engine: Any, depth: int) -> None:
    """What an interrupted forward or backward left in DeepSpeed is put right, and its memory is free.

    `depth`: length of DeepSpeed's stack of modules in a forward before the attempt. Nothing else may be under way.
    """
    del parameter_offload.FWD_MODULE_STACK[depth:]
    optimizer, module = engine.optimizer, engine.module
    for each in module.modules():
        if isinstance(each._parameters, ZeROOrderedDict):
            each._parameters._in_forward = False
        for name in ("applied_pre_backward_ref_cnt", "ds_grads_remaining"):
            if name in each.__dict__:
                setattr(each, name, 0)
    for parameter in module.parameters():
        parameter.grad = None
    optimizer._backward_active_depth = 0
    for names in vars(engine.engine_timers).values():
        for name in names if isinstance(names, list) else ():
            timer = engine.timers.timers.get(name)
            if timer is not None and timer.started_:
                timer.started_ = False
    gc.collect()  # exceptions and frames refer to each other
    if engine._lt_book.device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
