"""`lazytrain convert`: an existing DeepSpeed config with a `"lazytrain"` block, and line by line what changed and why.

Needs neither torch nor DeepSpeed. Says the same as a run does when it replaces keys (`rewrite`), but before.
"""

from __future__ import annotations

import difflib
import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from lazytrain_ds.commands.question import read_config_file
from lazytrain_ds.config import (
    AUTO,
    BLOCK,
    EXCLUDED,
    ZERO,
    find_block,
    misspelt_keys,
    require_top_level,
)
from lazytrain_ds.errors import ConfigError
from lazytrain_ds.report.screen import screen, table, write_json
from lazytrain_ds.rewrite import LIMITS, PREFIXED_LIMITS

__all__ = ["Line", "convert", "run"]

What = Literal["kept", "removed", "changed", "moved", "added"]

_PLACES: Final = "the plan places each block itself"
_OWN_BUFFERS: Final = "LazyTrain sizes its own buffers and tiers"
_OTHERS: Final = "not about placement: stays yours"
_MISSPELT: Final = f'looks like "{BLOCK}" misspelt; DeepSpeed ignores it: move what it says into "{BLOCK}"'
_ANY_OPTIMIZER: Final = "LazyTrain steps any torch optimizer, sub-group by sub-group"
_KEPT_WHY: Final = {
    "train_batch_size": "the batch stays yours",
    "train_micro_batch_size_per_gpu": "the batch stays yours",
    "gradient_accumulation_steps": "the batch stays yours",
    "aio": "stays yours; used when the plan goes to NVMe and DeepSpeed's file access measures faster than ours",
    "activation_checkpointing": "does nothing by itself; the plan decides what is recomputed. Kept for scripts that "
    "pass it to deepspeed.checkpointing.configure",
    "optimizer": 'stays yours; "HybridAdamW8bit" as its type halves the states (and changes numerics)',
}
_OFFLOADS: Final = ("offload_param", "offload_optimizer")
_DEPRECATED: Final = ("cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory")


@dataclass(frozen=True)
class Line:
    """One key of the config: what became of it, and why. `old` and `new` are None where there is none."""

    key: str
    what: What
    old: Any
    new: Any
    why: str


def convert(old: Mapping[str, Any]) -> tuple[dict[str, Any], list[Line]]:
    """The config with a block and without what the block makes meaningless; the argument is left alone.

    ConfigError where the config has a block that is wrong.
    """
    require_top_level(old)
    new: dict[str, Any] = {}
    lines: list[Line] = []
    block: dict[str, Any] = {}
    zero = old.get(ZERO)
    misspelt = misspelt_keys(old)
    for key, value in old.items():
        if key == ZERO:
            new[ZERO], found = _zero(value, block)
            lines += found
        elif key == BLOCK:
            continue
        elif key in ("zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"):
            lines.append(Line(key, "removed", value, None, _ANY_OPTIMIZER))
        elif key == "hybrid_engine":
            lines.append(Line(key, "removed", value, None, _excludes("hybrid_engine.enabled")))
        elif key == "compile" and isinstance(value, Mapping) and "deepcompile" in value:
            lines.append(
                Line("compile.deepcompile", "removed", value["deepcompile"], None, _excludes("compile.deepcompile"))
            )
            rest = {name: item for name, item in value.items() if name != "deepcompile"}
            if rest:
                new[key] = rest
                lines.append(Line(key, "kept", rest, rest, _OTHERS))
        else:
            new[key] = value
            lines.append(Line(key, "kept", value, value, _MISSPELT if key in misspelt else _why_kept(key, value)))
    if zero is None:
        new[ZERO] = {"stage": 3}
        lines.append(Line(f"{ZERO}.stage", "added", None, 3, "plans are carried out inside ZeRO-3"))
    elif isinstance(zero, Mapping) and "aio" in zero:
        given = zero["aio"]
        if "aio" not in new:
            new["aio"] = given
            lines.append(
                Line(f"{ZERO}.aio", "moved", given, given, 'to the top level: DeepSpeed reads "aio" there only')
            )
        else:
            lines.append(Line(f"{ZERO}.aio", "removed", given, None, 'DeepSpeed reads "aio" at the top level only'))
    lines += _add_block(old, new, block)
    return new, lines


def _add_block(old: Mapping[str, Any], new: dict[str, Any], block: Mapping[str, Any]) -> Iterator[Line]:
    if BLOCK in old and old[BLOCK] not in (None, False):
        given = old[BLOCK]
        new[BLOCK] = (
            {**given, **{k: v for k, v in block.items() if k not in given}}
            if isinstance(given, Mapping)
            else (dict(block) or given)
        )
        find_block(new)
        yield Line(BLOCK, "kept", given, given, "there was a block already")
    else:
        new[BLOCK] = dict(block)
        yield Line(BLOCK, "added", None, dict(block), "turns LazyTrain on; every key in it has a default")
    for key, value in block.items():
        yield Line(f"{BLOCK}.{key}", "added", None, value, "from the offload section that was removed")


def _excludes(key: str) -> str:
    return f'cannot be combined with "{BLOCK}": {EXCLUDED[key]}'


def _why_kept(key: str, value: Any) -> str:
    why = _KEPT_WHY.get(key, _OTHERS)
    if value == AUTO or (isinstance(value, Mapping) and AUTO in json.dumps(value)):
        why += '; "auto" is filled in by the Hugging Face Trainer or accelerate'
    return why


