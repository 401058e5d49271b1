"""The model a user names, without its weights: an HF config.json, a directory that holds one, or `module:function`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lazytrain_ds.errors import ConfigError


def load_model(source: str, *, dtype: torch.dtype | None = None) -> nn.Module:
    """The model on the meta device (no memory for weights), in `dtype` where given.

    `source`: path of an HF `config.json`, of a directory with one, or `module:function`, a function without
    required arguments that returns an `nn.Module`; it is called under `torch.device("meta")`, and the current
    directory is importable. Nothing is downloaded. Raises ConfigError that names the source and what it should be.
    """
    path = locate_model(source)
    return _from_function(source, dtype) if path is None else _from_config(path, dtype)


def locate_model(source: str) -> Path | None:
    """The file that `load_model` would read, None for `module:function`. Raises its ConfigError where there is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"model: {path.parent} has no config.json; name a Hugging Face model directory")
    if path.is_file():
        return path
    if ":" in source:
        return None
    raise ConfigError(
        f"model: there is no file or directory {source!r}; give a Hugging Face config.json, a model directory, or "
        "module:function that returns an nn.Module (nothing is downloaded)"
    )


def _from_config(path: Path, dtype: torch.dtype | None) -> nn.Module:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path} is no JSON: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ConfigError(f'model: {path} has no "model_type", so it is no Hugging Face model config')
    try:
        import transformers
    except ImportError as error:
        raise ConfigError('model: a config.json needs transformers; pip install "lazytrain-ds[hf]"') from error
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.for_model(**fields)
        names = fields.get("architectures") or []
        cls = getattr(transformers, names[0], None) if names else None
        with torch.device("meta"):
            if cls is not None:
                model = cls._from_config(config, **({"dtype": dtype} if dtype else {}))
            else:
                model = transformers.AutoModelForCausalLM.from_config(config, **({"dtype": dtype} if dtype else {}))
    except Exception as error:
        raise ConfigError(f"model: transformers cannot build a model from {path}: {error}") from error
    return model


def _from_function(source: str, dtype: torch.dtype | None) -> nn.Module:
    module_name, _, function_name = source.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model: cannot find {source!r}: {error}") from error
    try:
        with torch.device("meta"):
            model = function()
    except Exception as error:
        raise ConfigError(
            f"model: {source}() failed under torch.device('meta'), without arguments: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {source}() returned a {type(model).__name__}, not an nn.Module")
    return model.to(dtype) if dtype is not None else model


def sequence_length_of(model: nn.Module) -> int | None:
    """The length the model's own config names, None where it has none."""
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
