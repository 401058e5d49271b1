"""Optimizer state from elsewhere: fp32 AdamW, bitsandbytes' AdamW8bit, another layout of our own, and back to fp32.

Kept types: codes stay uint8 and absmax values fp32 whatever the parameter's dtype (torch's own loading casts every
state but the step to it).
"""

from __future__ import annotations

from typing import Any

import torch

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.optim import kernels
from lazytrain_ds.optim.layout import FP32_KEYS, StateLayout
from lazytrain_ds.optim.quantization import BLOCK, ZERO_CODE, dynamic_map, number_of_blocks

__all__ = ["adopt_state", "fp32_moments", "segments_tensor"]

_BNB_WRAPPER = "__bnb_optimizer_quant_state__"
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))


def segments_tensor(layout: StateLayout) -> torch.Tensor:
    """int64 [segments, 3]: offset, numel, 1 if quantized. Saved with mixed states, so that they describe themselves."""
    return layout.kernel_table[:, :3].clone()


def saved_layout(state: dict[str, Any], numel: int) -> StateLayout:
    """How the moments of a native state of `numel` elements lie, read off the state itself."""
    rows = state.get("segments")
    if rows is not None:
        return StateLayout.of(numel, [(o, n, "8bit" if q else "fp32") for o, n, q in rows.tolist()])
    return StateLayout.whole(numel, "8bit" if "exp_avg_codes" in state else "fp32")


def fp32_moments(state: dict[str, Any], numel: int) -> dict[str, torch.Tensor]:
    """Flat fp32 exp_avg and exp_avg_sq of `numel` elements of a native state (on its device)."""
    layout = saved_layout(state, numel)
    layout.check_state(state)
    out = {}
    for key, signed in _MOMENTS:
        if layout.segments and all(s.precision == "fp32" for s in layout.segments):
            out[key] = state[key].detach().reshape(-1).float().clone()
            continue
        device = state[f"{key}_codes"].device if layout.quantized_numel else "cpu"
        moment = torch.empty(numel, dtype=torch.float32, device=device)
        for s, (at, block) in zip(layout.segments, layout.places, strict=True):
            target = moment.narrow(0, s.offset, s.numel)
            if s.precision == "fp32":
                target.copy_(state[key].reshape(-1).narrow(0, at, s.numel))
            else:
                codes = state[f"{key}_codes"].reshape(-1).narrow(0, at, s.numel)
                absmax = state[f"{key}_absmax"].narrow(0, block, number_of_blocks(s.numel))
                target.copy_(kernels.dequantize(codes, absmax, signed))
        out[key] = moment
    return out


def _from_moments(
    moments: dict[str, torch.Tensor], layout: StateLayout, device: torch.device
) -> dict[str, torch.Tensor]:
    state = layout.new_state(device)
    for key, signed in _MOMENTS:
        moment = moments[key].detach().reshape(-1).to(device=device, dtype=torch.float32)
        for s, (at, block) in zip(layout.segments, layout.places, strict=True):
            part = moment.narrow(0, s.offset, s.numel)
            if s.precision == "fp32":
                state[key].narrow(0, at, s.numel).copy_(part)
            else:
                codes, absmax = kernels.quantize(part.contiguous(), signed)
                state[f"{key}_codes"].narrow(0, at, s.numel).copy_(codes)
                state[f"{key}_absmax"].narrow(0, block, absmax.numel()).copy_(absmax)
    return state


def _from_bitsandbytes(saved: dict[str, Any], layout: StateLayout, device: torch.device) -> dict[str, torch.Tensor]:
    first, second = saved["state1"].detach(), saved["state2"].detach()
    if first.dtype != torch.uint8:
        return _from_moments({"exp_avg": first.float(), "exp_avg_sq": second.float()}, layout, device)
    numel = first.numel()
    for key, signed in (("qmap1", True), ("qmap2", False)):
        theirs, ours = saved[key].float().cpu(), dynamic_map(signed)
        if not torch.allclose(theirs, ours, rtol=1e-5, atol=0) or saved["absmax1"].numel() != number_of_blocks(numel):
            raise ConfigError(
                f"the bitsandbytes state with {saved['absmax1'].numel()} absmax values for {numel} elements is not "
                f"blockwise dynamic 8-bit with blocks of {BLOCK}; load it with bitsandbytes and save fp32 states"
            )
    m_codes, v_codes = first.reshape(-1).cpu().clone(), second.reshape(-1).cpu().clone()
    # Their rule lets a second moment vanish before the first one; ours does not (csrc/map_memory.h).
    v_codes[(v_codes == 0) & (m_codes != ZERO_CODE[True])] = 1
    native = {
        "exp_avg_codes": m_codes,
        "exp_avg_absmax": saved["absmax1"].float().cpu().clone(),
        "exp_avg_sq_codes": v_codes,
        "exp_avg_sq_absmax": saved["absmax2"].float().cpu().clone(),
    }
    return _fit(native, StateLayout.whole(numel, "8bit"), layout, device)


def _fit(state: dict[str, Any], have: StateLayout, want: StateLayout, device: torch.device) -> dict[str, torch.Tensor]:
    if have == want:  # bit-exact
        have.check_state(state)
        return {k: state[k].detach().to(device=device, copy=True) for k in have.shapes()}
    return _from_moments(fp32_moments(state, have.numel), want, device)


def adopt_state(saved: dict[str, Any], layout: StateLayout, device: torch.device | str = "cpu") -> dict[str, Any]:
    """A state in `layout` on `device`, made from any state named in this module's docstring. Copies everything.

    Raises ConfigError for a state of other optimizers or of another number of elements, naming what it found.
    """
    device = torch.device(device)
    saved = {**saved, **saved.get(_BNB_WRAPPER, {})}
    step = saved.get("step", 0)
    if "max_exp_avg_sq" in saved:
        raise ConfigError("the saved optimizer state is AMSGrad's (it has max_exp_avg_sq), which is not supported")
    if {"state1", "state2"} <= saved.keys():
        sizes, build = {saved["state1"].numel()}, lambda: _from_bitsandbytes(saved, layout, device)
    elif "exp_avg_codes" in saved or set(FP32_KEYS) <= saved.keys():
        if "exp_avg_codes" in saved and "segments" not in saved:
            sizes = {saved["exp_avg_codes"].numel()}
        elif "segments" in saved:
            sizes = {int(saved["segments"][:, 1].sum())}
        else:
            sizes = {saved[k].numel() for k in FP32_KEYS}
        native = {k: v for k, v in saved.items() if k != "step"}
        build = lambda: _fit(native, saved_layout(native, layout.numel), layout, device)
    elif layout.numel == 0:
        sizes, build = {0}, lambda: {}
    else:
        raise ConfigError(
            f"the saved optimizer state has {sorted(saved)}; known are AdamW's exp_avg and exp_avg_sq, our "
            "exp_avg_codes, and bitsandbytes' state1 and state2"
        )
    if sizes != {layout.numel}:
        raise ConfigError(
            f"the saved optimizer state is for {sorted(sizes)} elements, the parameter has {layout.numel}"
        )
    state: dict[str, Any] = build()
    state["step"] = torch.tensor(float(step), dtype=torch.float32)
    if len(layout.segments) > 1:
        state["segments"] = segments_tensor(layout)
    return state
