"""The step on CUDA: bitsandbytes' blockwise op for quantized segments, torch's fused AdamW for the others.

The state's layout is the CPU's, so a state moves between host and device as it is. The gradient scale (loss scale and
clip coefficient) goes into the op. How its results differ from the CPU step:

* decoupled weight decay is applied after the update instead of before: a difference of order lr^2 * weight_decay;
* an element whose gradient is not finite is skipped by itself (the optimizer refuses the whole step before);
* second moments are rounded to the plain nearest code, so a tiny one may become 0 (then its element's next update is
  bounded by the next gradient's own second moment, not by the lost one);
* a first moment that rounds to zero keeps its sign by taking the neighbouring code;
* arithmetic is fused and approximate in the last place.

The convergence tests bound them together; bit-exactness holds between CPU runs only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lazytrain_ds.errors import UnsupportedError
from lazytrain_ds.optim.layout import StateLayout
from lazytrain_ds.optim.quantization import dynamic_map, number_of_blocks

__all__ = ["cuda_segments_step_"]


@functools.cache
def _maps(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return dynamic_map(True).to(device), dynamic_map(False).to(device)


def _blockwise_op() -> Any:
    try:
        import bitsandbytes  # noqa: F401  (registers the op)
    except ImportError as error:
        raise UnsupportedError(
            "8-bit states on CUDA need bitsandbytes; install it with: pip install bitsandbytes"
        ) from error
    return torch.ops.bitsandbytes.optimizer_update_8bit_blockwise


def cuda_segments_step_(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, Any],
    layout: StateLayout,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    bias_correction: bool = True,
    out: torch.Tensor | None = None,
) -> None:
    """As kernels.adamw_segments_step_, for CUDA tensors. UnsupportedError for L2 decay or missing bias correction."""
    if not bias_correction or (not decoupled and weight_decay):
        raise UnsupportedError(
            "on CUDA, 8-bit states support AdamW with bias correction only; set adam_w_mode and bias_correction to true"
        )
    p_flat, g_flat = param.detach().view(-1), grad.detach().view(-1)
    for s, (at, block) in zip(layout.segments, layout.places, strict=True):
        p, g = p_flat.narrow(0, s.offset, s.numel), g_flat.narrow(0, s.offset, s.numel)
        if s.precision == "fp32":
            m, v = (state[k].view(-1).narrow(0, at, s.numel) for k in ("exp_avg", "exp_avg_sq"))
            torch._fused_adamw_(
                [p], [g.float() * grad_scale], [m], [v], [], [torch.tensor(float(step), device=p.device)],
                amsgrad=False, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, maximize=False,
            )  # fmt: skip
            continue
        codes = [state[k].view(-1).narrow(0, at, s.numel) for k in ("exp_avg_codes", "exp_avg_sq_codes")]
        absmax = [state[k].narrow(0, block, number_of_blocks(s.numel)) for k in ("exp_avg_absmax", "exp_avg_sq_absmax")]
        _blockwise_op()(
            "adam", g, p, codes[0], codes[1], beta1, beta2, 0.0, 0.0, eps, step, lr, *_maps(p.device),
            absmax[0], absmax[1], weight_decay, grad_scale, False,
        )  # fmt: skip
    if out is not None:
        out.view(-1).copy_(p_flat)
