"""AdamW over the fused CPU kernel, as a torch optimizer and as an explicit update for worker threads."""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from lazytrain_ds.errors import ConfigError, OptimizerError
from lazytrain_ds.optim import kernels
from lazytrain_ds.optim.convert_state import adopt_state, fp32_moments, segments_tensor
from lazytrain_ds.optim.layout import StateLayout

__all__ = ["FusedAdamW", "hyper_parameters"]

logger = logging.getLogger(__name__)


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """What a step needs of a parameter group, as plain numbers: captured now, another thread can use it later."""
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "decoupled": bool(group.get("adam_w_mode", True)),
        "bias_correction": bool(group.get("bias_correction", True)),
    }


def _check(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    def number(x: Any) -> bool:
        return isinstance(x, int | float | torch.Tensor) and not isinstance(x, bool) and math.isfinite(float(x))

    if not number(lr) or float(lr) < 0:
        raise ConfigError(f"lr is {lr!r}; it must be a number of at least 0, for instance 1e-4")
    if not (
        isinstance(betas, list | tuple) and len(betas) == 2 and all(number(b) and 0 <= float(b) < 1 for b in betas)
    ):
        raise ConfigError(f"betas is {betas!r}; it must be two numbers in [0, 1), for instance [0.9, 0.999]")
    if not number(eps) or float(eps) < 0:
        raise ConfigError(f"eps is {eps!r}; it must be a number of at least 0, for instance 1e-8")
    if not number(weight_decay) or float(weight_decay) < 0:
        raise ConfigError(f"weight_decay is {weight_decay!r}; it must be a number of at least 0, for instance 0.01")


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (or Adam with L2, `adam_w_mode=False`) with fp32 moments; state keys as torch's: step, exp_avg, exp_avg_sq.

    Non-finite gradients: nothing changes, `last_step_skipped` is True, `skipped_steps` counts; `max_skipped_steps` in a
    row raise OptimizerError (None: never). `check_finite=False` leaves the check, one read of the gradients, to the
    caller. Parameters in bf16 or fp16 are updated in fp32 and rounded; keep an fp32 master copy for training. Those on
    a CPU are updated by `num_threads` threads (default: torch's) with the GIL released.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        max_skipped_steps: int | None = 3,
        check_finite: bool = True,
        num_threads: int | None = None,
    ) -> None:
        _check(lr, betas, eps, weight_decay)
        if max_skipped_steps is not None and (not isinstance(max_skipped_steps, int) or max_skipped_steps < 1):
            raise ConfigError(f"max_skipped_steps is {max_skipped_steps!r}; it must be at least 1, or null for never")
        self.max_skipped_steps, self.check_finite, self.num_threads = max_skipped_steps, check_finite, num_threads
        self.skipped_steps = self.skipped_in_a_row = 0
        self.last_step_skipped = False
        self._layouts: dict[torch.Tensor, StateLayout] = {}
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)

    # --- layouts and states ---

    def layout_of(self, param: torch.Tensor) -> StateLayout:
        """How the moments of a parameter (or flat partition) are stored; decided on first use."""
        layout = self._layouts.get(param)
        if layout is None or layout.numel != param.numel():
            layout = self._layouts[param] = self._decide_layout(param)
        return layout

    def _decide_layout(self, param: torch.Tensor) -> StateLayout:
        return StateLayout.whole(param.numel(), "fp32")

    def new_state(self, param: torch.Tensor) -> dict[str, Any]:
        """Zero moments and step 0 for a parameter, on its device."""
        layout = self.layout_of(param)
        return self._finish_state(param, layout, {"step": torch.tensor(0.0), **layout.new_state(param.device)})

    def _finish_state(self, param: torch.Tensor, layout: StateLayout, state: dict[str, Any]) -> dict[str, Any]:
        if len(layout.segments) > 1:
            state["segments"] = segments_tensor(layout)
        elif layout.fp32_numel:  # as torch has it, so that torch.optim.AdamW can load it
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].view(param.shape)
        return state

    def adopt(self, param: torch.Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        """A state for `param` made from a saved one of another optimizer or layout (convert_state.adopt_state)."""
        layout = self.layout_of(param)
        return self._finish_state(param, layout, adopt_state(saved, layout, param.device))

    # --- the update ---

    def update(
        self,
        param: torch.Tensor,
        state: dict[str, Any],
        grad: torch.Tensor,
        hyper: dict[str, Any],
        grad_scale: float = 1.0,
        out: torch.Tensor | None = None,
        num_threads: int | None = None,
    ) -> None:
        """One step of one contiguous fp32 parameter (flat or not), in place; usable from any thread.

        state: from `new_state` or `adopt`, updated (its step too). grad: fp32, bf16 or fp16, finite, same numel.
        hyper: from `hyper_parameters`, captured when the step was asked for. grad_scale multiplies the gradient (loss
        scale and clip coefficient in one). out: a bf16 or fp16 copy of the new parameter, written in the same pass.
        """
        step = int(state["step"]) + 1
        self._kernel(param, grad, state, self.layout_of(param), step, hyper, grad_scale, out, num_threads)
        state["step"] = torch.tensor(float(step))  # a new tensor: loaders may share one between parameters

    def _kernel(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
        layout: StateLayout,
        step: int,
        hyper: dict[str, Any],
        grad_scale: float,
        out: torch.Tensor | None,
        num_threads: int | None,
    ) -> None:
        threads = self.num_threads if num_threads is None else num_threads
        options = dict(hyper, step=step, grad_scale=grad_scale, out=out)
        if param.device.type == "cuda":
            from lazytrain_ds.optim.cuda_step import cuda_segments_step_

            cuda_segments_step_(param, grad, state, layout, **options)
            return
        kernels.adamw_segments_step_(param, grad, state, layout, **options, num_threads=threads)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient. Changes nothing if any gradient is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, p in work:
            if p.grad.is_sparse:
                raise ConfigError("sparse gradients are not supported; build the embedding with sparse=False")
        if self.check_finite and not self._gradients_finite([p.grad for _, p in work]):
            self.note_skipped_step()
            return loss
        self.note_finished_step()
        for group, p in work:
            state = self._ready_state(p)
            hyper = hyper_parameters(group)
            if p.dtype == torch.float32 and p.is_contiguous():
                self.update(p, state, p.grad.contiguous(), hyper)
            else:
                self._update_through_fp32(p, state, hyper)
        return loss

    def _ready_state(self, p: torch.Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state.update(self.new_state(p))
            return state
        layout = self.layout_of(p)
        segments = state.get("segments")
        described = len(layout.segments) < 2 or (
            segments is not None and torch.equal(segments.cpu(), layout.kernel_table[:, :3])
        )
        keys = set(layout.shapes())
        if not described or keys != set(state) - {
            "step",
            "segments",
        }:  # put there by a loader, for instance DeepSpeed's
            adopted = self.adopt(p, state)
            state.clear()
            state.update(adopted)
        return state

    def _update_through_fp32(self, p: torch.Tensor, state: dict[str, Any], hyper: dict[str, Any]) -> None:
        if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"a parameter is {p.dtype}; supported are float32, bfloat16 and float16")
        copy = p.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._layouts[copy] = self.layout_of(p)
        try:
            self.update(copy, state, p.grad.contiguous(), hyper)
        finally:
            del self._layouts[copy]
        p.copy_(copy)

    # --- non-finite gradients ---

    def _gradients_finite(self, grads: list[torch.Tensor]) -> bool:
        flags = []
        for g in grads:
            if g.device.type == "cpu":
                g = g.contiguous()
                if g.dtype in (torch.float32, torch.bfloat16, torch.float16):
                    if not kernels.squared_norm(g, num_threads=self.num_threads)[1]:
                        return False
                    continue
            flags.append(torch.isfinite(g).all())
        return all(bool(f) for f in flags)

    def note_skipped_step(self) -> None:
        """A whole step was left out because of non-finite gradients; raises OptimizerError after too many in a row."""
        self.last_step_skipped = True
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        if self.max_skipped_steps is not None and self.skipped_in_a_row >= self.max_skipped_steps:
            raise OptimizerError(
                f"{self.skipped_in_a_row} steps in a row had NaN or infinite gradients; the parameters are those from "
                "before. Lower the learning rate, look at the data of the last batches, or set max_skipped_steps"
            )
        logger.warning(
            "step skipped: NaN or infinite gradients (%d in a row, %d in all); parameters and states are unchanged",
            self.skipped_in_a_row,
            self.skipped_steps,
        )

    def note_finished_step(self) -> None:
        """A step was done: the count of skipped steps in a row starts again."""
        self.last_step_skipped = False
        self.skipped_in_a_row = 0

    # --- saving and loading ---

    def fp32_state_dict(self) -> dict[str, Any]:
        """`state_dict()` with fp32 moments throughout, as torch.optim.AdamW and DeepSpeed's converters want it."""
        out = torch.optim.Optimizer.state_dict(self)
        order = list(itertools.chain.from_iterable(g["params"] for g in self.param_groups))
        for index, state in out["state"].items():
            p = order[index]
            moments = fp32_moments({k: v for k, v in state.items() if k != "step"}, p.numel())
            out["state"][index] = {"step": state["step"], **{k: v.view(p.shape) for k, v in moments.items()}}
        return out

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, torch's AdamW, bitsandbytes' AdamW8bit or a DeepSpeed checkpoint's.

        Every state is converted to this optimizer's layout; one saved in the same layout is loaded bit for bit. Raises
        ConfigError, before anything changes, if groups, sizes or kinds do not fit.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        have, found = ([len(g["params"]) for g in x] for x in (groups, saved_groups))
        if have != found:
            raise ConfigError(f"the saved optimizer has groups of {found} parameters, this one has {have}")
        saved_ids = itertools.chain.from_iterable(g["params"] for g in saved_groups)
        params = itertools.chain.from_iterable(g["params"] for g in groups)
        by_id = dict(zip(saved_ids, params, strict=True))
        state: dict[Any, dict[str, Any]] = defaultdict(dict)
        for key, saved in state_dict["state"].items():
            if key not in by_id:
                raise ConfigError(
                    f"the saved optimizer has a state for parameter {key!r}, which is in none of its groups"
                )
            if saved:
                state[by_id[key]] = self.adopt(by_id[key], saved)
        new_groups = [
            {**group, **{k: v for k, v in saved.items() if k in group}, "params": group["params"]}
            for group, saved in zip(groups, saved_groups, strict=True)
        ]
        for group in new_groups:
            group["betas"] = tuple(group["betas"])
        self.__setstate__({"state": state, "param_groups": new_groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    _own_attributes: tuple[str, ...] = (
        "check_finite",
        "last_step_skipped",
        "max_skipped_steps",
        "num_threads",
        "skipped_in_a_row",
        "skipped_steps",
        "_layouts",
    )

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps three attributes only; copies and pickles need ours too.
        return {**super().__getstate__(), **{k: self.__dict__[k] for k in self._own_attributes}}
