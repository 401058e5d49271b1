"""Where LazyTrain enters DeepSpeed: thin wrappers around `deepspeed.initialize` and `zero.Init`.

A call whose config has no `"lazytrain"` block reaches the original with exactly its own arguments. With the block, the
config is rewritten before DeepSpeed parses it and `lazytrain_ds.runtime.engine.initialize` takes over. Nothing else is
patched globally; what the engine, optimizer and coordinator subclasses override is listed and checked in
`lazytrain_ds.runtime.overrides`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lazytrain_ds import config as block_config
from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import UnsupportedError
from lazytrain_ds.rewrite import RewrittenConfig, rewrite
from lazytrain_ds.runtime.arguments import configs_hidden, given_config, read_config
from lazytrain_ds.runtime.overrides import OVERRIDDEN, Override, check_signatures
from lazytrain_ds.runtime.progress import starting

__all__ = ["OVERRIDDEN", "Override", "check_signatures", "install", "say"]

_MARK = "_lazytrain_wrapper"
_OPTIMIZER = "hybridadamw8bit"

# Replacements zero.Init has already said; `initialize`, which follows it, does not repeat them.
_said_by_init: set[str] = set()
_warned_keys: set[str] = set()
_registration_error: Exception | None = None


def install() -> None:
    """Wrap `deepspeed.initialize` and `zero.Init.__init__`, and register the hybrid optimizer. Does so once."""
    deepspeed = sys.modules["deepspeed"]
    init = deepspeed.runtime.zero.partition_parameters.Init
    wrapped_initialize, wrapped_init = _wrap_initialize(deepspeed.initialize), _wrap_init(init.__init__)
    deepspeed.initialize, init.__init__ = wrapped_initialize, wrapped_init
    _register_optimizer()


def say(message: str) -> None:
    """Print one line, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"[lazytrain] {message}", flush=True)


def _register_optimizer() -> None:
    """Make `"type": "HybridAdamW8bit"` known. A failure concerns only the configs that ask for it: see `_prepare`."""
    global _registration_error
    name = "lazytrain_ds.optim.register"
    try:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name).register_with_deepspeed()
    except Exception as error:
        _registration_error = error


def _wrap_initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(original, _MARK):
        return original
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        config = _readable_config(signature, args, kwargs, given_config)
        prepared = None if config is None else _prepare(config)
        if prepared is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        _refuse_pipeline(bound.get("model"))
        _refuse_packed_weights(bound.get("model"))
        _single_process_environment()
        _check_batch(prepared, bound)
        _say_once(prepared.replacements, then_forget=True)
        bound.pop("config_params", None)
        bound["config"] = prepared.rewritten
        with configs_hidden(bound.get("args")), starting("deepspeed.initialize"):
            engine = importlib.import_module("lazytrain_ds.runtime.engine")
            return engine.initialize(prepared.block, original, (), dict(bound), prepared.rewritten)

    setattr(initialize, _MARK, True)
    return initialize


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    if hasattr(original, _MARK):
        return original
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = _readable_config(signature, (self, *args), kwargs, _init_config)
        prepared = None if config is None or isinstance(config, RewrittenConfig) else _prepare(config, batch_only=True)
        if prepared is None:
            return original(self, *args, **kwargs)
        _single_process_environment()
        # Its first import checks signatures of functions that zero.Init replaces, so it fails inside; models import it.
        importlib.import_module("torch._dynamo")
        _say_once(prepared.replacements, then_forget=False)
        call = signature.bind(self, *args, **kwargs)
        call.arguments["config" if call.arguments.get("config") is not None else "config_dict_or_path"] = (
            prepared.rewritten
        )
        with starting("deepspeed.zero.Init"):
            return original(*call.args, **call.kwargs)

    setattr(__init__, _MARK, True)
    return __init__


def _init_config(bound: Mapping[str, Any]) -> object | None:
    """The config among bound arguments of zero.Init; the deprecated `config` wins, as in DeepSpeed."""
    return bound["config"] if bound.get("config") is not None else bound.get("config_dict_or_path")


def _readable_config(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    find: Callable[[Mapping[str, Any]], object | None],
) -> dict[str, Any] | None:
    """The config of a call, or None where none can be read: then the original call raises DeepSpeed's own error."""
    try:
        source = find(signature.bind(*args, **kwargs).arguments)
        return None if source is None else read_config(source)
    except Exception:
        return None


@dataclass(frozen=True)
class _Prepared:
    """A config that asks for LazyTrain: the block, what DeepSpeed gets, what to say, DeepSpeed's own parse of it."""

    block: LazyTrainConfig
    rewritten: RewrittenConfig
    replacements: tuple[str, ...]
    user_config: dict[str, Any]
    parsed: Any


