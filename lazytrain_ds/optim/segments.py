"""Finds, inside a flat tensor that DeepSpeed hands to the optimizer, where each of the model's parameters lies.

DeepSpeed steps an optimizer not over the parameters it was built from but over fp32 flat partitions of them. Three
forms are known: ZeRO-3 sub-groups (named by the first and last parameter's id), ZeRO-1/2 partitions (every parameter
knows its fragment of the flat tensor), and one fp32 copy per parameter (no ZeRO).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lazytrain_ds.optim.layout import Precision, Segment

__all__ = ["find_segments"]

_PrecisionOf = Callable[[torch.Tensor], Precision]


def _zero3(
    flat: torch.Tensor, groups: Sequence[Sequence[torch.Tensor]], precision_of: _PrecisionOf
) -> list[Segment] | None:
    ds_id = getattr(flat, "ds_id", None)
    if not isinstance(ds_id, str) or "_" not in ds_id:
        return None
    first, last = ds_id.split("_")
    for group in groups:
        trained = [p for p in group if p.requires_grad]
        ids = [str(getattr(p, "ds_id", "")) for p in trained]
        if first not in ids or last not in ids:
            continue
        run = trained[ids.index(first) : ids.index(last) + 1]
        segments, offset = [], 0
        for p in run:
            segments.append(Segment(offset, p.partition_numel(), precision_of(p)))
            offset += p.partition_numel()
        return segments if offset == flat.numel() else None
    return None


def _zero12(
    flat: torch.Tensor, groups: Sequence[Sequence[torch.Tensor]], precision_of: _PrecisionOf
) -> list[Segment] | None:
    begin, size = flat.data_ptr(), flat.element_size()
    found = []
    for p in (p for group in groups for p in group):
        fragment = getattr(getattr(p, "_hp_mapping", None), "hp_fragment", None)
        if fragment is None or not begin <= fragment.data_ptr() < begin + flat.numel() * size:
            continue
        found.append(Segment((fragment.data_ptr() - begin) // size, fragment.numel(), precision_of(p)))
    if not found:
        return None
    segments, end = [], 0
    for s in sorted(found, key=lambda s: s.offset):
        if s.offset > end:  # alignment
            segments.append(Segment(end, s.offset - end, "fp32"))
        segments.append(s)
        end = s.offset + s.numel
    segments.append(Segment(end, flat.numel() - end, "fp32"))
    return segments


def _copies(
    flat: torch.Tensor,
    current: Sequence[torch.Tensor],
    groups: Sequence[Sequence[torch.Tensor]],
    precision_of: _PrecisionOf,
) -> list[Segment] | None:
    for group in groups:
        trained = [p for p in group if p.requires_grad]
        for candidates in (trained, group):
            if [p.shape for p in candidates] == [p.shape for p in current]:
                index = next(i for i, p in enumerate(current) if p is flat)
                return [Segment(0, flat.numel(), precision_of(candidates[index]))]
    return None


def find_segments(
    flat: torch.Tensor,
    current: Sequence[torch.Tensor],
    groups: Sequence[Sequence[torch.Tensor]],
    precision_of: _PrecisionOf,
) -> list[Segment] | None:
    """Segments of `flat`, one of the `current` parameters of its group, in terms of the `groups` of parameters the
    optimizer was built from. None if it cannot be told."""
    if any(p is flat for group in groups for p in group):
        return [Segment(0, flat.numel(), precision_of(flat))]
    return (
        _zero3(flat, groups, precision_of)
        or _zero12(flat, groups, precision_of)
        or _copies(flat, current, groups, precision_of)
    )
