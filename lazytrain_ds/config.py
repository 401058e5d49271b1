"""The `"lazytrain"` block of a DeepSpeed config: its keys and its errors, and what has to be so around it.

Everything here works on plain dicts, as DeepSpeed's JSON reader or Hugging Face hand them over. Importing this module
imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator, ValidationError

from lazytrain_ds.errors import ConfigError, UnsupportedError

__all__ = [
    "AUTO",
    "BATCH_KEYS",
    "BLOCK",
    "EXCLUDED",
    "ZERO",
    "LazyTrainConfig",
    "PlannerConfig",
    "ProfileConfig",
    "batch_hint",
    "block_is_on",
    "find_block",
    "mapping_of",
    "misspelt_keys",
    "parse_size",
    "refuse_features",
    "require_resolved",
    "require_stage_3",
    "require_top_level",
]

BLOCK: Final = "lazytrain"
AUTO: Final = "auto"
ZERO: Final = "zero_optimization"

Auto = Literal["auto"]
RULES: Final = ("keep_all", "checkpoint_all", "checkpoint_all_host", "megatrain", "zero3_offload")
TIERS: Final = ("device", "host", "nvme")

_UNITS: Final = MappingProxyType(
    {
        "B": 1,
        "kB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
    }
)


def parse_size(value: object) -> int:
    """Bytes from an int, an integral float, or a string such as `"70GB"` (10**9) or `"65GiB"` (2**30).

    Raises ValueError for anything else, and for sizes below one byte.
    """
    size: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        text = value.strip()
        number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        unit = text[len(number) :]
        factor = next((factor for name, factor in _UNITS.items() if name.lower() == unit.lower()), None if unit else 1)
        if factor is not None:
            try:
                size = float(number) * factor if "." in number else int(number.replace("_", "")) * factor
            except ValueError:
                size = None
    if size is None or not 1 <= size < 2**63 or (isinstance(value, float) and not value.is_integer()):
        raise ValueError('is not a size: write bytes (70000000000), "70GB", "65GiB" or "auto"')
    return int(size)


def _or_auto(parse: Callable[[object], Any]) -> PlainValidator:
    return PlainValidator(lambda value: value if value == AUTO else parse(value))


def _choice(*names: str) -> PlainValidator:
    """One of `names`; the error names the nearest one."""

    def check(value: object) -> str:
        if isinstance(value, str) and value in names:
            return value
        near = difflib.get_close_matches(value.lower(), names, 1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"is not one of {', '.join(map(repr, names))}{hint}")

    return PlainValidator(check)


def _text(what: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f'is not {what} or "auto"')
        return value

    return check


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError('is not true, false or "auto"')
    return value


def _enabled(value: object) -> bool:
    return True if value == AUTO else _flag(value)


def _positive_count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError('is not a whole number of at least 1, or "auto"')
    return value


def _number_from(minimum: float, *, exclusive: bool) -> Callable[[object], float]:
    def check(value: object) -> float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not (minimum < value < float("inf") or (value == minimum and not exclusive)):  # type: ignore[operator]
            raise ValueError(f'is not a number {"above" if exclusive else "of at least"} {minimum:g}, or "auto"')
        return float(value)  # type: ignore[arg-type]

    return check


def _globs(value: object) -> tuple[str, ...]:
    globs = [value] if isinstance(value, str) else value
    if not isinstance(globs, (list, tuple)) or not globs or not all(isinstance(g, str) and g for g in globs):
        raise ValueError('is not a glob such as "model.layers.*", a list of globs, or "auto"')
    return tuple(globs)


def _policy(value: object) -> str:
    module, _, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError('is not "module:Class" (for example "my_package.my_policy:MyPolicy") or "auto"')
    return f"{module}:{name}"


def _emulation(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or set(value) != {"emulate"} or not isinstance(value["emulate"], Mapping):
        raise ValueError('is not {"emulate": {...}} or "auto"')
    return {"emulate": dict(value["emulate"])}


def _section(value: object) -> object:
    """A nested block: `"auto"` means all defaults; anything but an object is refused before pydantic sees it."""
    if value == AUTO:
        return {}
    if not isinstance(value, (Mapping, BaseModel)):
        raise ValueError('is not an object ({...}) or "auto"')
    return value


SizeOrAuto = Annotated[int | Auto, _or_auto(parse_size)]
Placement = Annotated[str, _choice(AUTO, *RULES, *TIERS)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlannerConfig(_Section):
    """How the plan is found. `kind`: `"milp"` (ours, the default), `"rules"` (the best of them), a rule's name, or
    `"paper"` (the published activation program). `time_limit`: seconds. `gap`: relative gap at which to stop.
    """

    kind: Annotated[str, _choice(AUTO, "milp", "rules", "paper", *RULES)] = AUTO
    solver: Annotated[str, _choice(AUTO, "highs", "scip")] = AUTO
    time_limit: Annotated[float | Auto, _or_auto(_number_from(0, exclusive=True))] = "auto"
    gap: Annotated[float | Auto, _or_auto(_number_from(0, exclusive=False))] = "auto"


class ProfileConfig(_Section):
    """Measured speeds of this machine and model. `cache_dir`: where they are kept. `refresh`: measure anew."""

    cache_dir: Annotated[str, _or_auto(_text("a path"))] = AUTO
    refresh: Annotated[bool | Auto, _or_auto(_flag)] = "auto"


class LazyTrainConfig(_Section):
    """The validated block. Sizes are bytes; `"auto"` leaves a decision to LazyTrain.

    `device_memory`, `host_memory`, `nvme_space`: caps per tier. `nvme_path`: directory of the swap files (without it,
    and without an `nvme` offload path in the ZeRO config, nothing goes to NVMe). `nvme_write_budget`: bytes written
    per day. `sequence_length`: tokens per sample the placement is planned for. `micro_batch`: `"keep"` the user's, or
    `"auto"`: another one with as many accumulation steps as keep the global batch. `state_precision`: `"auto"` and
    `"8bit"` may change numerics, so `"fp32"` is the default. `activations`,
    `parameters`, `optimizer_states`: `"auto"`, a rule's name, or a tier (forces it). `blocks`: globs of module names.
    `plan_file`: a plan to execute instead of solving. `policy`: `"module:Class"`. `replan`: whether a plan that real
    steps show to be off is solved again: `"auto"` once, and after lasting drops of a channel's rate; `true` as often as
    it is off. `report_dir`: where plan and
    timelines are written.
    """

    enabled: Annotated[bool, PlainValidator(_enabled)] = True
    device_memory: SizeOrAuto = "auto"
    host_memory: SizeOrAuto = "auto"
    nvme_path: Annotated[str, _or_auto(_text("a path"))] = AUTO
    nvme_space: SizeOrAuto = "auto"
    nvme_write_budget: SizeOrAuto = "auto"
    sequence_length: Annotated[int | Auto, _or_auto(_positive_count)] = "auto"
    micro_batch: Annotated[str, _choice("keep", AUTO)] = "keep"
    state_precision: Annotated[str, _choice("fp32", "8bit", AUTO)] = "fp32"
    activations: Placement = AUTO
    parameters: Placement = AUTO
    optimizer_states: Placement = AUTO
    blocks: Annotated[tuple[str, ...] | Auto, _or_auto(_globs)] = "auto"
    planner: Annotated[PlannerConfig, BeforeValidator(_section)] = PlannerConfig()
    plan_file: Annotated[str, _or_auto(_text("a path"))] = AUTO
    policy: Annotated[str, _or_auto(_policy)] = AUTO
    replan: Annotated[bool | Auto, _or_auto(_flag)] = "auto"
    profile: Annotated[ProfileConfig, BeforeValidator(_section)] = ProfileConfig()
    device: Annotated[dict[str, Any] | Auto, _or_auto(_emulation)] = "auto"
    report_dir: Annotated[str, _or_auto(_text("a path"))] = AUTO

    @classmethod
    def parse(cls, block: Mapping[str, Any]) -> LazyTrainConfig:
        """Validate a block. Raises ConfigError naming every wrong key."""
        try:
            config = cls.model_validate(dict(block))
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(cls, dict(item)) for item in error.errors())) from None
        if config.micro_batch == AUTO and config.plan_file != AUTO:
            raise ConfigError(
                f'"{BLOCK}.micro_batch": "auto" and "{BLOCK}.plan_file" exclude each other: a plan is for one '
                'micro-batch; set "micro_batch": "keep"'
            )
        return config


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")


# Words people use for our tiers, so that "gpu_memory" finds "device_memory".
_OTHER_WORDS: Final = {"gpu": "device", "vram": "device", "cuda": "device", "cpu": "host", "ram": "host"} | {
    "ssd": "nvme",
    "disk": "nvme",
    "seq": "sequence",
    "optim": "optimizer",
    "params": "parameters",
}


def _explain(model: type[BaseModel], item: dict[str, Any]) -> str:
    """One line for one pydantic error: the dotted key, the value, what is valid."""
    path = [str(part) for part in item["loc"]]
    key = ".".join([BLOCK, *path])
    if item["type"] != "extra_forbidden":
        reason = str(item.get("ctx", {}).get("error", item["msg"]))
        return f'"{key}": {item["input"]!r} {reason}'
    all_keys = list(_keys(model))
    section = ".".join(path[:-1])
    siblings = [k for k in all_keys if k.rpartition(".")[0] == section]
    word = "_".join(_OTHER_WORDS.get(part, part) for part in path[-1].lower().replace("-", "_").split("_"))
    near = difflib.get_close_matches(word, [k.rpartition(".")[2] for k in siblings], 1, 0.6)
    if near:
        return f'"{key}" is not a key; did you mean "{".".join([BLOCK, *path[:-1], near[0]])}"?'
    elsewhere = difflib.get_close_matches(word, [k.rpartition(".")[2] for k in all_keys], 1, 0.75)
    if elsewhere:
        home = next(k for k in all_keys if k.rpartition(".")[2] == elsewhere[0])
        return f'"{key}" is not a key here; did you mean "{BLOCK}.{home}"?'
    valid = ", ".join(k.rpartition(".")[2] for k in siblings)
    return f'"{key}" is not a key; valid keys of "{".".join([BLOCK, *path[:-1]])}" are {valid}'


def block_is_on(config: Mapping[str, Any]) -> bool:
    """Whether the config asks for LazyTrain. Raises ConfigError for a block that is neither object, bool nor null."""
    block = config.get(BLOCK)
    if block is None or block is False:
        return False
    if block is True or block == AUTO:
        return True
    if not isinstance(block, Mapping):
        raise ConfigError(
            f'"{BLOCK}": {block!r} is not an object; write "{BLOCK}": {{}} (all defaults), or null for off'
        )
    return block.get("enabled") is not False


def find_block(config: Mapping[str, Any]) -> LazyTrainConfig | None:
    """The validated block of a DeepSpeed config, or None where it is absent or off (then nothing in it is checked).

    `nvme_path: "auto"` becomes the path of an `offload_*` block whose device is `nvme`: that path is the user's.
    """
    if not block_is_on(config):
        return None
    block = config[BLOCK]
    parsed = LazyTrainConfig.parse(block if isinstance(block, Mapping) else {})
    if parsed.nvme_path == AUTO:
        for name in ("offload_param", "offload_optimizer"):
            offload = mapping_of(mapping_of(config.get(ZERO)).get(name))
            if offload.get("device") == "nvme" and offload.get("nvme_path") not in (None, AUTO):
                return parsed.model_copy(update={"nvme_path": str(offload["nvme_path"])})
    return parsed


def misspelt_keys(config: Mapping[str, Any]) -> list[str]:
    """Top-level keys that look like a misspelt `"lazytrain"`."""
    plain = {k: k.lower().replace("_", "").replace("-", "") for k in config if isinstance(k, str) and k != BLOCK}
    return [key for key, word in plain.items() if difflib.get_close_matches(word, [BLOCK], 1, 0.8)]


def require_top_level(config: Mapping[str, Any]) -> None:
    """Refuse a `lazytrain` key inside `zero_optimization`; DeepSpeed would only say that extra inputs are forbidden."""
    if BLOCK in mapping_of(config.get(ZERO)):
        raise ConfigError(f'"{BLOCK}" is inside "{ZERO}"; move it to the top level of the config, beside "{ZERO}"')


def require_stage_3(config: Mapping[str, Any]) -> None:
    """LazyTrain carries out plans inside ZeRO-3 only."""
    zero = config.get(ZERO)
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else int(zero is True)
    if isinstance(stage, bool) or stage != 3:
        raise ConfigError(
            f'"{BLOCK}" needs ZeRO stage 3, but "{ZERO}.stage" is {stage!r}; '
            f'set "{ZERO}": {{"stage": 3}}, or "{BLOCK}": null to train without LazyTrain'
        )


BATCH_KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def require_resolved(config: Mapping[str, Any], *, batch_only: bool = False) -> None:
    """Refuse `"auto"` where nobody is left to resolve it and DeepSpeed would compare a string with a number.

    With `batch_only`, look at the batch keys alone (Hugging Face resolves the rest between zero.Init and initialize).
    """
    names = [key for key in BATCH_KEYS if config.get(key) == AUTO]
    if not batch_only:
        names += ["gradient_clipping"] if config.get("gradient_clipping") == AUTO else []
        for section in ("optimizer", "scheduler"):
            params = mapping_of(mapping_of(config.get(section)).get("params"))
            names += [f"{section}.params.{key}" for key, value in params.items() if value == AUTO]
    if names:
        listed = ", ".join(f'"{name}"' for name in names)
        verb = "are" if len(names) > 1 else "is"
        raise ConfigError(
            f'{listed} {verb} still "auto": only the Hugging Face Trainer and accelerate fill these in; write a number'
        )


def batch_hint(config: Mapping[str, Any], world_size: int) -> str | None:
    """What to set when the three batch keys contradict each other on one process, else None (also for non-integers)."""
    train, micro, rounds = (config.get(key) for key in BATCH_KEYS)
    values = [v for v in (train, micro, rounds) if v is not None]
    if world_size != 1 or train is None or not all(type(v) is int and v > 0 for v in values):
        return None
    if micro is None:
        micro = train // (rounds or 1)
    if rounds is None:
        rounds = train // micro if micro else 0
    if train == micro * rounds:
        return None
    advice = [f'"train_batch_size": {micro * rounds}'] if micro * rounds else []
    if config.get(BATCH_KEYS[2]) is not None and train % rounds == 0:
        advice.append(f'"train_micro_batch_size_per_gpu": {train // rounds}')
    if config.get(BATCH_KEYS[1]) is not None and train % micro == 0:
        advice.append(f'"gradient_accumulation_steps": {train // micro}')
    if not advice:
        advice.append('"gradient_accumulation_steps": 1')
    return (
        f"there is one process, so train_batch_size ({train}) must be train_micro_batch_size_per_gpu ({micro}) x "
        f"gradient_accumulation_steps ({rounds}) = {micro * rounds}; set {' or '.join(advice)}"
    )


# What each excluded feature does itself that a plan decides: the reason in the refusal.
EXCLUDED: Final = MappingProxyType(
    {
        f"{ZERO}.offload_optimizer.super_offload": "it places optimizer states and schedules their step itself",
        f"{ZERO}.zenflow": "it applies some gradients a step late, and a plan never changes results",
        "compile.deepcompile": "it fetches and releases parameters in its own compiled graph, past the plan",
        "hybrid_engine.enabled": "it swaps modules for inference and gathers all parameters at once",
    }
)


def refuse_features(config: Mapping[str, Any]) -> None:
    """Refuse, by name and with the reason, the DeepSpeed features that own placement or the engine themselves."""
    for key, why in EXCLUDED.items():
        value: Any = config
        for part in key.split("."):
            value = mapping_of(value).get(part)
        if value not in (None, False):
            raise UnsupportedError(
                f'"{key}" and "{BLOCK}" exclude each other: {why}. Remove "{key}", or set "{BLOCK}": null'
            )


def mapping_of(value: object) -> Mapping[str, Any]:
    """`value` where it is a mapping, else an empty one: a section that the user left out or got wrong."""
    return value if isinstance(value, Mapping) else {}
