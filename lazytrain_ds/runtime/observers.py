"""Whoever looks at masters, moments or gradients between steps: DeepSpeed's `safe_get_*`, `safe_set_*` and raw access.

Every way in first waits for the updates under way, then reads or writes the one place a value lives: the master and
moments in their tier (8-bit moments are shown, and taken, as fp32), the gradient in the accumulation buffer. What
cannot be intercepted is `param.ds_tensor` of a block in host memory: read it after `optimizer.drain()`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from lazytrain_ds.errors import OptimizerError

if TYPE_CHECKING:
    from lazytrain_ds.runtime.gradients import GradientStore
    from lazytrain_ds.runtime.optimizer_states import StateHomes
    from lazytrain_ds.runtime.updates import Updater

__all__ = ["StateObservers", "guard_state", "guarded_attribute", "unguard_state"]


def guarded_attribute(name: str) -> property:
    """An attribute, kept under `name`, whose reading first waits for updates under way."""

    def read(self: Any) -> Any:
        self.drain()
        return self.__dict__[name]

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return property(read, write)


def _bare(optimizer_type: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer without its attributes, which copying and unpickling then set."""
    return object.__new__(optimizer_type)


def guard_state(optimizer: torch.optim.Optimizer, drain: Callable[[], None]) -> None:
    """Make `optimizer.state` wait for updates under way. Nothing else of the object changes, its class' name included.

    `param_groups` stays as it is: schedulers and `get_lr` go through it right after each step.
    """
    plain = type(optimizer)

    def read(self: torch.optim.Optimizer) -> Any:
        drain()
        return self.__dict__["state"]

    def write(self: torch.optim.Optimizer, value: Any) -> None:
        self.__dict__["state"] = value

    def __reduce_ex__(self: torch.optim.Optimizer, protocol: Any) -> Any:
        drain()
        _, _, *rest = plain.__reduce_ex__(self, max(2, int(protocol)))
        return (_bare, (plain,), *rest)

    members = {
        "state": property(read, write),
        "__reduce_ex__": __reduce_ex__,  # copies and pickles are of the plain class
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_lazytrain_plain_class": plain,
    }
    optimizer.__class__ = type(plain.__name__, (plain,), members)


def unguard_state(optimizer: torch.optim.Optimizer) -> None:
    """Give a guarded optimizer its own class back."""
    optimizer.__class__ = getattr(optimizer, "_lazytrain_plain_class", type(optimizer))


class StateObservers:
    """DeepSpeed's access to fp32 masters, moments and gradients, parameter by parameter. A mixin of `LazyStage3`."""

    _lt_states: StateHomes
    _lt_updater: Updater
    _lt_gradients: GradientStore
    drain: Callable[[], None]

    def _lt_local_part(self: Any, value: torch.Tensor, parameter: Parameter) -> torch.Tensor:
        """This rank's partition of a whole value."""
        if value.numel() != parameter.ds_numel:
            raise OptimizerError(
                f"the value has {value.numel()} elements, the parameter has {parameter.ds_numel} "
                f"({tuple(parameter.ds_shape)}); give one of the parameter's whole shape"
            )
        start = parameter.partition_numel() * self._get_param_partition_rank(parameter)
        return value.detach().reshape(-1)[start : start + parameter.partition_numel()]

    # -- masters and moments -------------------------------------------------------------------------------------
    def get_local_fp32_param(self: Any, param: Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """This rank's part of the master, or of a moment, as fp32: a copy."""
        if not param.requires_grad:
            return None
        self.drain()
        index, offset, numel = self.grad_position[self.get_param_id(param)]
        with self._lt_states.at_hand(index, write=False) as states:
            if optim_state_key is None:
                value = states.master.detach().narrow(0, offset, numel).clone()
            else:
                value = self._lt_updater.read_state(states, optim_state_key, offset, numel)
        self._lt_states.settle()
        return value

    def set_local_hp_param(
        self: Any, value: torch.Tensor, param: Parameter, optim_state_key: str | None = None
    ) -> None:
        """Replace this rank's part of the master, or of a moment. The weights follow at the next step, as upstream."""
        if not param.requires_grad:
            return
        self.drain()
        index, offset, _ = self.grad_position[self.get_param_id(param)]
        flat = value.detach().reshape(-1).to(torch.float32)
        with self._lt_states.at_hand(index) as states:
            if optim_state_key is None:
                states.master.detach().narrow(0, offset, flat.numel()).copy_(flat)
            else:
                self._lt_updater.write_state(states, optim_state_key, offset, flat)
        self._lt_states.settle()

    def get_full_hp_param(self: Any, param: Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """The whole master or moment, as fp32."""
        part = self.get_local_fp32_param(param, optim_state_key)
        return None if part is None else self._fp32_state_allgather(param, part.to(param.device))

    def set_full_hp_param(self: Any, value: torch.Tensor, param: Parameter, optim_state_key: str | None = None) -> None:
        """Replace the whole master or moment."""
        if param.requires_grad:
            self.set_local_hp_param(self._lt_local_part(value, param), param, optim_state_key)

    def get_hp_param_device(self: Any, param: Parameter, optim_state_key: str | None = None) -> torch.device | None:
        """Where the value is stepped; the CPU for states on NVMe."""
        if not param.requires_grad:
            return None
        index, _, _ = self.grad_position[self.get_param_id(param)]
        return self._lt_states.masters[index].device

    # -- gradients -----------------------------------------------------------------------------------------------
    def get_local_fp32_grad_for_param(self: Any, param: Parameter) -> torch.Tensor | None:
        """This rank's part of the gradient as fp32: accumulated so far, or, after `step`, as the update took it."""
        if not param.requires_grad:
            return None
        self.drain()
        self._lt_gradients.settle()
        return self._lt_gradients.value(param)

    def set_local_grad_for_param(self: Any, value: torch.Tensor, param: Parameter) -> None:
        """Replace this rank's part of the gradient that the next `step` takes."""
        if not param.requires_grad:
            return
        self.drain()
        self._lt_gradients.settle()
        self._lt_gradients.assign(param, value.detach())

    def get_fp32_grad_for_param(self: Any, param: Parameter) -> torch.Tensor | None:
        """The whole gradient as fp32."""
        part = self.get_local_fp32_grad_for_param(param)
        return None if part is None else self._fp32_state_allgather(param, part.to(param.device))

    def set_fp32_grad_for_param(self: Any, value: torch.Tensor, param: Parameter) -> None:
        """Replace the whole gradient."""
        if param.requires_grad:
            self.set_local_grad_for_param(self._lt_local_part(value, param), param)

    def update_fp32_grad_for_param_vectorized(
        self: Any,
        update_func: Callable[[torch.Tensor, Parameter], torch.Tensor],
        param_list: Iterable[Parameter],
    ) -> None:
        """Replace each gradient by `update_func(gradient, parameter)`."""
        for parameter in param_list:
            if parameter.requires_grad:
                value = update_func(self.get_fp32_grad_for_param(parameter), parameter)
                self.set_fp32_grad_for_param(value, parameter)

    def get_fp32_grad_partitions(self: Any) -> dict[int, dict[int, torch.Tensor]]:
        """Copies of this rank's gradients: [sub-group][parameter of it]."""
        partitions: dict[int, dict[int, torch.Tensor]] = collections.defaultdict(dict)
        for index, group in enumerate(self.fp16_groups):
            for number, parameter in enumerate(group):
                partitions[index][number] = self.get_local_fp32_grad_for_param(parameter)
        return partitions