def _prepare(config: dict[str, Any], *, batch_only: bool = False) -> _Prepared | None:
    """Check and rewrite a config; None where it does not ask for LazyTrain.

    DeepSpeed's own errors about the rest of the config come before ours about the block.
    """
    for key in block_config.misspelt_keys(config):
        if key not in _warned_keys:
            _warned_keys.add(key)
            say(f'warning: the config key "{key}" looks like "{block_config.BLOCK}" misspelt; DeepSpeed ignores it')
    block_config.require_top_level(config)
    _refuse_unregistered_optimizer(config)
    if not block_config.block_is_on(config):
        return None
    check_signatures()
    block_config.require_resolved(config, batch_only=batch_only)
    parsed = _let_deepspeed_parse(config)
    block_config.require_stage_3(config)
    block_config.refuse_features(config)
    block = block_config.find_block(config)
    assert block is not None
    rewritten, replacements = rewrite(config)
    return _Prepared(block, rewritten, tuple(map(str, replacements)), config, parsed)


def _refuse_unregistered_optimizer(config: Mapping[str, Any]) -> None:
    optimizer = config.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    if _registration_error is not None and str(kind).lower() == _OPTIMIZER:
        raise UnsupportedError(
            f"the optimizer {kind} could not be registered with DeepSpeed: {_registration_error}"
        ) from _registration_error


def _say_once(lines: tuple[str, ...], *, then_forget: bool) -> None:
    """Say each line that zero.Init has not said already for the `initialize` that follows it."""
    for line in lines:
        if line not in _said_by_init:
            say(f"replaced {line}")
            _said_by_init.add(line)
    if then_forget:
        _said_by_init.clear()


@contextlib.contextmanager
def _quiet_deepspeed() -> Iterator[None]:
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _let_deepspeed_parse(config: dict[str, Any]) -> Any:
    """Parse the user's own config with DeepSpeed's parser, quietly, so that its errors come first and unchanged.

    Our rewrite would hide some of them: it replaces the offload sections. Returns the parsed DeepSpeedConfig, whose
    batch sizes are not derived yet (that needs the world size).
    """
    from deepspeed.runtime import config as upstream

    parsed = object.__new__(upstream.DeepSpeedConfig)
    parsed._param_dict = config
    with _quiet_deepspeed():
        upstream._reject_removed_config_keys(config)
        parsed._initialize_params(dict(config))
    return parsed


def _check_batch(prepared: _Prepared, bound: Mapping[str, Any]) -> None:
    """DeepSpeed's own check of the batch sizes, before anything is planned for them; with one process, with advice."""
    config, parsed = prepared.user_config, prepared.parsed
    if bound.get("mpu") is not None or bound.get("mesh_param") or "sequence_parallel_size" in config:
        return  # the world that divides the batch is not ours to know
    parsed.global_rank = int(os.environ.get("RANK", "0"))
    parsed.world_size = _world_size()
    try:
        with _quiet_deepspeed():
            parsed._configure_train_batch_size()
            parsed._do_sanity_check()
    except AssertionError as error:
        hint = block_config.batch_hint(config, parsed.world_size)
        if hint is not None and hasattr(error, "add_note"):
            error.add_note(f"[lazytrain] {hint}")
        elif hint is not None:  # Python 3.10
            say(hint)
        raise


def _world_size() -> int:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _refuse_pipeline(model: object) -> None:
    from deepspeed.pipe import PipelineModule

    if isinstance(model, PipelineModule):
        raise UnsupportedError(
            "a PipelineModule runs in DeepSpeed's pipeline engine, which LazyTrain does not drive; "
            'pass a plain nn.Module, or set "lazytrain": null'
        )


def _refuse_packed_weights(model: object) -> None:
    """Weights that are not numbers (4-bit ones packed into bytes) train wrongly under ZeRO-3, which moves numbers."""
    for name, parameter in model.named_parameters() if hasattr(model, "named_parameters") else ():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise UnsupportedError(
                f"the parameter {name} is {str(parameter.dtype).removeprefix('torch.')}: packed weights (QLoRA, 4-bit "
                "and 8-bit loading) cannot be partitioned and offloaded. Load the model in bf16 (LoRA over frozen bf16 "
                'weights works, from NVMe too), or set "lazytrain": null'
            )


# Variables by which a launcher, MPI, Slurm, AzureML or SageMaker tells a process its place in a group.
_LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_RANK",
    "SLURM_NTASKS",
    "AZUREML_EXPERIMENT_ID",
    "SM_TRAINING_ENV",
)


def _single_process_environment() -> None:
    """Under plain `python`, be a group of one on a free port: DeepSpeed would ask for mpi4py instead."""
    from torch import distributed

    if any(name in os.environ for name in _LAUNCHED) or (distributed.is_available() and distributed.is_initialized()):
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
