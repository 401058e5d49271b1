"""Everything on NVMe: LazyTrain against stock DeepSpeed ZeRO-3, side by side on one disk.

    DS_ACCELERATOR=cpu python benchmarks/nvme.py --directory /mnt/nvme --output benchmarks/nvme.md

A GPT-like stack of 12 blocks of hidden 1,024 (151 M parameters), parameters and optimizer states on NVMe for all:

* `stock`: DeepSpeed's swappers, pipeline_read and pipeline_write on, prefetch bucket 0 (with another it crashes);
* `lazytrain fp32`: parameters and fp32 states on NVMe, hidden optimizer step;
* `lazytrain 8bit`: the same with HybridAdamW8bit.

Each is a process that lives through the whole run; in a round each does a turn of a few steps, so that the machine's
other load hits all alike, and ratios are taken within rounds. LazyTrain gets `--host-cap` as its `host_memory`; what
each process really holds beside its start is printed. The order within a round rotates, so that no one always follows
the same neighbour's writes.

Few tokens, because this is about the disk, and fp32, because many CPUs multiply bf16 slowly. Stock DeepSpeed 0.19.8
cannot keep fp32 parameters on NVMe on a CPU (`_set_dtype` in zero/partition_parameters.py makes its buffers half
precision whatever dtype it is given, and the first matmul fails); `stock` runs with that one line corrected.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("hidden", "blocks", "rows", "length", "dtype", "turn")
KINDS = ("stock", "lazytrain fp32", "lazytrain 8bit")


def config(kind: str, arguments: argparse.Namespace, directory: str) -> dict[str, Any]:
    """The user's config: one file but for the offload sections, the block and the optimizer's name."""
    optimizer = "HybridAdamW8bit" if kind.endswith("8bit") else "AdamW"
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        **({"bf16": {"enabled": True}} if arguments.dtype == "bf16" else {}),
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "aio": {"block_size": 1048576, "queue_depth": 16, "intra_op_parallelism": 1, "overlap_events": True},
        "zero_optimization": {"stage": 3},
    }
    if kind == "stock":
        largest = 4 * arguments.hidden * arguments.hidden
        result["zero_optimization"].update(
            {
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 4 * largest,
                "stage3_max_reuse_distance": 0,
                "sub_group_size": 13 * arguments.hidden * arguments.hidden,
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": directory,
                    "pin_memory": False,
                    "buffer_count": 8,
                    "buffer_size": largest + 1024,
                    "max_in_cpu": 0,
                },
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": directory,
                    "pin_memory": False,
                    "buffer_count": 12,  # 4 for each of read, step and write
                    "pipeline_read": True,
                    "pipeline_write": True,
                    "fast_init": False,
                },
            }
        )
    else:
        result["lazytrain"] = {
            "parameters": "nvme",
            "optimizer_states": "nvme",
            "nvme_path": directory,
            "host_memory": arguments.host_cap,
            "sequence_length": arguments.length,
            "planner": {"kind": "keep_all"},
        }
    return result


# -- one contestant --------------------------------------------------------------------------------------------------
def honour_the_given_dtype() -> None:
    """Stock's `a or b if c else d` reads as `(a or b) if c else d`: the dtype it is given is lost on a CPU."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Base

    original = Base._set_dtype

    def corrected(self: Any, ds_config: Any, dtype: Any) -> None:
        original(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    Base._set_dtype = corrected


class Clock:
    """Seconds per channel, added up over a step; thread-safe."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] += seconds

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Count the time callers spend in a method."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.add(name, time.perf_counter() - started)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        with self._lock:
            taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def own_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def disk_bytes() -> tuple[int, int]:
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counted["read_bytes"]), int(counted["write_bytes"])


def contestant(kind: str, arguments: argparse.Namespace, directory: str) -> None:
    """A training process: one turn of a few steps for each line on the standard input."""
    sys.path.insert(0, str(ROOT))
    import torch

    import lazytrain_ds  # noqa: F401 - hooks DeepSpeed
    from tests import models

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=arguments.port)
    import deepspeed

    torch.manual_seed(0)
    model = models.GPT(
        vocabulary=1024, width=arguments.hidden, blocks=arguments.blocks, heads=16, length=arguments.length, dropout=0.0
    )
    if kind == "stock":
        honour_the_given_dtype()
    baseline = own_bytes() - sum(p.numel() * p.element_size() for p in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(kind, arguments, directory)
    )
    clock = Clock()
    instrument(kind, engine, clock)
    print("READY " + json.dumps({"parameters": sum(p.ds_numel for p in model.parameters())}), flush=True)
    number = 0
    for _ in sys.stdin:
        parts: dict[str, float] = defaultdict(float)
        before = disk_bytes()
        clock.take()
        begin = time.perf_counter()
        for _ in range(arguments.turn):
            ids = models.batch(number, vocabulary=1024, rows=arguments.rows, length=arguments.length)
            number += 1
            started = time.perf_counter()
            loss = engine(input_ids=ids, labels=ids)
            forward = time.perf_counter()
            engine.backward(loss)
            backward = time.perf_counter()
            engine.step()
            ended = time.perf_counter()
            parts["forward"] += forward - started
            parts["backward"] += backward - forward
            parts["step"] += ended - backward
        # Hidden updates are not over when the last step() returns. They belong to this turn: others run next.
        if kind != "stock":
            engine.optimizer.drain()
            parts["last updates"] += time.perf_counter() - ended
        after = disk_bytes()
        report = {
            "seconds": (time.perf_counter() - begin) / arguments.turn,
            "parts": {name: value / arguments.turn for name, value in parts.items()},
            "channels": {name: value / arguments.turn for name, value in clock.take().items()},
            "read": (after[0] - before[0]) / arguments.turn,
            "written": (after[1] - before[1]) / arguments.turn,
            "memory": own_bytes() - baseline,
            "loss": float(loss),
        }
        print("STEP " + json.dumps(report), flush=True)
    engine.destroy()


def instrument(kind: str, engine: Any, clock: Clock) -> None:
    """Where the time goes: the disk's channels, and what the compute thread waits for."""
    if kind == "stock":
        optimizer = engine.optimizer
        parameters = next(p for p in engine.module.parameters()).nvme_swapper
        clock.wrap(parameters, "synchronize_reads", "wait for parameter reads")
        clock.wrap(parameters, "synchronize_writes", "wait for parameter writes")
        clock.wrap(parameters, "swap_into_buffer", "wait for parameter reads")
        swapper = optimizer.optimizer_swapper
        for name in ("swap_in_optimizer_state", "swap_out_optimizer_state", "swap_out_gradients"):
            clock.wrap(swapper, name, f"optimizer swapper: {name}")
        clock.wrap(optimizer.optimizer, "step", "host (Adam)")
        return
    store = engine._lt_book.nvme_store
    store._ledger.on_transfer = lambda which, key, size, start, end: clock.add(
        f"nvme {which} (busy, {key.split('/')[0]})", end - start
    )
    clock.wrap(engine.optimizer._lt_updater, "apply", "host (Adam)")
    engine.optimizer._lt_store.on_stall = lambda channel, seconds: clock.add("compute waits for parameters", seconds)


# -- the comparison --------------------------------------------------------------------------------------------------
class Process:
    def __init__(self, kind: str, arguments: argparse.Namespace, port: int) -> None:
        self.kind = kind
        self.directory = tempfile.mkdtemp(prefix=kind.replace(" ", "_"), dir=arguments.directory)
        options = [f"--{name}={getattr(arguments, name)}" for name in SHARED]
        command = [sys.executable, __file__, f"--contestant={kind}", f"--swap={self.directory}", f"--port={port}"]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            [*command, *options, f"--host-cap={arguments.host_cap}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
        )
        self.facts = self._answer("READY ")
        self.steps: list[dict[str, Any]] = []

    def _answer(self, mark: str) -> dict[str, Any]:
        for line in self.process.stdout:
            if line.startswith(mark):
                return json.loads(line.removeprefix(mark))
        self.log.seek(0)
        raise SystemExit(f"{self.kind} ended with {self.process.wait()}: {self.log.read()[-3000:]}")

    def step(self) -> dict[str, Any]:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.steps.append(self._answer("STEP "))
        return self.steps[-1]

    def close(self) -> int:
        self.process.stdin.close()
        self.process.stdout.read()
        status = self.process.wait()
        self.log.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        return status


def median(values: Any) -> float:
    return statistics.median(list(values))


def compare(arguments: argparse.Namespace) -> str:
    contestants = [Process(kind, arguments, int(arguments.port) + n) for n, kind in enumerate(arguments.kinds)]
    statuses: dict[str, int] = {}
    try:
        for round_number in range(arguments.rounds + arguments.warm_up):
            first = round_number % len(contestants)
            for each in contestants[first:] + contestants[:first]:
                found = each.step()
                print(
                    f"round {round_number} {each.kind}: {found['seconds']:.2f} s, loss {found['loss']:.5f}", flush=True
                )
    finally:
        statuses = {each.kind: each.close() for each in contestants}
    return page(arguments, contestants, statuses)


def page(arguments: argparse.Namespace, contestants: list[Process], statuses: dict[str, int]) -> str:
    import deepspeed
    import torch

    tokens = arguments.rows * arguments.length
    kept = {each.kind: each.steps[arguments.warm_up :] for each in contestants}
    base = kept[contestants[0].kind]
    lines = [
        "# Everything on NVMe: LazyTrain against stock DeepSpeed",
        "",
        f"`python benchmarks/nvme.py --rounds {arguments.rounds} --turn {arguments.turn} --rows {arguments.rows} "
        f"--length {arguments.length} --dtype {arguments.dtype} --hidden {arguments.hidden} --blocks "
        f"{arguments.blocks} --host-cap {arguments.host_cap}`, "
        f"{platform.machine()}, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}, torch "
        f"{torch.__version__}, DeepSpeed {deepspeed.__version__}, Linux {platform.release()}. "
        f"{contestants[0].facts['parameters'] / 1e6:.0f} M parameters, {arguments.dtype}, {tokens} tokens per step, "
        f"{arguments.rounds} rounds of turns of {arguments.turn} steps. Ratios are medians of ratios within rounds "
        "(smallest and largest in brackets).",
        "",
        "| | s per step (median) | tokens/s | times stock | read / written per step | own memory, peak | exit |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in contestants:
        mine = kept[each.kind]
        seconds = median(step["seconds"] for step in mine)
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(base, mine, strict=True)]
        lines.append(
            f"| {each.kind} | {seconds:.2f} | {tokens / seconds:.2f} | {median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {median(s['read'] for s in mine) / 1e9:.2f} / "
            f"{median(s['written'] for s in mine) / 1e9:.2f} GB | {max(s['memory'] for s in mine) / 1e9:.2f} GB | "
            f"{statuses[each.kind]} |"
        )
    lines += ["", "## Where the time goes", "", "Seconds per step, medians.", ""]
    for each in contestants:
        mine = kept[each.kind]
        for source in ("parts", "channels"):
            names = sorted({name for step in mine for name in step[source]})
            entries = [f"{name} {median(step[source].get(name, 0.0) for step in mine):.2f}" for name in names]
            what = "phases of the step" if source == "parts" else "channels and waits"
            lines.append(f"* {each.kind}, {what}: {', '.join(entries)}")
    lines += [
        "",
        "Phases follow each other; channels run beside them and overlap. Times of LazyTrain's NVMe channels are summed "
        "over transfers that run at once, from the first request's start. At the end of a turn LazyTrain's last hidden "
        "updates are waited for and counted, because another process runs next.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=None, help="on the disk to measure; default: a temporary directory")
    parser.add_argument("--output", default=None, help="markdown file to write")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=1, dest="warm_up")
    parser.add_argument("--turn", type=int, default=3, help="steps in a row")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--host-cap", default="3GB", dest="host_cap")
    parser.add_argument("--port", default="29835")
    parser.add_argument(
        "--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="the first is the base of ratios"
    )
    parser.add_argument("--contestant", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--swap", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        contestant(arguments.contestant, arguments, arguments.swap)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        arguments.directory = directory
        text = compare(arguments)
    print(text)
    if arguments.output:
        Path(arguments.output).write_text(text)


if __name__ == "__main__":
    main()
