"""The CPU kernels: one fused AdamW pass over fp32 or 8-bit moments, the gradient norm, accumulation, quantization.

All functions take tensors whose elements lie contiguously (any shape, length and alignment), work in place and release
the GIL. `num_threads` is the caller's choice (default: `torch.get_num_threads()`); results do not depend on it, nor on
how a buffer is cut at multiples of 256 elements, nor on the instruction set. `isa` is "auto" (or the value of
`LAZYTRAIN_CPU_ISA`), "avx512", "avx2", "portable" or "torch". Tensors on another device always go through torch.

Numerics of a step with step count t. With fp32 moments everything is computed in fp64 and rounded when stored; with
8-bit moments in fp32, from hyper-parameters rounded once:

    g = grad * grad_scale  (+ weight_decay * param, if not decoupled)
    m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g g
    param = param (1 - lr weight_decay) - step_size m / (sqrt(v) + eps sqrt(1 - beta2^t))
    step_size = lr sqrt(1 - beta2^t) / (1 - beta1^t)

The parameter update uses m and v before they are quantized.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable

import torch

from lazytrain_ds.errors import ConfigError, UnsupportedError
from lazytrain_ds.optim import reference
from lazytrain_ds.optim.builder import load_library
from lazytrain_ds.optim.layout import FP32_KEYS, StateLayout
from lazytrain_ds.optim.quantization import dequantize_blockwise, kernel_tables, number_of_blocks, quantize_blockwise
from lazytrain_ds.optim.reference import Coefficients

__all__ = [
    "accumulate_",
    "adamw8bit_step_",
    "adamw_segments_step_",
    "adamw_step_",
    "available_isas",
    "coefficients",
    "dequantize",
    "quantize",
    "squared_norm",
    "squared_norm_tensors",
]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_OUT = 3
_ISAS = {"auto": 0, "portable": 1, "avx2": 2, "avx512": 3}


def available_isas() -> tuple[str, ...]:
    """Implementations that run on this machine, best first; "torch" is always the last."""
    library = load_library()
    if library is None:
        return ("torch",)
    best = library.lt_best_isa()
    return (*(name for name, number in reversed(_ISAS.items()) if 0 < number <= best), "torch")


def _choose(isa: str | None, *tensors: torch.Tensor | None) -> tuple[ctypes.CDLL | None, int]:
    """(library, instruction set number), or (None, 0) for torch."""
    name = isa or os.environ.get("LAZYTRAIN_CPU_ISA") or "auto"
    if name != "torch" and name not in _ISAS:
        raise ConfigError(f"instruction set {name!r} is unknown; use one of auto, avx512, avx2, portable, torch")
    if name == "torch" or any(t is not None and t.device.type != "cpu" for t in tensors):
        return None, 0
    return load_library(), _ISAS[name]


def _call(status: int, number: int) -> None:
    if status:
        name = {v: k for k, v in _ISAS.items()}[number]
        have = ", ".join(available_isas())
        raise UnsupportedError(
            f"this processor has no {name}; it has {have}. Unset LAZYTRAIN_CPU_ISA or choose one of these"
        )


def _flat(t: torch.Tensor, what: str, dtypes: Iterable[torch.dtype] = _DTYPES) -> torch.Tensor:
    """A flat alias of `t`; ConfigError if it is strided or of another dtype."""
    if t.dtype not in dtypes:
        raise ConfigError(f"{what} is {t.dtype}; it must be one of {', '.join(map(str, dtypes))}")
    if not t.is_contiguous():
        raise ConfigError(f"{what} is not contiguous (strides {tuple(t.stride())}); pass a contiguous tensor")
    return t.detach().view(-1)


def _pointer(t: torch.Tensor | None) -> int | None:
    return None if t is None or t.numel() == 0 else t.data_ptr()


def _threads(num_threads: int | None) -> int:
    return max(1, torch.get_num_threads() if num_threads is None else int(num_threads))


def coefficients(
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
) -> Coefficients:
    """The nine numbers of one step (`step` counts from 1), in fp64."""
    if step < 1:
        raise ConfigError(f"step is {step}; the first step is 1")
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = math.sqrt(1.0 - beta2**step) if bias_correction else 1.0
    return Coefficients(
        grad_scale,
        0.0 if decoupled else weight_decay,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps * correction2,
        lr * correction2 / correction1,
        1.0 - lr * weight_decay if decoupled else 1.0,
    )


def adamw_segments_step_(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, torch.Tensor],
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
    num_threads: int | None = None,
    isa: str | None = None,
) -> None:
    """One AdamW (decoupled) or Adam (L2) step of `param`, moments as `layout` says.

    param: fp32 master, updated. grad: fp32, bf16 or fp16, same numel, left as it is; `grad_scale` multiplies it (loss
    scale and clip coefficient). state: the tensors of `layout`, updated. out: bf16 or fp16 tensor of the same numel;
    it gets the new parameter. Gradients must be finite (the optimizer checks; NaN leaves a state that cannot be used).
    """
    p, g = _flat(param, "param", (torch.float32,)), _flat(grad, "grad")
    o = None if out is None else _flat(out, "out", (torch.bfloat16, torch.float16))
    for name, t in (("grad", g), ("out", o), ("layout", layout)):
        n = t.numel if isinstance(t, StateLayout) else p.numel() if t is None else t.numel()
        if n != p.numel():
            raise ConfigError(f"{name} has {n} elements, param has {p.numel()}; they must be equal")
    layout.check_state(state)
    flat = {k: _flat(state[k], k, (dtype,)) for k, (dtype, _) in layout.shapes().items()}
    c = coefficients(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
        decoupled=decoupled,
        bias_correction=bias_correction,
    )
    library, number = _choose(isa, p, g, o, *flat.values())
    if library is None:
        with torch.no_grad():
            reference.step_segments_(p, g, flat, layout, c, o)
        return
    table, packed = layout.kernel_table, (ctypes.c_double * 9)(*c)
    moments = ("exp_avg", "exp_avg_sq", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg_absmax", "exp_avg_sq_absmax")
    status = library.lt_step(
        _pointer(p),
        _pointer(g),
        _DTYPES[g.dtype],
        *(_pointer(flat.get(k)) for k in moments),
        _pointer(o),
        _NO_OUT if o is None else _DTYPES[o.dtype],
        _pointer(table),
        len(layout.segments),
        packed,
        kernel_tables(),
        number,
        _threads(num_threads),
    )
    _call(status, number)


def adamw_step_(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, **options: object
) -> None:
    """`adamw_segments_step_` with fp32 moments throughout: exp_avg and exp_avg_sq are fp32 with param's numel."""
    state = dict(zip(FP32_KEYS, (exp_avg, exp_avg_sq), strict=True))
    adamw_segments_step_(param, grad, state, StateLayout.whole(param.numel(), "fp32"), **options)  # type: ignore[arg-type]


