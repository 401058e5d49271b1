"""Which blocks are alike: same module types, parameter shapes, dtypes, trainability and settings."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

# A module's place in the stack says nothing about its cost.
_INDEX_LIKE = re.compile(r"(^|_)(idx|index|id|ids|number|num_layer|depth|name)$")
# Set on modules by DeepSpeed and torch while a run goes on.
_FOREIGN = ("_", "ds_", "applied_pre_backward")
_SCALARS = (bool, int, float, str, type(None), torch.dtype)

Facts = dict[tuple[str, ...], Any]


def parameter_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Full shape, also of a parameter that ZeRO-3 has partitioned (its own shape is then (0,))."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def parameter_numel(parameter: torch.Tensor) -> int:
    """Elements of the full parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def class_names(units: Sequence[tuple[str, Sequence[tuple[str, nn.Module]], Sequence[str]]]) -> list[str]:
    """One class name per unit; units share a name exactly when they are alike.

    A unit is (base name, its named modules, names of the parameters it owns). A class is called by the base name,
    numbered from the second one on (`"Layer"`, `"Layer.1"`).
    """
    structures: list[Facts] = []
    settings: list[Facts] = []
    for base, modules, owned in units:
        structure, setting = _facts(modules, set(owned))
        structure[("base",)] = base
        structures.append(structure)
        settings.append(setting)
    groups: dict[Any, list[int]] = {}
    for position, structure in enumerate(structures):
        groups.setdefault(_freeze(structure), []).append(position)
    keys: dict[int, Any] = {}
    for frozen, members in groups.items():
        kept = _telling_settings([settings[position] for position in members])
        for position in members:
            keys[position] = (frozen, tuple((name, repr(settings[position].get(name))) for name in kept))
    names: dict[Any, str] = {}
    counts: dict[str, int] = {}
    for position, (base, _, _) in enumerate(units):
        key = keys[position]
        if key not in names:
            number = counts.get(base, 0)
            counts[base] = number + 1
            names[key] = f"{base}.{number}" if number else base
    return [names[keys[position]] for position in range(len(units))]


def _facts(modules: Sequence[tuple[str, nn.Module]], owned: set[str]) -> tuple[Facts, Facts]:
    structure: Facts = {}
    settings: Facts = {}
    for place, (prefix, root) in enumerate(modules):
        for name, module in root.named_modules():
            where = (str(place), name)
            structure[(*where, "type")] = f"{type(module).__module__}.{type(module).__qualname__}"
            full = ".".join(part for part in (prefix, name) if part)
            for parameter_name, parameter in dict.items(module._parameters):  # not DeepSpeed's gathering access
                if parameter is None:
                    continue
                structure[(*where, "parameter", parameter_name)] = (
                    parameter_shape(parameter),
                    str(parameter.dtype),
                    parameter.requires_grad,
                    (f"{full}.{parameter_name}" if full else parameter_name) in owned,
                )
            for attribute, value in module.__dict__.items():
                if attribute == "forward" or attribute.startswith(_FOREIGN) or _INDEX_LIKE.search(attribute):
                    continue
                described, telling = _describe(value)
                if telling:
                    settings[(*where, attribute)] = described
    return structure, settings


def _describe(value: Any, depth: int = 0) -> tuple[Any, bool]:
    """(something whose repr tells equal values from others, whether there is such a thing)."""
    if isinstance(value, _SCALARS):
        return value, True
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}", True
    if isinstance(value, list | tuple | dict) and depth < 3 and len(value) <= 64:
        items = list(value.items() if isinstance(value, dict) else value)
        parts = [_describe(item, depth + 1) for item in items]
        return [part for part, _ in parts], all(telling for _, telling in parts)
    return None, False


def _telling_settings(settings: list[Facts]) -> list[tuple[str, ...]]:
    """Settings that split the units into kinds; one that differs in every unit (a drop rate by depth) does not."""
    kept = []
    for name in sorted({name for setting in settings for name in setting}):
        values = {repr(setting.get(name)) for setting in settings}
        if len(values) > 1 and (len(values) < len(settings) or len(settings) == 2):
            kept.append(name)
    return kept


def _freeze(facts: Facts) -> tuple[tuple[tuple[str, ...], Any], ...]:
    return tuple(sorted(facts.items(), key=lambda item: item[0]))
