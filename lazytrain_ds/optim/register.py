"""Makes `"optimizer": {"type": "HybridAdamW8bit"}` work in DeepSpeed, the LazyTrain block or not.

Four additions, none of which changes anything for another optimizer: the class appears in torch.optim (DeepSpeed looks
unknown names up there), in ZeRO's list of supported optimizers (so that no flag is needed), and two engine methods
look, when the optimizer is this one, at the model (for module types) and for combinations that cannot work.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["register_with_deepspeed"]


def register_with_deepspeed() -> None:
    """Idempotent and cheap. Imports DeepSpeed: call it when DeepSpeed has been imported."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import utils as zero_utils

    from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit

    torch.optim.HybridAdamW8bit = HybridAdamW8bit  # type: ignore[attr-defined]
    if HybridAdamW8bit not in zero_utils.ZERO_SUPPORTED_OPTIMIZERS:
        zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(HybridAdamW8bit)
    _wrap(DeepSpeedEngine, "_do_optimizer_sanity_check", _before_check)
    _wrap(DeepSpeedEngine, "_configure_zero_optimizer", _around_zero)


def _wrap(cls: type, name: str, wrapper: Any) -> None:
    original = getattr(cls, name, None)
    if original is None:
        from lazytrain_ds.errors import UnsupportedError

        raise UnsupportedError(
            f"this DeepSpeed has no {cls.__name__}.{name}; LazyTrain supports DeepSpeed 0.19.8 to 0.19.x"
        )
    if getattr(original, "_lazytrain_hybrid", False):
        return

    @functools.wraps(original)
    def method(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit

        if not isinstance(optimizer, HybridAdamW8bit):
            return original(self, optimizer, *args, **kwargs)
        return wrapper(original, self, optimizer, *args, **kwargs)

    method._lazytrain_hybrid = True  # type: ignore[attr-defined]
    setattr(cls, name, method)


def _before_check(original: Any, engine: Any, optimizer: Any) -> Any:
    from lazytrain_ds.errors import UnsupportedError

    zero = engine._config.zero_config
    offload = zero.offload_optimizer
    if offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme":
        raise UnsupportedError(
            "HybridAdamW8bit cannot use DeepSpeed's NVMe optimizer offload: its swapper gives every state tensor the "
            "parameter's length and fp32 type, which damages 8-bit codes without an error. Set "
            'offload_optimizer.device to "cpu" (8-bit states take a quarter), or add a "lazytrain" block (its own '
            "store keeps them intact)."
        )
    if offload is not None and getattr(offload, "ratio", 1.0) != 1.0:
        raise UnsupportedError(
            f"HybridAdamW8bit cannot use offload_optimizer.ratio ({offload.ratio}): DeepSpeed steps the rest with a "
            'second optimizer. Remove it; with a "lazytrain" block the plan decides what is stepped where.'
        )
    if not optimizer.knows_model:
        optimizer.observe_model(engine.module)
    return original(engine, optimizer)


def _around_zero(original: Any, engine: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(engine, optimizer, *args, **kwargs)
    _count_skipped_steps(result, optimizer)
    return result


def _count_skipped_steps(zero_optimizer: Any, optimizer: Any) -> None:
    """ZeRO-3 leaves a step with non-finite gradients out by itself, before the optimizer sees it. With a loss scale
    that adapts this is normal; without one, count it as our own check does, which need not read the gradients again."""
    if not hasattr(zero_optimizer, "fp32_partitioned_groups_flat"):
        return
    optimizer.check_finite = False
    inner = zero_optimizer.step

    @functools.wraps(inner)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        if not zero_optimizer.overflow:
            optimizer.note_finished_step()
        elif not zero_optimizer.dynamic_loss_scale:
            optimizer.note_skipped_step()
        return result

    zero_optimizer.step = step
