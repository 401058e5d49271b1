"""Which optimizer object a config's "optimizer" section becomes under LazyTrain, and what is said about it."""

from __future__ import annotations

from typing import Any

import torch

from lazytrain_ds.optim.fused_adamw import FusedAdamW

__all__ = ["describe_optimizer", "make_basic_optimizer"]

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


def describe_optimizer(optimizer: torch.optim.Optimizer, from_script: bool) -> str:
    """One sentence: which optimizer runs, where it came from, and what that means for its states.

    `from_script`: the user's script (or accelerate for it) passed the object; otherwise the config named it.
    """
    package = type(optimizer).__module__.partition(".")[0].replace("lazytrain_ds", "LazyTrain")
    kind = f"{package}'s {type(optimizer).__name__}"
    source = "as the script passed it" if from_script else 'from the config\'s "optimizer"'
    if isinstance(optimizer, FusedAdamW):
        return f"optimizer: {kind}, {source}; one fused pass, states in any tier"
    return (
        f"optimizer: {kind}, {source}; it steps each block's parameters as one flat fp32 vector on the host, "
        'and its states stay in host memory (for other tiers write "optimizer": {"type": "AdamW", ...} in the config'
        + (" instead of passing one)" if from_script else ")")
    )