def adamw8bit_step_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg_codes: torch.Tensor,
    exp_avg_absmax: torch.Tensor,
    exp_avg_sq_codes: torch.Tensor,
    exp_avg_sq_absmax: torch.Tensor,
    **options: object,
) -> None:
    """`adamw_segments_step_` with 8-bit moments throughout: uint8 codes [numel], fp32 absmax [ceil(numel / 256)]."""
    state = {
        "exp_avg_codes": exp_avg_codes,
        "exp_avg_absmax": exp_avg_absmax,
        "exp_avg_sq_codes": exp_avg_sq_codes,
        "exp_avg_sq_absmax": exp_avg_sq_absmax,
    }
    adamw_segments_step_(param, grad, state, StateLayout.whole(param.numel(), "8bit"), **options)  # type: ignore[arg-type]


def squared_norm(grad: torch.Tensor, *, num_threads: int | None = None, isa: str | None = None) -> tuple[float, bool]:
    """(sum of squares, all elements finite) of one parameter's gradient, as DESIGN.md section 5 defines it.

    fp32 sums over chunks of 4,096 elements, added up in fp64 in one fixed order: the same value on every device, with
    any number of threads and any instruction set. The sum is infinite if a chunk's squares overflow fp32, even if
    `finite` is True. A model's norm is the square root of the sum over parameters, in registration order, in fp64.
    """
    g = _flat(grad, "grad")
    library, number = _choose(isa, g)
    if library is None:
        total, finite = reference.squared_norm(g)
        return float(total), bool(finite)
    total_c, finite_c = ctypes.c_double(), ctypes.c_int()
    status = library.lt_squared_norm(
        _pointer(g),
        _DTYPES[g.dtype],
        g.numel(),
        number,
        _threads(num_threads),
        ctypes.byref(total_c),
        ctypes.byref(finite_c),
    )
    _call(status, number)
    return total_c.value, bool(finite_c.value)


