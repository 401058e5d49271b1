"""Inputs for a traced forward when the real ones are not known yet: token ids and labels, or features."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from lazytrain_ds.workload.signature import parameter_shape

Call = tuple[tuple[Any, ...], dict[str, Any]]


def candidate_calls(
    model: nn.Module, micro_batch: int, sequence_length: int, dtype: torch.dtype | None = None
) -> list[Call]:
    """Ways to call `model` that are worth a try, the likeliest first; floats are on the meta device.

    A model with an `nn.Embedding`, or with an argument called `input_ids`, gets int64 ids of shape (micro_batch,
    sequence_length), and labels alike where its forward takes some. Any other gets floats whose last dimension is
    the first weight's: (micro_batch, sequence_length, features), then (micro_batch, features), in `dtype` (None:
    the weight's).
    """
    names = _arguments(model)
    ids = torch.zeros((micro_batch, sequence_length), dtype=torch.long, device="cpu")
    if "input_ids" in names:
        call: dict[str, Any] = {"input_ids": ids}
        if "use_cache" in names:
            call["use_cache"] = False
        with_labels = {**call, "labels": ids} if "labels" in names else None
        return [((), with_labels), ((), call)] if with_labels else [((), call)]
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        calls: list[Call] = []
        for label in ("labels", "targets", "target"):
            if label in names:
                calls.append(((ids,), {label: ids}))
        if len(names) >= 2:
            calls.append(((ids, ids), {}))
        return [*calls, ((ids,), {})]
    weight = next((parameter for parameter in model.parameters() if len(parameter_shape(parameter)) == 2), None)
    if weight is None:
        return []
    features = parameter_shape(weight)[1]
    tensors = [
        torch.empty(shape, dtype=dtype or weight.dtype, device="meta")
        for shape in ((micro_batch, sequence_length, features), (micro_batch, features))
    ]
    return [((tensor,), {}) for tensor in tensors]


def _arguments(model: nn.Module) -> list[str]:
    """Names that the model's forward takes, looking through wrappers that pass everything on (PEFT)."""
    seen = 0
    while seen < 4:
        parameters = inspect.signature(type(model).forward).parameters
        names = [
            name
            for name, parameter in parameters.items()
            if name != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        inner = next(iter(model.children()), None)
        if names or inner is None or len(list(model.children())) != 1:
            return names
        model, seen = inner, seen + 1
    return []
