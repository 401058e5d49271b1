"""Optimizer updates of sub-groups: by our fused kernel where the optimizer has one, by the user's optimizer else.

An update reads the gradient in its accumulation dtype, multiplies it by `gradient_scale` (1 / (loss scale * clip)),
steps the fp32 master and writes the low-precision copy. `hyper` are the parameter group's values captured at `step()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazytrain_ds.errors import OptimizerError
from lazytrain_ds.optim.convert_state import adopt_state, saved_layout, segments_tensor
from lazytrain_ds.optim.fused_adamw import FusedAdamW, hyper_parameters
from lazytrain_ds.optim.kernels import adamw_segments_step_, dequantize, quantize
from lazytrain_ds.optim.layout import FP32_KEYS, QUANTIZED_KEYS, Precision, StateLayout
from lazytrain_ds.optim.quantization import number_of_blocks
from lazytrain_ds.runtime.optimizer_states import Span, States

__all__ = ["FusedUpdater", "TorchUpdater", "Update", "Updater", "make_updater"]


@dataclass(frozen=True)
class Update:
    """One sub-group's update. `spans`: (offset, numel) of the parameters that got a gradient, None for all."""

    sub_group: int
    gradient: torch.Tensor
    hyper: dict[str, Any]
    gradient_scale: float
    spans: tuple[tuple[int, int], ...] | None = None


class Updater:
    """Makes states and applies updates to them."""

    def new_state(self, master: torch.Tensor, spans: Sequence[Span]) -> dict[str, Any]:
        """State of a sub-group before its first step, allocated, so that memory does not grow at step one."""
        return {}

    def convert(self, saved: dict[str, Any], mine: dict[str, Any], numel: int) -> dict[str, Any]:
        """A saved state, perhaps of another optimizer or precision, in the format of `mine`."""
        return saved

    def apply(self, update: Update, states: States, low_precision: torch.Tensor) -> None:
        """Run one update in the calling thread; the new weights also go to `low_precision`."""
        raise NotImplementedError

    def read_state(self, states: States, key: str, offset: int, numel: int) -> torch.Tensor:
        """A copy of state `key` of some elements, as fp32. OptimizerError if it is no state of each element."""
        return self._elements(states, key).narrow(0, offset, numel).to(torch.float32, copy=True)

    def write_state(self, states: States, key: str, offset: int, value: torch.Tensor) -> None:
        """Replace state `key` of the elements from `offset` on by `value` (flat, fp32)."""
        self._elements(states, key).narrow(0, offset, value.numel()).copy_(value)

    def _elements(self, states: States, key: str) -> torch.Tensor:
        value = states.state.get(key)
        if not torch.is_tensor(value) or value.numel() != states.master.numel():
            known = [name for name, each in states.state.items() if torch.is_tensor(each) and each.dim() > 0]
            raise OptimizerError(
                f"there is no state {key!r} with one value per element; this optimizer has "
                f"{known or 'none before its first step'}"
            )
        return value.reshape(-1)


