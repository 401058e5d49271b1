"""Which part of a flat parameter has fp32 moments and which has 8-bit ones, and where each lies in the state tensors.

The fp32 moments of all fp32 segments follow each other in `exp_avg` / `exp_avg_sq`; the codes of all quantized segments
in `exp_avg_codes` / `exp_avg_sq_codes`, and their absmax values, one per started block of 256 of each segment, in
`exp_avg_absmax` / `exp_avg_sq_absmax`. So a state is at most six plain tensors, whatever the number of segments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal

import torch

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.optim.quantization import BLOCK, ZERO_CODE, number_of_blocks

__all__ = ["FP32_KEYS", "QUANTIZED_KEYS", "Precision", "Segment", "StateLayout"]

Precision = Literal["fp32", "8bit"]
FP32_KEYS = ("exp_avg", "exp_avg_sq")
QUANTIZED_KEYS = ("exp_avg_codes", "exp_avg_absmax", "exp_avg_sq_codes", "exp_avg_sq_absmax")


@dataclasses.dataclass(frozen=True)
class Segment:
    """`numel` elements from element `offset` of a flat parameter, with moments of one precision."""

    offset: int
    numel: int
    precision: Precision


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Segments of a flat parameter of `numel` elements: in order, without gaps or overlap (`StateLayout.of` checks)."""

    numel: int
    segments: tuple[Segment, ...]

    @classmethod
    def whole(cls, numel: int, precision: Precision) -> StateLayout:
        """One segment."""
        return cls(numel, (Segment(0, numel, precision),) if numel else ())

    @classmethod
    def of(cls, numel: int, segments: Iterable[Segment | tuple[int, int, Precision]]) -> StateLayout:
        """From (offset, numel, precision) entries. Neighbours of fp32 are merged; quantized ones stay apart, so that no
        block of 256 spans two tensors. Raises ConfigError if they do not cover the parameter exactly once."""
        merged: list[Segment] = []
        end = 0
        for entry in segments:
            s = entry if isinstance(entry, Segment) else Segment(*entry)
            if s.precision not in ("fp32", "8bit"):
                raise ConfigError(f'segment precision is {s.precision!r}; use "fp32" or "8bit"')
            if s.offset != end or s.numel < 0:
                raise ConfigError(
                    f"segments must follow each other: expected one at offset {end}, "
                    f"got offset {s.offset} with {s.numel} elements"
                )
            end += s.numel
            if s.numel == 0:
                continue
            if merged and s.precision == "fp32" and merged[-1].precision == "fp32":
                merged[-1] = Segment(merged[-1].offset, merged[-1].numel + s.numel, "fp32")
            else:
                merged.append(s)
        if end != numel:
            raise ConfigError(f"segments cover {end} elements, the parameter has {numel}; add the missing ones as fp32")
        return cls(numel, tuple(merged))

    @functools.cached_property
    def fp32_numel(self) -> int:
        return sum(s.numel for s in self.segments if s.precision == "fp32")

    @functools.cached_property
    def quantized_numel(self) -> int:
        return self.numel - self.fp32_numel

    @functools.cached_property
    def blocks(self) -> int:
        """Length of the absmax tensors."""
        return sum(number_of_blocks(s.numel) for s in self.segments if s.precision == "8bit")

    @property
    def state_bytes(self) -> int:
        """Bytes of both moments: 8 per fp32 element, 2 + 8 / 256 per quantized one (blocks rounded up per segment)."""
        return 8 * self.fp32_numel + 2 * self.quantized_numel + 8 * self.blocks

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Per segment (offset into the fp32 moments or codes, offset into the absmax values)."""
        out, at = [], {"fp32": 0, "8bit": 0}
        block = 0
        for s in self.segments:
            out.append((at[s.precision], block))
            at[s.precision] += s.numel
            block += number_of_blocks(s.numel) if s.precision == "8bit" else 0
        return tuple(out)

    @functools.cached_property
    def kernel_table(self) -> torch.Tensor:
        """int64 [segments, 5] as csrc/common.h's `Segment`."""
        rows = [
            [s.offset, s.numel, int(s.precision == "8bit"), *place]
            for s, place in zip(self.segments, self.places, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 5)

    def shapes(self) -> dict[str, tuple[torch.dtype, int]]:
        """dtype and numel of every state tensor; empty ones are left out."""
        sizes = {
            "exp_avg": (torch.float32, self.fp32_numel),
            "exp_avg_sq": (torch.float32, self.fp32_numel),
            "exp_avg_codes": (torch.uint8, self.quantized_numel),
            "exp_avg_absmax": (torch.float32, self.blocks),
            "exp_avg_sq_codes": (torch.uint8, self.quantized_numel),
            "exp_avg_sq_absmax": (torch.float32, self.blocks),
        }
        return {k: v for k, v in sizes.items() if v[1]}

    def new_state(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """State tensors of zero moments."""
        state = {}
        for key, (dtype, numel) in self.shapes().items():
            fill = ZERO_CODE[key == "exp_avg_codes"] if dtype == torch.uint8 else 0
            state[key] = torch.full((numel,), fill, dtype=dtype, device=device)
        return state

    def check_state(self, state: dict[str, torch.Tensor]) -> None:
        """Raises ConfigError if a state tensor is missing or has another dtype or length than this layout needs."""
        for key, (dtype, numel) in self.shapes().items():
            t = state.get(key)
            if t is None or t.dtype != dtype or t.numel() != numel:
                have = "missing" if t is None else f"{t.dtype} with {t.numel()} elements"
                raise ConfigError(
                    f"optimizer state {key!r} is {have}, the layout needs {dtype} with {numel} elements "
                    f"(blocks of {BLOCK}); convert it with convert_state()"
                )
