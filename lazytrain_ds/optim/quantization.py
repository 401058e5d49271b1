"""The dynamic 8-bit map, blockwise quantization to its nearest code, and the tables the C++ kernels evaluate.

The map (Dettmers et al., "8-bit Optimizers via Block-wise Quantization"): decade i = 0..6 covers (10^(i-7), 10^(i-6)]
with `count` equal cells, one code at the middle of each; then 0 and 1. Signed codes are 127 + k with k = -127..128
(there is no -1), count = 2^i, k = 2^i + cell; unsigned codes are k = 0..255, count = 2^(i+1), k = 2^(i+1) - 1 + cell.

Everything is computed with single IEEE fp32 operations in the same order as csrc/kernels.h, so that this implementation
and the kernels agree bit for bit. The oracle in fp64 is `nearest_codes`.
"""

from __future__ import annotations

import functools
import itertools
import struct
from typing import NamedTuple

import torch

__all__ = [
    "BLOCK",
    "ZERO_CODE",
    "dequantize_blockwise",
    "dynamic_map",
    "kernel_tables",
    "nearest_codes",
    "number_of_blocks",
    "quantize_blockwise",
]

BLOCK = 256
ZERO_CODE = {True: 127, False: 0}  # by signedness

_SMALL, _LARGE = 2.0**-100, 2.0**100  # outside, 1 / absmax is rescaled to stay a normal number


def number_of_blocks(numel: int) -> int:
    """How many absmax values `numel` quantized elements have."""
    return (numel + BLOCK - 1) // BLOCK


class _Decade(NamedTuple):
    low: float
    cell: float
    count: int
    base: int


def _decades(signed: bool) -> list[_Decade]:
    out = []
    for i in range(7):
        count = (1 if signed else 2) << i
        out.append(_Decade(0.1 * 10.0 ** (i - 6), 0.9 * 10.0 ** (i - 6) / count, count, count if signed else count - 1))
    return out


@functools.cache
def _map_fp64(signed: bool) -> tuple[float, ...]:
    positive = [d.low + (j + 0.5) * d.cell for d in _decades(signed) for j in range(d.count)] + [1.0]
    return tuple(([-x for x in positive[-2::-1]] if signed else []) + [0.0] + positive)


