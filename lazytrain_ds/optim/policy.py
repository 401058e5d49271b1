"""Which parameters keep fp32 moments: small tensors, embeddings, norms and biases, unless globs say otherwise.

Embeddings see most rows rarely: their second moments span many decades inside one block, where 8-bit codes are coarse.
Norms and biases are small and sensitive. A parameter is judged under all its names, so a head tied to an embedding
counts as an embedding.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.optim.layout import Precision

__all__ = ["PrecisionChoice", "PrecisionPolicy", "full_numel"]

_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
    nn.LocalResponseNorm,
)


def full_numel(param: torch.Tensor) -> int:
    """Elements of the whole parameter, also while ZeRO-3 has it partitioned (its own numel is 0 then)."""
    return int(getattr(param, "ds_numel", param.numel()))


class PrecisionChoice(NamedTuple):
    """`reason` is for people: it is shown in the plan."""

    precision: Precision
    reason: str


def _is_embedding(module: nn.Module) -> bool:
    # By name too: vocabulary-parallel and adapter layers are often no subclasses. "...Embeddings" are containers.
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or type(module).__name__.endswith("Embedding")


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()


class PrecisionPolicy:
    """Answers `choice(param)`. `observe(model)` teaches it names and module types; without, only sizes count.

    min_8bit_size: tensors with fewer elements keep fp32. fp32 / quantized: globs over full parameter names, which win
    over everything else; a name that matches both is an error (ConfigError).
    """

    def __init__(self, min_8bit_size: int = 4096, fp32: Sequence[str] = (), quantized: Sequence[str] = ()) -> None:
        for key, patterns in (("fp32_parameters", fp32), ("quantized_parameters", quantized)):
            if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
                raise ConfigError(
                    f'{key} is {patterns!r}; it must be a list of globs, for instance ["*.embed_tokens.*"]'
                )
        if not isinstance(min_8bit_size, int) or isinstance(min_8bit_size, bool) or min_8bit_size < 0:
            raise ConfigError(f"min_8bit_size is {min_8bit_size!r}; it must be a number of elements, for instance 4096")
        self.min_8bit_size = min_8bit_size
        self.fp32, self.quantized = tuple(fp32), tuple(quantized)
        self._names: dict[torch.Tensor, list[str]] = {}
        self._kept: dict[torch.Tensor, str] = {}
        self.knows_model = False

    def observe(self, model: nn.Module) -> None:
        """Learns names and module types. Call before training; a second model adds to the first."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for prefix, module in modules.items():
            path = [modules[""], *(modules[prefix[:i]] for i, c in enumerate(prefix) if c == "."), module]
            for name, param in module._parameters.items():
                if param is None:
                    continue
                self._names.setdefault(param, []).append(f"{prefix}.{name}" if prefix else name)
                if any(_is_embedding(m) for m in path) or "lora_embedding" in prefix:
                    self._kept[param] = "embedding"  # also if another name says otherwise: tied
                elif _is_norm(module):
                    self._kept.setdefault(param, "norm")
                elif name == "bias" or name.endswith("_bias"):
                    self._kept.setdefault(param, "bias")
                elif len(getattr(param, "ds_shape", param.shape)) <= 1:
                    self._kept.setdefault(param, "one-dimensional")
        self.knows_model = True
        self._check_patterns()

    def observe_names(self, names: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Names only (an optimizer built from `named_parameters()`): globs work, module types stay unknown."""
        for name, param in names:
            self._names.setdefault(param, []).append(name)
        self._check_patterns()

    def _check_patterns(self) -> None:
        every = [n for names in self._names.values() for n in names]
        for key, patterns in (("fp32_parameters", self.fp32), ("quantized_parameters", self.quantized)):
            for pattern in patterns:
                if not any(fnmatch.fnmatchcase(n, pattern) for n in every):
                    raise ConfigError(f"{key}: {pattern!r} matches no parameter; names look like {every[:3]}")

    def names(self, param: torch.Tensor) -> list[str]:
        """All names of a parameter; empty if unknown."""
        return self._names.get(param, [])

    def choice(self, param: torch.Tensor) -> PrecisionChoice:
        """Precision of a parameter's moments, and why."""
        names = self.names(param)
        fp32 = next((p for p in self.fp32 for n in names if fnmatch.fnmatchcase(n, p)), None)
        quantized = next((p for p in self.quantized for n in names if fnmatch.fnmatchcase(n, p)), None)
        if fp32 and quantized:
            raise ConfigError(
                f"parameter {names[0]} matches fp32_parameters {fp32!r} and quantized_parameters {quantized!r}; "
                "make one of them narrower"
            )
        if fp32:
            return PrecisionChoice("fp32", f"matches {fp32!r}")
        if quantized:
            return PrecisionChoice("8bit", f"matches {quantized!r}")
        numel = full_numel(param)
        if numel < self.min_8bit_size:
            return PrecisionChoice("fp32", f"{numel} elements, fewer than {self.min_8bit_size}")
        if param in self._kept:
            return PrecisionChoice("fp32", self._kept[param])
        return PrecisionChoice("8bit", f"{numel} elements")
