"""Which config a call of `deepspeed.initialize` or `zero.Init` was given, read exactly as DeepSpeed reads it.

Needs only the standard library and hjson (DeepSpeed's own reader): the fallback of `lazytrain_ds.autoload` uses it when
the rest of the hooks could not be loaded.
"""

from __future__ import annotations

import base64
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["configs_hidden", "given_config", "read_config"]

# `args` attributes that may name the config, in DeepSpeed's order (deepspeed/__init__.py, `initialize`).
_ARGS_NAMES = ("deepscale_config", "deepspeed_config")


def given_config(bound: Mapping[str, Any]) -> object | None:
    """The raw config (dict, path or base64 text) among bound arguments of `initialize`, or None.

    None also where two are given: then DeepSpeed has its own error, which the original call raises.
    """
    config = bound.get("config")
    if config is None:
        config = bound.get("config_params")
    from_args = [getattr(bound.get("args"), name, None) for name in _ARGS_NAMES]
    given = [c for c in (*from_args, config) if c is not None]
    return given[0] if len(given) == 1 else None


def read_config(source: object) -> dict[str, Any]:
    """The config as a dict: a dict is returned as it is, a path or base64 text is read like DeepSpeed does.

    Source: `DeepSpeedConfig.__init__` and `load_ds_config`. Raises what reading raises (ValueError for duplicate keys,
    OSError, hjson's decode errors); callers that only look fall back to the original DeepSpeed call then.
    """
    if isinstance(source, dict):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"not a DeepSpeed config: {type(source).__name__}")
    import hjson

    if os.path.exists(source):
        with open(source) as file:
            config = hjson.load(file, object_pairs_hook=_unique_keys)
    else:
        config = hjson.loads(base64.urlsafe_b64decode(os.fspath(source)).decode("utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"not a DeepSpeed config: the file holds a {type(config).__name__}")
    return config


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    repeated = [key for key, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(f"duplicate keys in the DeepSpeed config: {repeated}")
    return dict(pairs)


@contextmanager
def configs_hidden(args: object) -> Iterator[None]:
    """While the rewritten config is passed as `config=`, `args` must not name one too: DeepSpeed refuses both.

    The user's own object is used, not a copy, because DeepSpeed writes `local_rank` back into it.
    """
    saved = {name: getattr(args, name) for name in _ARGS_NAMES if getattr(args, name, None) is not None}
    for name in saved:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(args, name, value)