def squared_norm_tensors(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`squared_norm` as 0-dim tensors (fp64, bool) on the gradient's device, without a synchronization."""
    if grad.device.type == "cpu":
        total, finite = squared_norm(grad)
        return torch.tensor(total, dtype=torch.float64), torch.tensor(finite)
    return reference.squared_norm(_flat(grad, "grad"))


def accumulate_(
    dst: torch.Tensor, src: torch.Tensor, *, num_threads: int | None = None, isa: str | None = None
) -> None:
    """dst += src, both fp32, bf16 or fp16 in any mix: added in fp32, rounded to dst's dtype."""
    d, s = _flat(dst, "dst"), _flat(src, "src")
    if d.numel() != s.numel():
        raise ConfigError(f"src has {s.numel()} elements, dst has {d.numel()}; they must be equal")
    library, number = _choose(isa, d, s)
    if library is None:
        reference.accumulate_(d, s)
        return
    status = library.lt_accumulate(
        _pointer(d), _DTYPES[d.dtype], _pointer(s), _DTYPES[s.dtype], d.numel(), number, _threads(num_threads)
    )
    _call(status, number)


def quantize(
    x: torch.Tensor, signed: bool, *, num_threads: int | None = None, isa: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantization.quantize_blockwise through the kernel: flat (uint8 codes [n], fp32 absmax [ceil(n / 256)])."""
    flat = _flat(x, "x", (torch.float32,))
    library, number = _choose(isa, flat)
    if library is None:
        return quantize_blockwise(flat, signed)
    codes = torch.empty(flat.numel(), dtype=torch.uint8)
    absmax = torch.empty(number_of_blocks(flat.numel()), dtype=torch.float32)
    status = library.lt_quantize(
        _pointer(flat),
        _pointer(absmax),
        _pointer(codes),
        flat.numel(),
        kernel_tables(),
        int(signed),
        number,
        _threads(num_threads),
    )
    _call(status, number)
    return codes, absmax


def dequantize(
    codes: torch.Tensor, absmax: torch.Tensor, signed: bool, *, num_threads: int | None = None, isa: str | None = None
) -> torch.Tensor:
    """quantization.dequantize_blockwise through the kernel: flat fp32."""
    c, a = _flat(codes, "codes", (torch.uint8,)), _flat(absmax, "absmax", (torch.float32,))
    if a.numel() != number_of_blocks(c.numel()):
        raise ConfigError(f"absmax has {a.numel()} values; {c.numel()} codes need {number_of_blocks(c.numel())}")
    library, number = _choose(isa, c, a)
    if library is None:
        return dequantize_blockwise(c, a, signed)
    x = torch.empty(c.numel(), dtype=torch.float32)
    status = library.lt_dequantize(
        _pointer(c), _pointer(a), _pointer(x), c.numel(), kernel_tables(), int(signed), number, _threads(num_threads)
    )
    _call(status, number)
    return x