def dynamic_map(signed: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The 256 values of the map in ascending order; the index is the code."""
    return torch.tensor(_map_fp64(signed), dtype=torch.float64).to(dtype)


def nearest_codes(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """Oracle: the code nearest to each of `values` (already divided by their absmax), in fp64; ties go up in magnitude.

    A second moment (unsigned) that is not zero never gets code 0: m / (0 + eps) would be a huge update.
    """
    table = dynamic_map(signed, torch.float64)
    v = values.double()
    boundaries = (table[:-1] + table[1:]) / 2
    codes = torch.bucketize(v.abs() if signed else v, boundaries, right=True)
    if signed:
        codes = torch.where(v < 0, (254 - codes).clamp_min(0), codes)
    else:
        codes = torch.where(v > 0, codes.clamp_min(1), codes)
    return codes.to(torch.uint8)


_PIECE_MAGIC, _MAGIC_BITS = 12582912.0, 0x4B400000
_PIECE_SLOPE = struct.unpack("f", struct.pack("f", 1.0 / (3.25 * 8388608.0)))[0]
_MIDDLE = {True: 64, False: 128}


class _Tables(NamedTuple):
    value_slope: list[float]
    value_offset: list[float]
    next: list[float]
    code_slope: list[float]
    code_offset: list[float]
    cap: list[int]


@functools.cache
def _tables(signed: bool) -> _Tables:
    decades, top = _decades(signed), 128 if signed else 255

    # Code to value. The piece is the low three exponent bits of k + 0.5 (signed) or k + 1 (unsigned). k = 0 and k = top
    # fall on the same piece, and the line value = k / top serves both.
    value_slope, value_offset = [0.0] * 8, [0.0] * 8
    for i, d in enumerate(decades):
        piece = (127 + i if signed else 128 + i) & 7
        value_slope[piece], value_offset[piece] = d.cell, d.low + (0.5 - d.base) * d.cell
    shared = 6 if signed else 7
    value_slope[shared], value_offset[shared] = 1.0 / top, 0.0

    # Value to code. Inside a decade the midpoints between codes lie at low + j * cell. Between two decades the midpoint
    # lies above the upper one's `low`: hence `edges` and `cap`.
    def middle(d: _Decade, cell: float) -> float:
        return d.low + cell * d.cell

    edges = [middle(decades[0], 0.5) / 2]
    edges += [(middle(a, a.count - 0.5) + middle(b, 0.5)) / 2 for a, b in itertools.pairwise(decades)]
    edges += [(1.0 + middle(decades[6], decades[6].count - 0.5)) / 2]
    slopes = [1.0 / d.cell for d in decades] + [0.0]
    offsets = [d.base - d.low / d.cell for d in decades] + [float(top)]
    # Piece 0 also holds code 0: its line meets the boundary 0|1 at code 1 and, where there is one, 1|2 at code 2.
    slopes[0] = 1.0 / edges[0] if signed else 1.0 / (decades[0].low + decades[0].cell - edges[0])
    offsets[0] = 1.0 - slopes[0] * edges[0]
    caps = [d.base + d.count - 1 for d in decades] + [top]
    # The kernel rounds by adding 1.5 * 2^23 and reads the bits; counting from the middle code halves rounding errors.
    middle_code = _MIDDLE[signed]
    offsets = [x - 0.5 - middle_code for x in offsets[:-1]] + [float(top - middle_code)]
    caps = [c - middle_code + _MAGIC_BITS for c in caps]
    return _Tables(value_slope, value_offset, [*edges[1:], float("inf")], slopes, offsets, caps)


# The rest is the torch implementation of the kernels: same operations, same order.


@functools.cache
def _table_tensors(signed: bool, device: torch.device) -> dict[str, torch.Tensor]:
    t = _tables(signed)
    out = {k: torch.tensor(v, dtype=torch.float32, device=device) for k, v in t._asdict().items() if k != "cap"}
    out["cap"] = torch.tensor(t.cap, dtype=torch.int32, device=device)
    k = torch.arange(256, dtype=torch.float32, device=device) - (127.0 if signed else 0.0)
    size = k.abs()
    piece = (size + (0.5 if signed else 1.0)).view(torch.int32).bitwise_right_shift(23).bitwise_and(7).long()
    values = size * out["value_slope"][piece] + out["value_offset"][piece]
    out["values"] = torch.copysign(values, k) if signed else values
    return out


def _nearest(a: torch.Tensor, t: dict[str, torch.Tensor], signed: bool) -> torch.Tensor:
    magic = (a.view(torch.int32).to(torch.float32) * _PIECE_SLOPE + (_PIECE_MAGIC - 33.0)).clamp_min(_PIECE_MAGIC)
    candidate = magic.view(torch.int32).bitwise_and(7).long()
    piece = candidate + (a >= t["next"][candidate])
    rounded = ((a * t["code_slope"][piece] + t["code_offset"][piece]) + _PIECE_MAGIC).view(torch.int32)
    return torch.minimum(rounded, t["cap"][piece]) + (_MIDDLE[signed] - _MAGIC_BITS)


def quantize_blockwise(x: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat fp32 `x` of n elements to (uint8 codes [n], fp32 absmax [ceil(n / 256)]), by the rule of `nearest_codes`."""
    n = x.numel()
    blocks = torch.nn.functional.pad(x.reshape(-1), (0, -n % BLOCK)).view(-1, BLOCK)
    absmax = blocks.abs().amax(1) if n else blocks.new_zeros(0)
    extreme = ((absmax < _SMALL) & (absmax > 0)) | (absmax > _LARGE)
    rescale = torch.where(extreme, torch.where(absmax < 1.0, 2.0**64, 2.0**-64), 1.0).to(torch.float32)
    scaled_absmax = absmax * rescale
    inverse = torch.where(scaled_absmax > 0, scaled_absmax.reciprocal(), 0.0)
    a = (blocks * rescale[:, None]) * inverse[:, None]
    t = _table_tensors(signed, x.device)
    if signed:
        k = _nearest(a.abs(), t, signed)
        codes = (torch.where(torch.signbit(a), -k, k) + 127).clamp_min(0)
    else:
        codes = torch.where(blocks == 0, 0, _nearest(a, t, signed).clamp_min(1))
    return codes.to(torch.uint8).view(-1)[:n].clone(), absmax


def dequantize_blockwise(codes: torch.Tensor, absmax: torch.Tensor, signed: bool) -> torch.Tensor:
    """The inverse: fp32, flat, map[code] * absmax of the code's block."""
    n = codes.numel()
    values = _table_tensors(signed, codes.device)["values"][codes.reshape(-1).long()]
    padded = torch.nn.functional.pad(values, (0, -n % BLOCK)).view(-1, BLOCK)
    return (padded * absmax[:, None]).view(-1)[:n].clone()


_CELLS = 1 << 16  # upper halves of a float's bits


@functools.cache
def kernel_tables() -> bytes:
    """Both maps as csrc/common.h's `Map` wants them: signed, then unsigned.

    The memory tables are derived from the piecewise linear form by bisection over the bits of the values, so that both
    give the same code for every float.
    """
    out = b""
    for signed in (True, False):
        t, tensors = _tables(signed), _table_tensors(signed, torch.device("cpu"))
        top = 128 if signed else 255
        codes = torch.arange(1, top + 1, dtype=torch.int32)
        low, high = torch.zeros_like(codes), torch.full_like(codes, 0x3F800000)  # code(low) < codes <= code(high)
        while bool((high - low > 1).any()):
            middle = low + (high - low) // 2
            reached = _nearest(middle.view(torch.float32), tensors, signed) >= codes
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        first_of = high.long()  # bits of the smallest value of codes 1, 2, ... top
        if not signed:
            first_of[0] = 1  # everything but zero has at least code 1
        words = (*t.value_slope, *t.value_offset, *t.next, *t.code_slope, *t.code_offset, *t.cap)
        out += struct.pack("40f8i", *words) + struct.pack("256f", *tensors["values"].tolist())
        out += _entries(first_of, signed).to(torch.int32).numpy().tobytes()
    return out


def _entries(first_of: torch.Tensor, signed: bool) -> torch.Tensor:
    """int64 [_CELLS], each in the range of int32: `entry_of_cell` of csrc/common.h, from the bits [top] of the smallest
    magnitude of each code but 0."""
    cell = torch.arange(_CELLS, dtype=torch.int64)
    start, negative = (cell % (_CELLS // 2)) * 65536, cell >= _CELLS // 2
    code = torch.bucketize(start, first_of, right=True)
    step = torch.bucketize(start + 65536, first_of, right=True) - code
    if int(step.max()) > 1:
        raise AssertionError(f"a cell of the map (signed: {signed}) holds {int(step.max())} boundaries")
    boundary = first_of[code.clamp_max(first_of.numel() - 1)]
    if signed:  # -1 is not in the map: its nearest code is that of -127
        step = torch.where(negative & (code == 127), 0, step)
        code = torch.where(negative, code.clamp_max(127) - 127, code + 127)
    entry = 65536 * (code - cell) + torch.where(step > 0, 65536 + start - boundary, 0)
    return (entry + 2**31) % 2**32 - 2**31
