"""The kernels as torch operations: same signature, same order of single operations, bit-identical results.

Used when there is no compiler, for tensors that are not on the CPU, and as the tests' second opinion.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy
import torch

from lazytrain_ds.optim.layout import StateLayout
from lazytrain_ds.optim.quantization import dequantize_blockwise, number_of_blocks, quantize_blockwise

__all__ = ["NORM_CHUNK", "Coefficients", "accumulate_", "chunk_sums", "squared_norm", "step_segments_"]

NORM_CHUNK, NORM_LANES = 4096, 64
_LARGEST = torch.finfo(torch.float32).max


class Coefficients(NamedTuple):
    """fp64 values in the order of csrc/common.h's `CoefficientsOf`."""

    grad_scale: float
    l2: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float
    decay: float


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded; on CPUs torch.sqrt goes through a vector library that is off by one unit in places."""
    return torch.from_numpy(numpy.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def _rounded(c: Coefficients) -> Coefficients:
    return Coefficients(*(ctypes.c_float(x).value for x in c))


def step_segments_(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, torch.Tensor],
    layout: StateLayout,
    c: Coefficients,
    out: torch.Tensor | None,
) -> None:
    """One step over flat tensors; see kernels.adamw_segments_step_."""
    exact, rounded = c, _rounded(c)
    for s, (at, block) in zip(layout.segments, layout.places, strict=True):
        c, dtype = (exact, torch.float64) if s.precision == "fp32" else (rounded, torch.float32)
        p = param.narrow(0, s.offset, s.numel)
        g = grad.narrow(0, s.offset, s.numel).to(dtype) * c.grad_scale
        if c.l2 != 0.0:
            g = g + p.to(dtype) * c.l2
        if s.precision == "fp32":
            m_state, v_state = state["exp_avg"].narrow(0, at, s.numel), state["exp_avg_sq"].narrow(0, at, s.numel)
            m = m_state.to(dtype) * c.beta1 + g * c.one_minus_beta1
            v = v_state.to(dtype) * c.beta2 + (g * g) * c.one_minus_beta2
            m_state.copy_(m)
            v_state.copy_(v)
        else:
            m_codes, v_codes = (state[k].narrow(0, at, s.numel) for k in ("exp_avg_codes", "exp_avg_sq_codes"))
            blocks = number_of_blocks(s.numel)
            m_absmax, v_absmax = (state[k].narrow(0, block, blocks) for k in ("exp_avg_absmax", "exp_avg_sq_absmax"))
            m = dequantize_blockwise(m_codes, m_absmax * c.beta1, True) + g * c.one_minus_beta1
            v = dequantize_blockwise(v_codes, v_absmax * c.beta2, False) + (g * g) * c.one_minus_beta2
            v = v.clamp_max(_LARGEST)
            for moment, codes, absmax, signed in ((m, m_codes, m_absmax, True), (v, v_codes, v_absmax, False)):
                new_codes, new_absmax = quantize_blockwise(moment, signed)
                codes.copy_(new_codes)
                absmax.copy_(new_absmax)
        p.copy_(p.to(dtype) * c.decay - (m / (_sqrt(v) + c.eps)) * c.step_size)
    if out is not None:
        out.copy_(param)


def chunk_sums(grad: torch.Tensor) -> torch.Tensor:
    """fp32 sums of squares of consecutive chunks of 4,096 elements of a flat tensor, in the order that csrc/kernels.h
    documents: element i of a chunk goes to partial sum i % 64, then the partial sums are halved pairwise."""
    flat = grad.reshape(-1).float()
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % NORM_CHUNK)).view(-1, NORM_CHUNK // NORM_LANES, NORM_LANES)
    lanes = rows.new_zeros(rows.shape[0], NORM_LANES)
    for i in range(rows.shape[1]):
        x = rows[:, i]
        lanes = lanes + x * x
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def squared_norm(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp64 sum of squares, bool: all elements finite) as 0-dim tensors on grad's device, not waiting for it."""
    if grad.numel() == 0:
        zero = torch.zeros((), dtype=torch.float64, device=grad.device)
        return zero, torch.isfinite(zero)
    sums = chunk_sums(grad).double()
    width = 1 << (sums.numel() - 1).bit_length()
    sums = torch.nn.functional.pad(sums, (0, width - sums.numel()))
    while sums.numel() > 1:
        half = sums.numel() // 2
        sums = sums[:half] + sums[half:]
    return sums[0], torch.isfinite(grad).all()


def accumulate_(dst: torch.Tensor, src: torch.Tensor) -> None:
    """dst += src in fp32, rounded to dst's dtype."""
    dst.copy_(dst.float() + src.float())
