"""What the block replaces in the rest of a DeepSpeed config ("who wins").

Works on plain dicts, as `config` does, and imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lazytrain_ds.config import AUTO, ZERO, mapping_of

__all__ = ["LIMITS", "PREFIXED_LIMITS", "Replacement", "RewrittenConfig", "rewrite"]


@dataclass(frozen=True)
class Replacement:
    """One key of the user's config that LazyTrain replaced. `old` is None where the key was not set."""

    key: str
    old: object
    new: object
    why: str

    def __str__(self) -> str:
        old = "not set" if self.old is None else repr(self.old)
        new = "removed" if self.new is None else "unlimited" if self.new == sys.maxsize else repr(self.new)
        return f"{self.key}: {old} -> {new} ({self.why})"


class RewrittenConfig(dict[str, Any]):
    """A config that already went through `rewrite`: hooks pass it on untouched."""


# ZeRO-3 limits that would fight the plan. (name without prefix, new value, why)
LIMITS: Final = (
    ("sub_group_size", sys.maxsize, "sub-groups are one per block"),
    ("prefetch_bucket_size", 0, "the plan prefetches"),
    ("param_persistence_threshold", 0, "the plan decides what is resident"),
    ("model_persistence_threshold", None, "the plan decides what is resident"),
    ("max_live_parameters", sys.maxsize, "the plan keeps device memory under its cap"),
    ("max_reuse_distance", 0, "the plan decides what is kept"),
)
PREFIXED_LIMITS: Final = frozenset(name for name, _, _ in LIMITS) - {"sub_group_size"}
_DEPRECATED_OFFLOAD: Final = ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")


def rewrite(config: Mapping[str, Any]) -> tuple[RewrittenConfig, list[Replacement]]:
    """The config DeepSpeed gets to see, and what was replaced in it. The argument is left alone.

    Both offloads become `cpu`, with the user's `pin_memory`, so that DeepSpeed builds neither its swapper nor async_io;
    the limits of `LIMITS` are lifted. The block itself stays, so that DeepSpeed's printed config shows it.
    """
    new = RewrittenConfig({key: _copy(value) for key, value in config.items()})
    zero: dict[str, Any] = new[ZERO]
    replaced: list[Replacement] = []

    old_offload = {name: mapping_of(zero.get(name)) for name in ("offload_param", "offload_optimizer")}
    optimizer_was_offloaded = old_offload["offload_optimizer"].get("device") in ("cpu", "nvme") or bool(
        zero.get("cpu_offload")
    )
    pins = [block["pin_memory"] for block in old_offload.values() if isinstance(block.get("pin_memory"), bool)]
    old_style_pin = zero.get("cpu_offload_use_pin_memory")
    default_pin = pins[0] if pins else old_style_pin if isinstance(old_style_pin, bool) else True
    for name, old in old_offload.items():
        pin = old.get("pin_memory")
        target = {"device": "cpu", "pin_memory": pin if isinstance(pin, bool) else default_pin}
        zero[name] = target
        changed = {key: value for key, value in old.items() if target.get(key) != value and value != AUTO}
        # An NVMe path is the user's and stays in force (find_block hands it to the plan), so it was not replaced.
        if old.get("device") == "nvme":
            changed.pop("nvme_path", None)
        if not old:
            replaced.append(Replacement(f"{ZERO}.{name}", None, target, "the plan places each block itself"))
        for key, value in changed.items():
            why = "the plan places each block itself" if key == "device" else "LazyTrain has its own buffers and tiers"
            replaced.append(Replacement(f"{ZERO}.{name}.{key}", value, target.get(key), why))
    for key in _DEPRECATED_OFFLOAD:
        if key in zero:
            replaced.append(Replacement(f"{ZERO}.{key}", zero.pop(key), None, "deprecated; the plan places each block"))

    for name, value, why in LIMITS:
        spelling = f"stage3_{name}" if name in PREFIXED_LIMITS else name
        for alias in dict.fromkeys((spelling, name)):
            old_value = zero.pop(alias, None)
            if old_value is not None and old_value not in (value, AUTO):
                replaced.append(Replacement(f"{ZERO}.{alias}", old_value, value, why))
        if value is not None:
            zero[spelling] = value

    # DeepSpeed refuses a client optimizer under CPU offload; offload that only we introduced must not trigger that.
    if not optimizer_was_offloaded and new.get("zero_force_ds_cpu_optimizer", True):
        new["zero_force_ds_cpu_optimizer"] = False
    return new, replaced


def _copy(value: Any) -> Any:
    """Copy containers, share leaves: a config may hold process groups and other things that must not be copied."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
