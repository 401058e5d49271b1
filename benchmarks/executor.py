"""The executor on the emulated device: the planner's plan against every rule and against stock DeepSpeed's fetch.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python benchmarks/executor.py --output benchmarks/executor.md

Six settings. In each, every contestant trains the same model through `deepspeed.initialize` on the same emulated
device: its copies take latency + bytes / rate of wall time on their own channels, its memory is counted and capped,
its NVMe and host work are throttled. With timed compute (the default) a block takes FLOPs / rate on the device's clock
while the real, tiny computation runs; so what is measured is the executor: what it issues when, who waits, what it
holds. With `--compute real` the CPU's own speed takes the clock's place and its noise is in the figures.

A step is the wall time between two optimizer steps, the median of `--steps` after two. "played" is the same on the
device's clock, without what a busy machine added to it: Python that comes later to a block than the device's queue is
long, or computes for longer than the block should take. "bound" is the lower bound of the setting's instance, "error"
predicted over measured step, "peak" the device ledger's from the third step on over the predicted one; the peak of the
first steps, when nothing has slowed a forward down yet, is held against the cap.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

WIDTH, HEADS, LENGTH, VOCABULARY, BLOCKS = 64, 4, 256, 211, 12
BLOCK_BYTES = 4 * (12 * WIDTH * WIDTH + 13 * WIDTH)
CONTESTANTS = ("auto", "keep_all", "checkpoint_all", "checkpoint_all_host", "megatrain", "zero3_offload", "stock")
WARM_UP = 2
CHANNELS = ("h2d", "d2h", "nvme_read", "nvme_write", "host")


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A language model that returns its loss; `recompute` wraps each block in torch's checkpoint (for stock)."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Setting:
    """`transfer`: a block's parameters over the link, as a share of its forward. `forward_seconds`: of one block."""

    name: str
    memory_bytes: int
    transfer: float
    forward_seconds: float = 0.020
    rows: int = 2
    rounds: int = 1
    host_bytes_per_second: int = 100_000_000
    memory_bound: bool = False
    disk: float | None = None  # NVMe rate over the link's, both directions
    block: dict[str, Any] = field(default_factory=dict)

    def section(self, compute: str) -> dict[str, Any]:
        """The `emulate` section."""
        link = round(BLOCK_BYTES / (self.transfer * self.forward_seconds))
        result: dict[str, Any] = {"memory": self.memory_bytes, "h2d": link, "d2h": link}
        if self.disk is not None:
            result.update(nvme_read=round(self.disk * link), nvme_write=round(self.disk * link))
        if compute == "timed":
            result.update(compute=self.forward_seconds, host=self.host_bytes_per_second)
        return result


NVME = {"parameters": "nvme", "optimizer_states": "nvme"}
SETTINGS = (
    Setting("compute-bound", 60_000_000, 0.2),
    Setting("link-bound", 12_000_000, 1.5),
    Setting("memory-bound", 10_000_000, 0.5, memory_bound=True),
    Setting("NVMe", 16_000_000, 0.15, disk=0.5, block=NVME),
    Setting("small micro-batch", 8_000_000, 1.0, forward_seconds=0.012, rows=1, rounds=4),
    Setting("large micro-batch", 24_000_000, 0.15, forward_seconds=0.040, rows=6, memory_bound=True),
)


def config(setting: Setting, contestant: str, compute: str, directory: str) -> dict[str, Any]:
    """The DeepSpeed config of one contestant."""
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.rows,
        "gradient_accumulation_steps": setting.rounds,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
    }
    if contestant == "stock":
        numel = BLOCK_BYTES // 4
        result["zero_optimization"].update(
            stage3_param_persistence_threshold=0,
            stage3_prefetch_bucket_size=numel,
            stage3_max_live_parameters=4 * numel,
            stage3_max_reuse_distance=0,
            reduce_bucket_size=numel,
        )
        return result
    result["lazytrain"] = {
        "device": {"emulate": setting.section(compute)},
        "sequence_length": LENGTH,
        "planner": {"kind": contestant},
        "replan": False,  # what a run measured would enter its plan, and the caches of later ones
        "nvme_path": directory if setting.disk is not None else "auto",
        **setting.block,
    }
    return result


