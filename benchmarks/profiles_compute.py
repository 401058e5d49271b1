"""Measured against later compute time, and predicted against real step: `python benchmarks/profiles_compute.py`.

Per configuration, in a child process with one thread: the blocks' seconds are measured over five micro-steps
(`BlockTimer`), entered into the Instance (`with_measured`), and compared with the medians of the following 20
steps: per class of blocks in CPU time of the compute thread, and for the whole step in wall time against the
simulator. The latter means something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from profiles_memory import LLAMA, build

SMALL = LLAMA | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 6,
                 "num_key_value_heads": 6}  # fmt: skip
GPT2 = {"kind": "gpt2", "vocab_size": 2000, "n_embd": 384, "n_layer": 5, "n_head": 6, "n_positions": 256}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama-keep": {"model": SMALL, "batch": 4, "length": 128, "block": {"activations": "keep_all"}},
    "llama-long": {"model": SMALL, "batch": 1, "length": 512, "block": {"activations": "keep_all"}},
    "llama-rounds": {"model": SMALL, "batch": 2, "length": 128, "rounds": 3, "block": {"activations": "keep_all"}},
    "qwen2-tied": {"model": SMALL | {"kind": "qwen2", "tie_word_embeddings": True}, "batch": 4, "length": 128,
                   "block": {"activations": "keep_all"}},
    "gpt2": {"model": GPT2, "batch": 4, "length": 128, "block": {"activations": "keep_all"}},
    "gpt2-wide": {"model": GPT2 | {"n_embd": 768, "n_head": 12, "n_layer": 3}, "batch": 2, "length": 128,
                  "block": {"activations": "keep_all"}},
}  # fmt: skip
MEASURED_STEPS, COMPARED_STEPS = 5, 20


def child(name: str) -> None:
    """Run one configuration and print its figures as JSON."""
    import deepspeed
    import torch

    import lazytrain_ds  # noqa: F401
    from lazytrain_ds.planning.simulator import predict
    from lazytrain_ds.workload.blocks import find_blocks
    from lazytrain_ds.workload.measure import BlockTimer, with_measured

    case = CONFIGURATIONS[name]
    rounds = case.get("rounds", 1)
    config = {
        "train_micro_batch_size_per_gpu": case["batch"],
        "gradient_accumulation_steps": rounds,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "lazytrain": case["block"] | {"profile": {"refresh": True}},  # not rates of an hour when the machine was busy
        "steps_per_print": 10**6,
    }
    engine = deepspeed.initialize(model=build(case["model"]), config=config)[0]
    ids = torch.randint(0, 50, (case["batch"], case["length"]))

    def step() -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        return time.perf_counter() - start

    step()
    instance = engine.lazytrain_instance
    classes = dict(enumerate(instance.order))
    table = find_blocks(engine.module)

    def timed(steps: int) -> tuple[dict[str, Any], list[float]]:
        with BlockTimer(engine.module, table, time.thread_time) as timer:
            durations = [step() for _ in range(steps)]
        return timer.seconds(classes, skip=0), durations

    first, _ = timed(MEASURED_STEPS)
    second, durations = timed(COMPARED_STEPS)
    size = engine.lazytrain_plan.micro_batch
    predicted = predict(with_measured(instance, first, size), engine.lazytrain_plan).step_seconds
    ratios = {}
    for key in first:
        pairs = ((first[key].forward, second[key].forward), (first[key].backward, second[key].backward))
        known = [(before, after) for before, after in pairs if before and after]
        if known and instance.order.count(key) > 1:
            ratios[key] = sum(after for _, after in known) / sum(before for before, _ in known)
    figures = {"ratios": ratios, "predicted": predicted, "step": statistics.median(durations)}
    print("FIGURES", json.dumps(figures), flush=True)
    os._exit(0)


def main() -> None:
    """Run all configurations and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(CONFIGURATIONS), action="append")
    parser.add_argument("--port", type=int, default=29760)
    parser.add_argument("--child", choices=sorted(CONFIGURATIONS))
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
    root = Path(__file__).resolve().parents[1]
    print(f"{platform.processor() or platform.machine()}, python {platform.python_version()}, load {os.getloadavg()}\n")
    print("| configuration | block, CPU time: later / measured | predicted step | median step | predicted / median |")
    print("|---|---|---|---|---|")
    for number, name in enumerate(arguments.only or CONFIGURATIONS):
        environment = {
            **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(arguments.port + number), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }  # fmt: skip
        answer = subprocess.run(
            [sys.executable, __file__, "--child", name], env=environment, capture_output=True, text=True, check=False
        )
        line = next((line for line in answer.stdout.splitlines() if line.startswith("FIGURES")), None)
        if line is None:
            sys.exit(f"{name} failed:\n{answer.stdout[-2000:]}\n{answer.stderr[-3000:]}")
        figures = json.loads(line.removeprefix("FIGURES"))
        ratios = ", ".join(f"{key} {value:.3f}" for key, value in figures["ratios"].items())
        predicted, step = figures["predicted"], figures["step"]
        print(f"| {name} | {ratios} | {predicted:.3f} s | {step:.3f} s | {predicted / step:.3f} |", flush=True)


if __name__ == "__main__":
    main()
