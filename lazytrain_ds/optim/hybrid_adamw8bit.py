"""HybridAdamW8bit: AdamW with blockwise 8-bit moments, and fp32 moments where 8 bits hurt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.optim.fused_adamw import FusedAdamW, logger
from lazytrain_ds.optim.layout import Precision, Segment, StateLayout
from lazytrain_ds.optim.policy import PrecisionChoice, PrecisionPolicy
from lazytrain_ds.optim.segments import find_segments

__all__ = ["HybridAdamW8bit"]


class HybridAdamW8bit(FusedAdamW):
    """AdamW whose moments are blockwise 8-bit (2.03 bytes per parameter instead of 8), except for tensors of fewer than
    `min_8bit_size` elements, embeddings, norms and biases, which keep fp32.

    Module types come from `model` (or `observe_model`; with DeepSpeed that happens by itself). `fp32_parameters` and
    `quantized_parameters` are globs over parameter names that override the rule. Everything else is FusedAdamW's, the
    skipping of non-finite gradients included. `state_dict_precision="fp32"` makes `state_dict()` write fp32 moments:
    four times as large, and readable by plain AdamW and DeepSpeed's universal checkpoint converter; resuming from it is
    not bit-exact, because moments are quantized anew.

    On CUDA bitsandbytes' blockwise op does the step; lazytrain_ds/optim/cuda_step.py says how it differs.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        model: nn.Module | None = None,
        min_8bit_size: int = 4096,
        fp32_parameters: Sequence[str] = (),
        quantized_parameters: Sequence[str] = (),
        state_dict_precision: str = "8bit",
        **options: Any,
    ) -> None:
        if state_dict_precision not in ("8bit", "fp32"):
            raise ConfigError(f'state_dict_precision is {state_dict_precision!r}; use "8bit" or "fp32"')
        self._policy = PrecisionPolicy(min_8bit_size, fp32_parameters, quantized_parameters)
        self.state_dict_precision = state_dict_precision
        self._warned_unknown = False
        super().__init__(params, lr, betas, eps, weight_decay, **options)
        # What the optimizer was built from: DeepSpeed puts flat partitions into param_groups later.
        self._built_from = [list(g["params"]) for g in self.param_groups]
        if model is not None:
            self.observe_model(model)
        elif any("param_names" in g for g in self.param_groups):
            for g in self.param_groups:
                self._policy.observe_names(zip(g.get("param_names", ()), g["params"], strict=False))

    _own_attributes = (
        *FusedAdamW._own_attributes,
        "state_dict_precision",
        "_policy",
        "_built_from",
        "_warned_unknown",
    )

    # --- which precision where ---

    def observe_model(self, model: nn.Module) -> None:
        """Learns parameter names and module types. Before the first step: layouts are not changed afterwards."""
        self._policy.observe(model)

    @property
    def knows_model(self) -> bool:
        """Whether module types are known; without, only sizes and names decide."""
        return self._policy.knows_model

    def choice(self, param: torch.Tensor) -> PrecisionChoice:
        """(precision, reason) for one of the model's parameters, as shown in the plan."""
        return self._policy.choice(param)

    def precision_of(self, param: torch.Tensor) -> Precision:
        """`"fp32"` or `"8bit"` for one of the model's parameters (whole or partitioned by ZeRO-3)."""
        return self._policy.choice(param).precision

    def set_segments(self, flat: torch.Tensor, segments: Iterable[Segment | tuple[int, int, Precision]]) -> StateLayout:
        """Tells where the parameters lie in a flat partition, before its state is made: (offset, numel, precision) in
        order, without gaps. Returns the layout. Raises ConfigError if they do not cover the partition."""
        layout = self._layouts[flat] = StateLayout.of(flat.numel(), segments)
        return layout

    def _decide_layout(self, param: torch.Tensor) -> StateLayout:
        current = next((g["params"] for g in self.param_groups if any(p is param for p in g["params"])), [param])
        segments = find_segments(param, current, self._built_from, self.precision_of)
        if segments is None or not self._policy.knows_model:
            self._warn_unknown(segments is None)
        if segments is None:
            small = param.numel() < self._policy.min_8bit_size
            return StateLayout.whole(param.numel(), "fp32" if small else "8bit")
        return StateLayout.of(param.numel(), segments)

    def _warn_unknown(self, flat: bool) -> None:
        if self._warned_unknown:
            return
        self._warned_unknown = True
        what = "where the model's parameters lie in a flat tensor" if flat else "the model's module types"
        logger.warning(
            "HybridAdamW8bit does not know %s, so sizes alone decide which moments are 8-bit and embeddings may be "
            "among them. Pass model=..., call observe_model(model), or tell with set_segments().",
            what,
        )

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        """As torch's; with `state_dict_precision="fp32"` the moments are fp32."""
        return self.fp32_state_dict() if self.state_dict_precision == "fp32" else super().state_dict()

    def state_bytes(self) -> dict[str, int]:
        """Bytes of moments now held, and what fp32 moments would take."""
        layouts = [self.layout_of(p) for p, s in self.state.items() if s]
        return {"held": sum(x.state_bytes for x in layouts), "fp32": sum(8 * x.numel for x in layouts)}