def _zero(given: Any, block: dict[str, Any]) -> tuple[dict[str, Any], list[Line]]:
    """The `zero_optimization` section; what belongs into the block goes there."""
    if not isinstance(given, Mapping):
        stage = 3 if given is True else given
        return {"stage": 3}, [Line(ZERO, "changed", stage, {"stage": 3}, "plans are carried out inside ZeRO-3")]
    new: dict[str, Any] = {}
    lines: list[Line] = []
    found_path = find_block({ZERO: given, BLOCK: {}})
    if found_path is not None and found_path.nvme_path != AUTO:
        block["nvme_path"] = found_path.nvme_path
    limits = {f"stage3_{n}" if n in PREFIXED_LIMITS else n: why for n, _, why in LIMITS} | {
        n: why for n, _, why in LIMITS
    }
    for key, value in given.items():
        name = f"{ZERO}.{key}"
        if key == "stage":
            new[key] = 3
            what: What = "kept" if value == 3 else "changed"
            lines.append(Line(name, what, value, 3, "plans are carried out inside ZeRO-3"))
        elif key in _OFFLOADS and isinstance(value, Mapping):
            kept, found = _offload(name, value, block)
            lines += found
            if kept:
                new[key] = kept
        elif key in _OFFLOADS or key in _DEPRECATED:
            lines.append(Line(name, "removed", value, None, _PLACES))
        elif key in limits:
            lines.append(Line(name, "removed", value, None, limits[key]))
        elif key == "zenflow":
            lines.append(Line(name, "removed", value, None, _excludes(name)))
        elif key == "aio":
            continue
        elif key == "reduce_bucket_size" and value == 0:
            lines.append(Line(name, "removed", value, None, "DeepSpeed refuses 0; its default applies"))
        elif near := difflib.get_close_matches(key, [k for k in limits if k.startswith("stage3_")], 1, 0.9):
            why = f'"{near[0]}" misspelt, which DeepSpeed refuses; {limits[near[0]]}'
            lines.append(Line(name, "removed", value, None, why))
        else:
            new[key] = value
            lines.append(Line(name, "kept", value, value, _why_kept(key, value)))
    if "stage" not in given:
        new = {"stage": 3, **new}
        lines.insert(0, Line(f"{ZERO}.stage", "added", None, 3, "plans are carried out inside ZeRO-3"))
    return new, lines


def _offload(name: str, given: Mapping[str, Any], block: dict[str, Any]) -> tuple[dict[str, Any], list[Line]]:
    kept: dict[str, Any] = {}
    lines: list[Line] = []
    for key, value in given.items():
        line = f"{name}.{key}"
        if key == "nvme_path" and given.get("device") == "nvme" and value not in (None, AUTO):
            block.setdefault("nvme_path", value)
            if block["nvme_path"] == value:
                lines.append(Line(line, "moved", value, value, f'to "{BLOCK}.nvme_path"; one directory serves all'))
            else:
                lines.append(Line(line, "removed", value, None, f'"{BLOCK}.nvme_path" is one directory for all'))
        elif key == "pin_memory" and value is False:
            kept = {"device": "cpu", "pin_memory": False}
            lines.append(Line(line, "kept", value, value, "stays yours: nothing is pinned"))
        elif key == "pin_memory":
            lines.append(Line(line, "removed", value, None, "true is the default"))
        elif key == "super_offload" and value:
            why = _excludes(f"{ZERO}.offload_optimizer.super_offload")
            lines.append(Line(line, "removed", value, None, why))
        elif key == "device" and value == "none":
            why = 'the plan moves what does not fit; "lazytrain": {"parameters": "device"} forbids it'
            lines.append(Line(line, "removed", value, None, why))
        else:
            lines.append(Line(line, "removed", value, None, _PLACES if key == "device" else _OWN_BUFFERS))
    return kept, lines


def run(arguments: Namespace) -> int:
    """Print what changes and why, then the new config, or write it to `--output`; 0."""
    new, lines = convert(read_config_file(arguments.config))
    text = json.dumps(new, indent=2) + "\n"
    if arguments.output is not None:
        target = Path(arguments.output).expanduser()
        if target.exists() and not arguments.force:
            raise ConfigError(f"--output: {target} exists; --force overwrites it")
        try:
            target.write_text(text)
        except OSError as error:
            raise ConfigError(f"--output: cannot write {target}: {error.strerror}") from error
    if write_json(arguments.json, {"config": new, "lines": [asdict(line) for line in lines]}):
        return 0
    console = screen()
    shown = table(f"{arguments.config}, line by line", "key", "", "why", left=3)
    borders, key, what = 10, 49, 7  # the longest key that is common fits; the reasons get the rest
    shown.columns[0].width, shown.columns[1].width = key, what
    shown.columns[2].width = max(20, console.width - borders - key - what)
    colours = {"kept": "default", "removed": "red", "changed": "yellow", "moved": "yellow", "added": "green"}
    inside = False
    for line in lines:
        if line.key.startswith(f"{ZERO}.") and not inside:
            shown.add_row(ZERO, "", "")
        inside = line.key.startswith(f"{ZERO}.")
        shown.add_row(_short(line), f"[{colours[line.what]}]{line.what}[/]", line.why)
    console.print(shown)
    if arguments.output is not None:
        console.print(f"wrote {arguments.output}", markup=False)
    else:
        console.print("\nThe new config (--output FILE writes it):", style="bold")
        console.print(text, markup=False, soft_wrap=True)
    return 0


def _short(line: Line) -> str:
    from rich.markup import escape

    value = line.new if line.what in ("added", "moved") else line.old
    text = json.dumps(value)
    if isinstance(value, Mapping) and value:
        text = "{...}"
    if line.what == "changed":
        text = f"{json.dumps(line.old)} -> {json.dumps(line.new)}"
    key = line.key.replace(f"{ZERO}.", "  ")
    return escape(f"{key}: {text if len(text) <= 40 else text[:37] + '...'}")
