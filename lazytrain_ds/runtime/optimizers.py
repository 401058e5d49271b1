"""Which optimizer object a config's "optimizer" section becomes under LazyTrain."""

from __future__ import annotations

from typing import Any

from lazytrain_ds.optim.fused_adamw import FusedAdamW

__all__ = ["make_basic_optimizer"]

ADAM_NAMES = ("adam", "adamw")


def make_basic_optimizer(name: str | None, parameters: dict[str, Any] | None, model_parameters: Any) -> Any:
    """Adam and AdamW as our own fused host optimizer; None for every other type (DeepSpeed builds it).

    `torch_adam` and `fp32_optimizer_states` choose between DeepSpeed's implementations and mean nothing here.
    """
    if name is None or name.lower() not in ADAM_NAMES:
        return None
    values = dict(parameters or {})
    if "max_grad_norm" in values:
        return None  # DeepSpeed's own error says what to use instead
    for ignored in ("torch_adam", "fp32_optimizer_states", "adamw_mode"):
        values.pop(ignored, None)
    decoupled = values.pop("adam_w_mode", True) or name.lower() == "adamw"
    if values.pop("amsgrad", False):
        return None
    # The norm over all gradients tells whether they are finite before any update starts.
    return FusedAdamW(model_parameters, adam_w_mode=decoupled, check_finite=False, **values)