class FusedUpdater(Updater):
    """Our optimizers: one pass over master, moments, gradient and low-precision copy, the GIL released."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def new_state(self, master: torch.Tensor, spans: Sequence[Span]) -> dict[str, Any]:
        layout = StateLayout.of(master.numel(), spans)
        state = {"step": torch.tensor(0.0), **layout.new_state(master.device)}
        if len(layout.segments) > 1:
            state["segments"] = segments_tensor(layout)
        return state

    def convert(self, saved: dict[str, Any], mine: dict[str, Any], numel: int) -> dict[str, Any]:
        return adopt_state(saved, saved_layout(mine, numel)) if saved else {}

    def apply(self, update: Update, states: States, low_precision: torch.Tensor) -> None:
        state, master = states.state, states.master.detach()
        step = int(state["step"]) + 1
        layout = saved_layout(state, master.numel())
        separate = low_precision if low_precision.dtype in (torch.bfloat16, torch.float16) else None
        options: dict[str, Any] = dict(
            hyper_parameters(update.hyper), step=step, grad_scale=update.gradient_scale, num_threads=self.threads
        )
        if update.spans is None:
            adamw_segments_step_(master, update.gradient, state, layout, out=separate, **options)
        else:
            for start, stop, precision, tensors in _pieces(layout, state, update.spans):
                adamw_segments_step_(
                    master[start:stop],
                    update.gradient[start:stop],
                    tensors,
                    StateLayout.whole(stop - start, precision),
                    out=None if separate is None else separate[start:stop],
                    **options,
                )
        state["step"] = torch.tensor(float(step))
        if separate is None and low_precision.data_ptr() != master.data_ptr():
            low_precision.copy_(master)

    def read_state(self, states: States, key: str, offset: int, numel: int) -> torch.Tensor:
        layout = saved_layout(states.state, states.master.numel())
        if key not in FP32_KEYS or not layout.quantized_numel:
            return super().read_state(states, key, offset, numel)
        value = torch.empty(numel, dtype=torch.float32)
        for start, stop, precision, tensors in _pieces(layout, states.state, ((offset, numel),)):
            target = value[start - offset : stop - offset]
            if precision == "fp32":
                target.copy_(tensors[key])
            else:
                target.copy_(dequantize(tensors[f"{key}_codes"], tensors[f"{key}_absmax"], key == FP32_KEYS[0]))
        return value

    def write_state(self, states: States, key: str, offset: int, value: torch.Tensor) -> None:
        layout = saved_layout(states.state, states.master.numel())
        if key not in FP32_KEYS or not layout.quantized_numel:
            super().write_state(states, key, offset, value)
            return
        for start, stop, precision, tensors in _pieces(layout, states.state, ((offset, value.numel()),)):
            part = value[start - offset : stop - offset].contiguous()
            if precision == "fp32":
                tensors[key].copy_(part)
            else:
                codes, absmax = quantize(part, key == FP32_KEYS[0])
                tensors[f"{key}_codes"].copy_(codes)
                tensors[f"{key}_absmax"].copy_(absmax)


def _pieces(
    layout: StateLayout, state: dict[str, Any], spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, Precision, dict[str, torch.Tensor]]]:
    """(start, stop, precision, state views) of the parts of a layout inside `spans`.

    A span is whole parameters and a quantized segment is one, so those are never cut; blocks of 256 stay whole.
    """
    for segment, (place, block) in zip(layout.segments, layout.places, strict=True):
        for offset, numel in spans:
            start, stop = max(offset, segment.offset), min(offset + numel, segment.offset + segment.numel)
            if start >= stop:
                continue
            at = place + start - segment.offset
            tensors = {}
            for key in FP32_KEYS if segment.precision == "fp32" else QUANTIZED_KEYS:
                first, count = (block, number_of_blocks(stop - start)) if "absmax" in key else (at, stop - start)
                tensors[key] = state[key][first : first + count]
            yield start, stop, segment.precision, tensors


class TorchUpdater(Updater):
    """Any torch optimizer, on a shadow of it, so that schedulers and wrappers on the instance do not interfere."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not copy.copy: Optimizer.__getstate__ drops attributes; LR schedulers patch `step` on the instance.
        self.shadow = object.__new__(type(optimizer))
        self.shadow.__dict__.update(optimizer.__dict__)
        self.shadow.__dict__.pop("step", None)
        self.optimizer = optimizer

    def apply(self, update: Update, states: States, low_precision: torch.Tensor) -> None:
        master = states.master
        gradient = update.gradient.to(torch.float32)
        if gradient is update.gradient:
            gradient = gradient.clone()
        gradient.mul_(update.gradient_scale)
        before = None
        if update.spans is not None:
            # A torch optimizer skips whole parameters only: step the sub-group, then put the others back.
            before = (master.detach().clone(), {name: _copy(value) for name, value in states.state.items()})
        self.shadow.state = self.optimizer.state
        self.shadow.param_groups = [{**update.hyper, "params": [master]}]
        master.grad = gradient
        try:
            type(self.shadow).step(self.shadow)
        finally:
            master.grad = None
            self.shadow.param_groups = []
        if before is not None:
            self._put_back(update, master, before)
        if low_precision.data_ptr() != master.data_ptr():
            low_precision.copy_(master.detach())

    def _put_back(self, update: Update, master: torch.Tensor, before: tuple[torch.Tensor, dict[str, Any]]) -> None:
        untouched = torch.ones(master.numel(), dtype=torch.bool)
        for offset, numel in update.spans:
            untouched[offset : offset + numel] = False
        master.detach()[untouched] = before[0][untouched]
        for name, value in self.optimizer.state[master].items():
            if torch.is_tensor(value) and value.shape == master.shape:
                old = before[1].get(name)
                value[untouched] = 0 if old is None else old[untouched]


def _copy(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def make_updater(optimizer: torch.optim.Optimizer, threads: int) -> Updater:
    """The fastest updater that gives this optimizer's numerics. `threads`: host threads of a fused update."""
    if isinstance(optimizer, FusedAdamW):
        return FusedUpdater(threads)
    return TorchUpdater(optimizer)