@contextlib.contextmanager
def engine_of(settings: dict[str, Any], recompute: bool) -> Iterator[Any]:
    """A one-process engine on a free port."""
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    import deepspeed

    import lazytrain_ds  # noqa: F401 - hooks DeepSpeed

    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=Model(recompute), config=settings)
    try:
        yield engine
    finally:
        engine.destroy()


def train(
    engine: Any,
    rows: int,
    rounds: int,
    steps: int,
    device: Any = None,
    warm: Callable[[], None] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Wall seconds between optimizer steps, and seconds on `device`'s clock; the first `WARM_UP` left out.

    `warm` is called behind those.
    """
    generator = torch.Generator().manual_seed(0)
    moments, played = [], []
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            warm()
        for _ in range(rounds):
            ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
            engine.backward(engine(input_ids=ids, labels=ids))
            engine.step()
        moments.append(time.perf_counter())
        played.append(moments[-1] if device is None else device.played_seconds())
    return tuple([after - before for before, after in pairwise(each[WARM_UP - 1 :])] for each in (moments, played))


def measure(setting: Setting, contestant: str, compute: str, steps: int, directory: str) -> dict[str, Any]:
    """One contestant's row."""
    from lazytrain_ds.errors import InfeasibleError
    from lazytrain_ds.planning.bounds import lower_bound

    try:
        with engine_of(config(setting, contestant, compute, directory), recompute=False) as engine:
            book = engine._lt_book
            first_peak = 0

            def warm() -> None:
                nonlocal first_peak
                first_peak = book.device.ledger.peak_bytes
                book.device.ledger.reset_peak()

            seconds, played = train(engine, setting.rows, setting.rounds, steps, book.device, warm)
            plan, prediction = book.plan, book.plan.prediction
            timelines = list(book.monitor.timelines)[-steps:]
            row = {
                "step": statistics.median(seconds),
                "steps": [round(value, 5) for value in seconds],
                "played": statistics.median(played),
                "predicted": prediction.step_seconds,
                "peak": book.device.ledger.peak_bytes,
                "first_peak": first_peak,
                "rerun_under_safer_plan": plan.origin.startswith("ladder"),
                "predicted_peak": prediction.peak_bytes("device"),
                "cap": setting.memory_bytes,
                "stalls": {
                    channel: [
                        statistics.median(timeline.stall_seconds(channel) for timeline in timelines),
                        next((c.exposed_seconds for c in prediction.channels if c.channel == channel), 0.0),
                    ]
                    for channel in CHANNELS
                },
                "choices": summary(plan),
            }
            if contestant == "auto":
                row["bound"] = lower_bound(book.instance)
                row["instance"] = book.instance.to_json()
            return row
    except InfeasibleError as error:
        return {"refused": str(error).splitlines()[0]}


def measure_stock(setting: Setting, instance_json: str, steps: int) -> dict[str, Any]:
    """Stock DeepSpeed, blocks checkpointed (its usual fit), under the same emulation."""
    from benchmarks.stock_fetch import StockFetch
    from lazytrain_ds.hardware.emulation import Emulation
    from lazytrain_ds.planning.instance import Instance
    from lazytrain_ds.workload.blocks import find_blocks

    instance = Instance.from_json(instance_json)
    emulation = Emulation.parse(setting.section("timed"))
    with engine_of(config(setting, "stock", "timed", ""), recompute=True) as engine:
        stock = StockFetch(engine, emulation, instance, find_blocks(engine.module))
        with stock.running():
            seconds, played = train(engine, setting.rows, setting.rounds, steps, stock.device)
            return {"step": statistics.median(seconds), "played": statistics.median(played)}


def instance_of(setting: Setting, compute: str) -> Any:
    """The planner's instance of a setting, without training."""
    with engine_of(config(setting, "checkpoint_all", compute, ""), recompute=False) as engine:
        return engine._lt_book.instance


def summary(plan: Any) -> str:
    """What the plan does, in a few words."""
    counts: dict[str, int] = {}
    for block in plan.blocks:
        words = [block.choice if block.saved_tier == "device" else f"{block.choice} to {block.saved_tier}"]
        words += [f"boundary {block.boundary}"] if block.boundary != "device" else []
        words += ["resident"] if block.resident else []
        counts[" ".join(words)] = counts.get(" ".join(words), 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items()) + f"; {plan.optimizer_step}"


# -- the table -------------------------------------------------------------------------------------------------------
def table(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """One row per setting and contestant."""
    lines = [
        "| setting | contestant | step ms | played | % of bound | predicted | error | peak MB | of predicted | cap MB "
        "| plan |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        bound = rows["auto"].get("bound")
        for contestant, row in rows.items():
            if "step" not in row:
                lines.append(f"| {name} | {contestant} | does not fit | | | | | | | | |")
                continue
            cells = [name, contestant, f"{1e3 * row['step']:.0f}", f"{1e3 * row['played']:.0f}"]
            cells += [f"{100 * bound / row['step']:.0f}" if bound else ""]
            if "predicted" in row:
                cells += [
                    f"{1e3 * row['predicted']:.0f}",
                    f"{100 * (row['predicted'] / row['step'] - 1):+.1f} %",
                    f"{row['peak'] / 1e6:.2f}",
                    f"{row['peak'] / row['predicted_peak']:.3f}",
                    f"{row['cap'] / 1e6:.0f}",
                    row["choices"],
                ]
            else:
                cells += [""] * 6
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def verdicts(results: dict[str, dict[str, dict[str, Any]]], clock: str) -> list[str]:
    """The acceptance lines, each with its figure. `clock`: "step" (wall) or "played"."""
    lines, shares, errors, peaks, rules = [], [], [], [], []
    settings = {setting.name: setting for setting in SETTINGS}
    for name, rows in results.items():
        auto = rows["auto"]
        if settings[name].memory_bound and "step" in rows.get("megatrain", {}):
            gain = rows["megatrain"][clock] / auto[clock]
            lines.append(
                f"* {name}: {gain:.2f}x faster than megatrain (at least 1.2x: {'yes' if gain >= 1.2 else 'NO'})"
            )
        if "stock" in rows and "step" in rows["stock"]:
            lines.append(f"* {name}: {rows['stock'][clock] / auto[clock]:.2f}x faster than stock's fetch")
        for contestant, row in rows.items():
            if contestant not in ("auto", "stock") and "step" in row:
                rules.append((auto[clock] / row[clock] - 1, name, contestant))
        shares.append(auto["bound"] / auto[clock])
        errors += [(abs(row["predicted"] / row[clock] - 1), name, c) for c, row in rows.items() if "predicted" in row]
        peaks += [(abs(r["peak"] / r["predicted_peak"] - 1), name, c) for c, r in rows.items() if "predicted" in r]
    for what, worst, limit in (
        ("slower than a rule at worst", max(rules, default=None), 0.03),
        ("worst error of a predicted step", max(errors), 0.10),
        ("worst error of a predicted device peak", max(peaks), 0.04),
    ):
        if worst is None:
            continue
        value, name, contestant = worst
        lines.append(
            f"* {what}: {100 * value:.1f} % ({name}, {contestant}; at most {100 * limit:.0f} %: "
            f"{'yes' if value <= limit else 'NO'})"
        )
    over = [f"{name}, {c}" for name, rows in results.items() for c, r in rows.items() if "peak" in r
            and (max(r["peak"], r["first_peak"]) > r["cap"] or r["rerun_under_safer_plan"])]  # fmt: skip
    lines.append(f"* over the cap, or run again under a safer plan: {'; '.join(over) or 'none'}")
    share = statistics.median(shares)
    lines.append(
        f"* median setting: {100 * share:.0f} % of the lower bound (at least 80 %: {'yes' if share >= 0.8 else 'NO'})"
    )
    return lines


def stall_table(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = [
        "| setting | contestant | " + " | ".join(CHANNELS) + " |",
        "|---" * (len(CHANNELS) + 2) + "|",
    ]
    for name, rows in results.items():
        for contestant, row in rows.items():
            if "stalls" in row:
                cells = [f"{1e3 * seen:.1f} / {1e3 * said:.1f}" for seen, said in row["stalls"].values()]
                lines.append(f"| {name} | {contestant} | " + " | ".join(cells) + " |")
    return lines


def document(results: dict[str, dict[str, dict[str, Any]]], arguments: argparse.Namespace) -> str:
    """The page."""
    processor = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    import deepspeed

    return "\n".join(
        [
            "# The executor on the emulated device",
            "",
            f"* Hardware: {processor}, {os.cpu_count()} cores; no GPU",
            f"* Versions: Python {platform.python_version()}, torch {torch.__version__}, "
            f"deepspeed {deepspeed.__version__}",
            f"* Command: `python benchmarks/executor.py {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}",
            f"* GPT of {BLOCKS} blocks of width {WIDTH}, {LENGTH} tokens, fp32; compute {arguments.compute}; "
            f"load average {os.getloadavg()[0]:.1f} at the end",
            "",
            "By the wall clock:",
            "",
            *verdicts(results, "step"),
            "",
            "By the device's clock (without what the machine added):",
            "",
            *verdicts(results, "played"),
            "",
            *table(results),
            "",
            "Stalls, milliseconds a step, measured / predicted:",
            "",
            *stall_table(results),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", help="names (default: all)")
    parser.add_argument("--contestants", nargs="*", default=CONTESTANTS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compute", choices=("timed", "real"), default="timed")
    parser.add_argument("--results", help="JSON file of figures; measured settings found in it are kept")
    parser.add_argument("--output", help="markdown file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    by_name = {setting.name: setting for setting in SETTINGS}
    directory = tempfile.mkdtemp(prefix="lt-executor-")
    try:
        if arguments.child:
            contestant, instance = arguments.child
            setting = by_name[arguments.settings[0]]
            if contestant == "stock":
                row = measure_stock(setting, Path(instance).read_text(), arguments.steps)
            else:
                row = measure(setting, contestant, arguments.compute, arguments.steps, directory)
            print("ROW " + json.dumps(row))
            return
        results: dict[str, Any] = {}
        if arguments.results and Path(arguments.results).exists():
            results = json.loads(Path(arguments.results).read_text())
        for name in arguments.settings or list(by_name):
            rows = results.setdefault(name, {})
            for contestant in arguments.contestants:
                if contestant in rows or (contestant == "stock" and (arguments.compute == "real" or name == "NVMe")):
                    continue
                instance = Path(directory) / "instance.json"
                instance.write_text(rows.get("auto", {}).get("instance", ""))
                rows[contestant] = run_child(name, contestant, str(instance), arguments)
                shown = {key: value for key, value in rows[contestant].items() if key not in ("instance", "steps")}
                print(name, contestant, shown, flush=True)
                if arguments.results:
                    Path(arguments.results).write_text(json.dumps(results))
        text = document(results, arguments)
        print(text)
        if arguments.output:
            Path(arguments.output).write_text(text)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_child(name: str, contestant: str, instance: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Each contestant is a process of its own: no allocator, thread or cache is shared."""
    command = [sys.executable, __file__, "--settings", name, "--child", contestant, instance]
    command += ["--steps", str(arguments.steps), "--compute", arguments.compute]
    environment = {**os.environ, "XDG_CACHE_HOME": str(Path(instance).parent)}  # one probe of the machine for all
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith("ROW "):
            row: dict[str, Any] = json.loads(line[4:])
            return row
    raise SystemExit(f"{name}, {contestant}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
