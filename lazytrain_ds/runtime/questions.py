"""What a plan is made from besides the model's trace: shapes of a batch, what the keys leave open, names of stores."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import ConfigError, InfeasibleError, PlanError, SchemaError
from lazytrain_ds.planning.instance import Allowed
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.rules import RULES
from lazytrain_ds.planning.schema import TIERS
from lazytrain_ds.runtime.again import Generators

__all__ = [
    "DEFAULT_SEQUENCE_LENGTH",
    "allowed_by",
    "batch_shape",
    "batch_sides",
    "best_of_rules",
    "generators_untouched",
    "give_store_name",
    "model_length",
    "plan_from_file",
    "take_store_name",
]

DEFAULT_SEQUENCE_LENGTH = 2048
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


def model_length(model: torch.nn.Module) -> int | None:
    """The sequence length that a model's own config names, None where it has none."""
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        for name in LENGTH_NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def batch_sides(inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The first two dimensions of a call's largest tensor: rows and tokens, in some models the other way round."""
    tensors = [leaf for leaf in tree_leaves((inputs, dict(kwargs))) if torch.is_tensor(leaf) and leaf.dim() >= 1]
    return tuple(max((tensor.shape[:2] for tensor in tensors), key=torch.Size.numel, default=()))


def batch_shape(inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, tokens per row) of a call: of its largest tensor with two or more dimensions; (1, 1) if it has none."""
    sides = (*batch_sides(inputs, kwargs), 1, 1)
    return (sides[0], sides[1])


def allowed_by(config: LazyTrainConfig, world_size: int, own_optimizer: bool = True, on_cpu: bool = True) -> Allowed:
    """What the block's keys and this version's runtime leave open.

    `own_optimizer`: the optimizer is one of ours, whose states the runtime knows how to move.
    """

    def forced(value: str, possible: tuple[str, ...], key: str) -> tuple[str, ...]:
        if value in TIERS:
            if value not in possible:
                raise ConfigError(
                    f'"lazytrain.{key}": "{value}" cannot be carried out here, only {", ".join(map(repr, possible))}'
                    + why_not(value, key)
                )
            return (value,)
        return possible

    def why_not(value: str, key: str) -> str:
        if value == "nvme" and config.nvme_path == "auto":
            return '; give the directory of the swap files, "lazytrain.nvme_path"'
        if key == "activations":
            return ""
        if not one_rank:
            return "; with more than one rank it is DeepSpeed that gathers parameters and steps states"
        if key == "optimizer_states" and not own_optimizer:
            return '; states elsewhere need an optimizer of ours: "type": "AdamW" or "HybridAdamW8bit" in the config'
        return "; on a GPU states are where they are updated, on the host" if value == "device" else ""

    nvme = ("nvme",) if config.nvme_path != "auto" else ()
    activation_tiers = ("device", "host", *nvme)
    one_rank = world_size == 1
    # On a CPU the device's arithmetic is the host's, so that states may live in either; on a GPU it is not.
    state_tiers: tuple[str, ...] = ("host",)
    if one_rank and own_optimizer:
        state_tiers = (*(("device",) if on_cpu else ()), "host", *nvme)
    return Allowed(
        boundary_tiers=forced(config.activations, activation_tiers, "activations"),
        saved_tiers=forced(config.activations, activation_tiers, "activations"),
        parameter_tiers=forced(config.parameters, ("device", "host", *(nvme if one_rank else ())), "parameters"),
        optimizer_tiers=forced(config.optimizer_states, state_tiers, "optimizer_states"),
        step_modes=("hidden", "serial") if world_size == 1 else ("serial",),
    )


def plan_from_file(name: str) -> Plan:
    """The plan in a file: one that a run left in its report directory, or an answer of `lazytrain plan --json`.

    ConfigError names the file and what is wrong with it.
    """
    path = Path(name).expanduser()
    key = f'"lazytrain.plan_file": {str(path)!r}'
    if not path.is_file():
        raise ConfigError(f'"lazytrain.plan_file": there is no file {str(path)!r}')
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} cannot be read: {error}") from error
    if isinstance(content, dict) and "fits" in content and "plan" in content:
        if content["plan"] is None:
            raise ConfigError(f'{key} is an answer of `lazytrain plan` that says "does not fit", and holds no plan')
        text = json.dumps(content["plan"])
    try:
        return Plan.from_json(text)
    except SchemaError as error:
        raise ConfigError(
            f"{key} is not a plan ({error}); a run leaves its plan in `report_dir`, and `lazytrain plan --json FILE` "
            "writes one"
        ) from error


@contextmanager
def generators_untouched(device: torch.device) -> Iterator[None]:
    """Tracing runs the model's code: whatever random numbers that draws, the training sees its own."""
    now = Generators.capture(device)
    try:
        yield
    finally:
        now.set()


def best_of_rules(solved: Callable[[str], Plan]) -> Plan:
    """The rule plan with the shortest predicted step; what `solved` raises where none of them fits."""
    plans: list[Plan] = []
    failure: Exception | None = None
    for name in RULES:
        try:
            plans.append(solved(name))
        except (InfeasibleError, PlanError) as error:
            failure = error
    if not plans:
        assert failure is not None
        raise failure
    return min(plans, key=lambda plan: plan.prediction.step_seconds)


_names_in_use: set[str] = set()


def take_store_name(rank: int) -> str:
    """A name for one more store of this process: the same in each run, so that it takes over what a killed one left."""
    names = (f"rank{rank}" if number == 1 else f"rank{rank}-{number}" for number in itertools.count(1))
    name = next(name for name in names if name not in _names_in_use)
    _names_in_use.add(name)
    return name


def give_store_name(name: str) -> None:
    """The store of that name is closed."""
    _names_in_use.discard(name)
