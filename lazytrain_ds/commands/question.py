"""From a DeepSpeed config, a model and a machine to an Instance: the question that `lazytrain plan` asks the
planner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazytrain_ds.config import (
    BLOCK,
    LazyTrainConfig,
    batch_hint,
    find_block,
    misspelt_keys,
    refuse_features,
    require_stage_3,
    require_top_level,
)
from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.instance import Allowed, Instance, divisors
from lazytrain_ds.planning.schema import TIERS, Precision

if TYPE_CHECKING:
    from lazytrain_ds.hardware.spec import HardwareSpec

DEFAULT_SEQUENCE_LENGTH = 2048
# Of each tier this share stays free: allocator rounding, other processes' ups and downs.
MARGIN_SHARE = 0.02


def read_config_file(path: str | Path) -> dict[str, Any]:
    """A DeepSpeed config file as a dict, read as DeepSpeed reads it. ConfigError names the file for whatever is
    wrong.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ConfigError(f"config: {file} is a directory; name the DeepSpeed JSON file")
    if not file.is_file():
        raise ConfigError(f"config: there is no file {str(file)!r}")
    import hjson

    from lazytrain_ds.runtime.arguments import _unique_keys

    try:
        text = file.read_text(encoding="utf-8-sig")
        if not text.strip():
            raise ConfigError(f"config: {file} is empty")
        config = hjson.loads(text, object_pairs_hook=_unique_keys)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config: {file} holds a {type(config).__name__}, not an object")
    return dict(config)


@dataclass(frozen=True)
class Batch:
    """Samples per optimizer step over all ranks, and per micro-batch (None: the planner chooses)."""

    global_batch: int
    micro_batch: int | None


def batch_of(config: Mapping[str, Any], block: LazyTrainConfig, micro: str | None, total: int | None) -> Batch:
    """Batch sizes from the config's three keys and the command line, which wins.

    `micro`: a number, `"auto"` or None. Missing keys follow from the others as in DeepSpeed; one process is assumed.
    """
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, size, rounds = (config.get(key) for key in keys)
    for key, value in zip(keys, (train, size, rounds), strict=True):
        if value not in (None, "auto") and (type(value) is not int or value < 1):
            raise ConfigError(f'"{key}": {value!r} is not a whole number of at least 1')
    train, size, rounds = (value if isinstance(value, int) else None for value in (train, size, rounds))
    if micro is None and total is None:
        hint = batch_hint({key: value for key, value in zip(keys, (train, size, rounds), strict=True) if value}, 1)
        if hint is not None:
            raise ConfigError(hint)
    chosen: int | None = size
    if micro is not None and micro != "auto":
        if not micro.isdigit() or int(micro) < 1:
            raise ConfigError(f'--micro-batch: {micro!r} is not a whole number of at least 1, or "auto"')
        chosen = int(micro)
    elif micro == "auto" or (micro is None and block.micro_batch == "auto"):
        chosen = None
    if total is not None:
        if total < 1:
            raise ConfigError(f"--global-batch: {total} is not at least 1")
    elif train is not None:
        total = train
    else:
        total = (size or chosen or 1) * (rounds or 1)
    if chosen is None and micro != "auto" and block.micro_batch != "auto":
        chosen = total // (rounds or 1)
    if chosen is not None and total % chosen:
        raise ConfigError(f"a micro-batch of {chosen} does not divide the global batch of {total}")
    return Batch(total, chosen)


def dtype_names(config: Mapping[str, Any]) -> tuple[str, str]:
    """(compute dtype, accumulation dtype) under ZeRO, as DeepSpeed's engine chooses them."""

    def on(section: str) -> bool:
        value = config.get(section)
        return isinstance(value, Mapping) and value.get("enabled") is True

    compute = "bfloat16" if on("bf16") or on("bfloat16") else "float16" if on("fp16") else "float32"
    types = config.get("data_types")
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    asked = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    return compute, names.get(str(asked), compute)


def precisions_of(config: Mapping[str, Any], block: LazyTrainConfig) -> tuple[Precision, ...]:
    """State precisions that the planner may choose from."""
    section = config.get("optimizer")
    hybrid = isinstance(section, Mapping) and str(section.get("type", "")).lower() == "hybridadamw8bit"
    if not hybrid:
        if block.state_precision == "8bit":
            raise ConfigError('"lazytrain.state_precision": "8bit" needs "optimizer": {"type": "HybridAdamW8bit"}')
        return ("fp32",)
    if "state_precision" not in block.model_fields_set or block.state_precision == "8bit":
        return ("8bit",)
    return ("fp32",) if block.state_precision == "fp32" else ("fp32", "8bit")


def allowed_places(block: LazyTrainConfig, *, nvme: bool) -> Allowed:
    """What the block's keys leave open; without an NVMe path nothing goes there."""
    tiers = TIERS if nvme else tuple(tier for tier in TIERS if tier != "nvme")

    def forced(value: str, key: str) -> tuple[Any, ...]:
        if value not in TIERS:
            return tiers
        if value not in tiers:
            raise ConfigError(f'"lazytrain.{key}": "nvme" needs "lazytrain.nvme_path"')
        return (value,)

    activations = forced(block.activations, "activations")
    return Allowed(
        boundary_tiers=activations,
        saved_tiers=activations,
        parameter_tiers=forced(block.parameters, "parameters"),
        optimizer_tiers=forced(block.optimizer_states, "optimizer_states"),
    )


