"""What every key of the block and every error means, for docs/config.md and docs/errors.md (`render`).

    python -m lazytrain_ds.reference            # writes both, from a checkout

Here and not in the docs, so that a test finds a key or an error without its words.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from lazytrain_ds import errors
from lazytrain_ds.config import EXCLUDED, RULES, TIERS, ZERO, LazyTrainConfig
from lazytrain_ds.errors import LazyTrainError
from lazytrain_ds.rewrite import LIMITS, PREFIXED_LIMITS

__all__ = ["ERRORS", "KEYS", "KeyHelp", "render"]


class KeyHelp(NamedTuple):
    """What a key may be, what it means, and what `"auto"` does."""

    values: str
    meaning: str
    auto: str


_SIZE: Final = '`70000000000`, `"70GB"`, `"65GiB"`'
_PLACES: Final = ", ".join(f'`"{name}"`' for name in (*RULES, *TIERS))

KEYS: Final[dict[str, KeyHelp]] = {
    "enabled": KeyHelp("`true`, `false`", "`false` is as good as no block: everything is stock DeepSpeed's", "`true`"),
    "device_memory": KeyHelp(
        _SIZE, "cap on device memory; a plan and a run stay under it", "what is free at the start"
    ),
    "host_memory": KeyHelp(
        _SIZE, "cap on host memory", "what is available, by /proc/meminfo and cgroup limits; half of it without a GPU"
    ),
    "nvme_path": KeyHelp(
        "a directory on a local disk",
        "where swap files are; each run has a subdirectory of its own, removed at its end",
        'the `nvme_path` of an offload section whose `device` is `"nvme"`, else nothing goes to NVMe',
    ),
    "nvme_space": KeyHelp(_SIZE, "cap on the bytes of swap files", "what is free in `nvme_path`"),
    "nvme_write_budget": KeyHelp(
        _SIZE,
        "bytes that may be written to NVMe in 24 hours: a warning at 90 %, an error before it is passed",
        "no limit",
    ),
    "sequence_length": KeyHelp(
        "a whole number",
        "tokens per sample that placement is planned for; activations are planned from the real batch",
        "the model config's length, else 2048 (said)",
    ),
    "micro_batch": KeyHelp(
        '`"keep"`, `"auto"`',
        '`"keep"`: the config\'s micro-batch stays',
        "the planner chooses, the global batch is kept: for `training_data=` and for scripts that read "
        "`engine.train_micro_batch_size_per_gpu()`; it changes numerics",
    ),
    "state_precision": KeyHelp(
        '`"fp32"`, `"8bit"`, `"auto"`',
        'precision of the optimizer\'s moments; `"8bit"` only with the optimizer `HybridAdamW8bit`, whose default it is',
        "the planner chooses per block, which changes numerics",
    ),
    "activations": KeyHelp(
        _PLACES, "a rule, or where activations are kept: forces it", "the planner decides per block"
    ),
    "parameters": KeyHelp(_PLACES, "a rule, or where parameters live: forces it", "the planner decides per block"),
    "optimizer_states": KeyHelp(
        _PLACES, "a rule, or where optimizer states live: forces it", "the planner decides per block"
    ),
    "blocks": KeyHelp(
        'a glob or a list of globs, `"model.layers.*"`',
        "the modules that are the model's repeated blocks",
        "found by structure",
    ),
    "planner.kind": KeyHelp(
        '`"milp"`, `"rules"`, `"paper"`, ' + ", ".join(f'`"{name}"`' for name in RULES),
        "how the plan is found: our program, the best rule, the published activation program, or one rule",
        '`"milp"`',
    ),
    "planner.solver": KeyHelp('`"highs"`, `"scip"`', "solver of the program", "the one measured to be faster"),
    "planner.time_limit": KeyHelp(
        "seconds above 0", "worth of searching; turned into counts, so that equal input gives an equal plan", "3"
    ),
    "planner.gap": KeyHelp("a number from 0", "relative distance to the lower bound at which to stop", "0.01"),
    "plan_file": KeyHelp(
        "a path",
        "a plan (JSON, validated, never executed; what a run left in `report_dir`, or an answer of `lazytrain plan --json`) to carry out instead of solving",
        "solve",
    ),
    "policy": KeyHelp(
        '`"module:Class"`', "your own policy (Python code, imported and run) instead of the plan's", "ours"
    ),
    "replan": KeyHelp(
        "`true`, `false`",
        "whether a plan that real steps show to be more than 15 % off is solved again with what was measured, without a "
        "change of any result; `true`: as often as it is off",
        "once, and after a lasting drop of a channel's rate",
    ),
    "profile.cache_dir": KeyHelp("a path", "where measured speeds of this machine are kept", "`~/.cache/lazytrain_ds`"),
    "profile.refresh": KeyHelp("`true`, `false`", "measure anew", "`false`"),
    "device": KeyHelp(
        '`{"emulate": {"memory": "96MB", "h2d": "400MB/s", "d2h": "400MB/s"}}`',
        'a CPU plays a device behind a link, in wall time; it computes at its own speed, or `"compute": "3GFLOPS"`, or '
        '`"compute": 0.02` (seconds that the largest block\'s forward takes); `nvme_read`, `nvme_write` and `host` (host '
        "memory's bandwidth, for updates) are rates as well, `latency` is seconds per copy; or a `preset` of "
        "`lazytrain plan --hardware` with all its figures times `scale`",
        "the real device",
    ),
    "report_dir": KeyHelp(
        "a path",
        "the run leaves its plan, measured timelines and step records there, for `lazytrain explain`, `timeline` and "
        "`compare`; one directory per run",
        "nothing is written",
    ),
}

# What to do about each error; what it is, is its docstring.
ERRORS: Final[dict[str, str]] = {
    "ConfigError": "Correct the key the message names; it says which values are valid and names the nearest key for a "
    "misspelt one. [config.md](config.md) lists all keys.",
    "UnsupportedError": "Remove the feature the message names, install the DeepSpeed version it names, or set "
    '`"lazytrain": null` to train without LazyTrain.',
    "SchemaError": "The file was written by another version or by hand: make it again with `lazytrain plan --json`, or "
    "let the run solve instead of giving `plan_file`.",
    "PlanError": "Use the plan with the model, micro-batch and machine it was made for; without `plan_file` the run "
    "makes its own.",
    "InfeasibleError": "The message says which memory is short and by how much, and what would be enough: raise that "
    "cap, give an `nvme_path`, take a smaller micro-batch or sequence, or the optimizer `HybridAdamW8bit`. `lazytrain "
    "plan` tries such changes without a run.",
    "DeviceMemoryError": "The device held more than was predicted (other processes, larger batches): lower "
    "`device_memory`, or the micro-batch. The message says what holds how much.",
    "HostMemoryError": "Lower `host_memory` so that the plan uses less, give an `nvme_path`, or end what else takes "
    "memory on the machine.",
    "SwapError": "The message has path, errno and free space: free space on the disk, raise `nvme_space` or "
    "`nvme_write_budget`, or name another `nvme_path`. `lazytrain doctor --nvme-path DIR --clean` removes what killed "
    "runs left.",
    "OptimizerError": "The training itself diverges: lower the learning rate, clip gradients, look at the last batches. "
    "Weights are as before the first non-finite gradient.",
    "WorkerError": "A background thread failed; the error it failed with is shown as its cause: act on that one.",
}


def _defaults(model: type[BaseModel], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _defaults(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = None if field.default is PydanticUndefined else field.default
    return found


def key_names() -> list[str]:
    """Every key of the block, nested ones dotted, in the order of the code."""
    return list(_defaults(LazyTrainConfig))


def error_names() -> list[str]:
    """Every error class that LazyTrain raises on purpose, the base class aside."""
    classes = [getattr(errors, name) for name in errors.__all__]
    return [
        c.__name__ for c in classes if isinstance(c, type) and issubclass(c, LazyTrainError) and c is not LazyTrainError
    ]


def _config_page() -> str:
    lines = [
        "# The block, key by key",
        "",
        "Made by `python -m lazytrain_ds.reference` from the code; a test compares them.",
        "",
        'Every key may be left out or `"auto"`. Sizes are bytes or strings, decimal (`"70GB"`) or binary (`"65GiB"`). The '
        'block itself may be `{}`, `true` or `"auto"` (all defaults), `null` or `false` (off).',
        "",
        '| key | values | meaning | `"auto"` | default |',
        "|---|---|---|---|---|",
    ]
    for key, default in _defaults(LazyTrainConfig).items():
        words = KEYS[key]
        lines.append(f"| `{key}` | {words.values} | {words.meaning} | {words.auto} | `{_literal(default)}` |")
    lines += [
        "",
        "## Who wins",
        "",
        "With the block on, LazyTrain owns placement. These keys of `zero_optimization` are replaced; a run prints each "
        "that you had set, and `lazytrain convert` says it beforehand.",
        "",
        "| key | why |",
        "|---|---|",
        "| `offload_param`, `offload_optimizer` | the plan places each block itself; `pin_memory` and `nvme_path` stay yours |",
    ]
    for name, _, why in LIMITS:
        lines.append(f"| `{'stage3_' if name in PREFIXED_LIMITS else ''}{name}` | {why} |")
    lines += [
        "",
        "Everything else stays yours: dtypes, batch sizes, clipping, schedulers, `aio`, `gradient_accumulation_dtype`, "
        "logging. These features are refused by name, with the reason:",
        "",
        "| feature | why |",
        "|---|---|",
    ]
    lines += [f"| `{key}` | {why} |" for key, why in EXCLUDED.items()]
    lines += [
        "| a `PipelineModule` | it runs in DeepSpeed's pipeline engine, which LazyTrain does not drive |",
        "| 4-bit and 8-bit loaded weights (QLoRA) | packed bytes cannot be partitioned as numbers; LoRA over bf16 works |",
        f"| `{ZERO}.stage` other than 3 | plans are carried out inside ZeRO-3 |",
    ]
    return "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    return (
        f'"{value}"'
        if isinstance(value, str)
        else "true"
        if value is True
        else "false"
        if value is False
        else str(value)
    )


def _errors_page() -> str:
    lines = [
        "# Every error, and what to do",
        "",
        "Made by `python -m lazytrain_ds.reference` from the code; a test compares them.",
        "",
        "Each message says what is wrong, what is needed and what is there, and what to do. All are subclasses of "
        "`lazytrain_ds.errors.LazyTrainError`. DeepSpeed's own errors about the rest of a config come first and "
        "unchanged. On the command line an error is one line and exit status 2 (`--debug` shows the traceback).",
        "",
        "| error | what it is | what to do |",
        "|---|---|---|",
    ]
    for name in error_names():
        about = " ".join((getattr(errors, name).__doc__ or "").split())
        lines.append(f"| `{name}` | {about} | {ERRORS[name]} |")
    lines += [
        "",
        "## Symptoms without an error of ours",
        "",
        "| what you see | what it is | what to do |",
        "|---|---|---|",
        "| exit code -9, no message | the kernel's out-of-memory killer | set `host_memory` below what is free; `lazytrain "
        "plan` prints need and have of every phase |",
        "| the run stands still at its start | a kernel is being built, or an interrupted build left a lock | after 10 s a "
        "line says what is going on and which lock is in the way; if no build is running, delete that file (`lazytrain "
        "doctor` finds all of them) |",
        "| `note: ... pageable memory` | the driver refuses to page-lock more (WSL2, containers) | nothing; copies are "
        'slower. `"pin_memory": false` in an offload section avoids the attempt |',
        "| compute waits a large share of the step | a channel is the bottleneck | `lazytrain explain RUN_DIR` says which "
        "one and what would help |",
        "| the measured step is far from the predicted one | other load on the machine, or a rate that was measured "
        'wrongly | `"profile": {"refresh": true}` measures anew |',
    ]
    return "\n".join(lines) + "\n"


def render() -> dict[str, str]:
    """File name in docs/ -> text."""
    return {"config.md": _config_page(), "errors.md": _errors_page()}


def main() -> None:
    """Write the pages into docs/ of the checkout this module lies in."""
    docs = Path(__file__).resolve().parent.parent / "docs"
    if not docs.is_dir():
        sys.exit(f"there is no {docs}: run this from a checkout")
    for name, text in render().items():
        (docs / name).write_text(text)
        print(f"wrote {docs / name}")


if __name__ == "__main__":
    main()
