"""Operators by name, and which of them a selective choice may keep the outputs of."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["can_be_kept", "resolve_operator"]


def resolve_operator(name: str) -> Any | None:
    """The operator overload called `name` ("aten.mm.default"), None where this PyTorch has none."""
    target: Any = torch.ops
    for part in name.split("."):
        target = getattr(target, part, None)
        if target is None:
            return None
    return target if isinstance(target, torch._ops.OpOverload) else None


def can_be_kept(operator: Any) -> bool:
    """Whether an operator's outputs are its own: neither views nor written in place."""
    aliases = any(value.alias_info is not None for value in operator._schema.returns)
    return not aliases and not operator._schema.is_mutable