def quantizable_in(config: Mapping[str, Any], model: Any) -> Callable[[str, Any], bool]:
    """Which parameters the hybrid optimizer would give 8-bit states, under the config's own exceptions."""
    from lazytrain_ds.optim.policy import PrecisionPolicy

    section = config.get("optimizer")
    given = section.get("params", {}) if isinstance(section, Mapping) else {}
    policy = PrecisionPolicy(
        given.get("min_8bit_size", 4096), given.get("fp32_parameters", ()), given.get("quantized_parameters", ())
    )
    policy.observe(model)
    return lambda name, parameter: policy.choice(parameter).precision == "8bit"


@dataclass(frozen=True)
class Traced:
    """A model and what its blocks need at each micro-batch size: the part of a question that no machine changes."""

    model: Any
    table: Any
    profile: Any
    batch: Batch
    sequence_length: int
    notes: tuple[str, ...]


def trace(
    config: Mapping[str, Any],
    model_source: str,
    *,
    sequence_length: int | None = None,
    micro_batch: str | None = None,
    global_batch: int | None = None,
) -> Traced:
    """Build the model without weights and trace it (see `ask` for the arguments)."""
    import torch

    from lazytrain_ds.workload.blocks import find_blocks
    from lazytrain_ds.workload.load import load_model, sequence_length_of
    from lazytrain_ds.workload.profile import profile_model

    notes: list[str] = []
    block = find_block(config) or LazyTrainConfig()
    batch = batch_of(config, block, micro_batch, global_batch)
    if sequence_length is not None and sequence_length < 1:
        raise ConfigError(f"--seq-len: {sequence_length} is not a whole number of at least 1")
    model = load_model(model_source)
    if sequence_length is None and isinstance(block.sequence_length, int):
        sequence_length = block.sequence_length
    if sequence_length is None:
        sequence_length = sequence_length_of(model)
        if sequence_length is None:
            sequence_length = DEFAULT_SEQUENCE_LENGTH
        notes.append(f"sequence length {sequence_length} assumed; give --seq-len or lazytrain.sequence_length")
    table = find_blocks(model, None if block.blocks == "auto" else block.blocks)
    sizes = divisors(batch.global_batch) if batch.micro_batch is None else [batch.micro_batch]
    profile = profile_model(model, table, sizes, sequence_length, dtype=getattr(torch, dtype_names(config)[0]))
    return Traced(model, table, profile, batch, sequence_length, (*notes, *profile.notes))


@dataclass(frozen=True)
class Question:
    """An Instance and what was said on the way."""

    instance: Instance
    kind: str
    solver: str
    notes: tuple[str, ...]


def _without_block(config: Mapping[str, Any]) -> str:
    """The note on a config without a block. ConfigError where the block is in a place in which it means nothing."""
    require_top_level(config)
    note = f'the config has no "{BLOCK}" block: planned as if it had "{BLOCK}": {{}}'
    return note + "".join(f'; its key "{key}" looks like it misspelt' for key in misspelt_keys(config))


def ask(
    config: Mapping[str, Any],
    model_source: str,
    hardware: HardwareSpec,
    *,
    sequence_length: int | None = None,
    micro_batch: str | None = None,
    global_batch: int | None = None,
    traced: Traced | None = None,
) -> Question:
    """The Instance of training the model so on `hardware` (whose capacities are the caps).

    `traced`: from `trace` with the same model, lengths and batch sizes, where several machines are asked about.
    """
    notes: list[str] = []
    block = find_block(config)
    if block is None:
        block = LazyTrainConfig()
        notes.append(_without_block(config))
    else:
        require_stage_3(config)
        refuse_features(config)

    import torch

    from lazytrain_ds.planning.rules import RULES
    from lazytrain_ds.workload.build import Training, build_instance

    if traced is None:
        traced = trace(
            config, model_source, sequence_length=sequence_length, micro_batch=micro_batch, global_batch=global_batch
        )
    notes += traced.notes
    compute, accumulation = (getattr(torch, name) for name in dtype_names(config))
    zero = config.get("zero_optimization")
    gathers = isinstance(zero, Mapping) and any(
        zero.get(key) is True
        for key in ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
    )
    training = Training(
        global_batch=traced.batch.global_batch,
        sequence_length=traced.sequence_length,
        accumulation_dtype=accumulation,
        precisions=precisions_of(config, block),
        step_devices=("host", "device") if hardware.kind == "cpu" else ("host",),
        quantizable=quantizable_in(config, traced.model),
        margins={
            "device": int(hardware.device_memory_bytes * MARGIN_SHARE),
            "host": int(hardware.host_memory_bytes * MARGIN_SHARE),
        },
        allowed=allowed_places(block, nvme=hardware.nvme_bytes > 0),
        gathers_on_save=gathers,
    )
    instance = build_instance(
        traced.model, traced.table, traced.profile, hardware, training, dtype=compute, name=model_source
    )
    kind = block.planner.kind
    for value in (block.activations, block.parameters, block.optimizer_states):
        kind = value if value in RULES else kind
    return Question(instance, {"milp": "auto", "rules": "auto"}.get(kind, kind), block.planner.solver, tuple(notes))


def with_capacity(instance: Instance, **capacity_bytes: int) -> Instance:
    """The same instance with other capacities by tier name (margins keep their share)."""
    tiers = []
    for tier in instance.tiers:
        capacity = capacity_bytes.get(tier.name, tier.capacity_bytes)
        share = tier.margin_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        tiers.append(replace(tier, capacity_bytes=capacity, margin_bytes=int(capacity * share)))
    return replace(instance, tiers=tuple(tiers))
