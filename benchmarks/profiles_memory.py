"""Predicted against real memory of CPU runs: `python benchmarks/profiles_memory.py [--only NAME] [--port 29750]`.

Each configuration trains three steps in a child process. On a CPU the device is host memory too, so the prediction
is: resident memory before the model exists, plus the plan's host peak, plus its device peak. The child first
trains a tiny model, so that libraries which load lazily count as "before". malloc keeps freed memory below its
threshold for mapping; the children fix that threshold at 128 KiB, as a long run's allocator would not otherwise
return a block's buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

LLAMA = {"kind": "llama", "vocab_size": 2000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
         "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 512}  # fmt: skip
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama-fp32": {"model": LLAMA, "batch": 2, "length": 128},
    "llama-fp32-recompute": {"model": LLAMA, "batch": 4, "length": 256, "block": {"activations": "checkpoint_all"}},
    "llama-fp32-segments": {"model": LLAMA, "batch": 4, "length": 256, "block": {"activations": "megatrain"}},
    "llama-bf16": {"model": LLAMA | {"num_hidden_layers": 9, "hidden_size": 960, "intermediate_size": 2560},
                   "batch": 1, "length": 8, "dtype": "bf16"},
    "qwen2-tied-fp32": {"model": LLAMA | {"kind": "qwen2", "vocab_size": 20000, "tie_word_embeddings": True},
                        "batch": 2, "length": 128},
    "qwen2-tied-fp32-rounds": {"model": LLAMA | {"kind": "qwen2", "vocab_size": 20000, "tie_word_embeddings": True},
                               "batch": 2, "length": 128, "rounds": 2},
    "gpt2-fp32-host": {"model": {"kind": "gpt2", "vocab_size": 5000, "n_embd": 768, "n_layer": 7, "n_head": 12,
                                 "n_positions": 256},
                       "batch": 4, "length": 128, "block": {"activations": "checkpoint_all_host"}},
}  # fmt: skip


def build(fields: dict[str, Any]) -> Any:
    """An HF model with random weights."""
    import transformers

    kind, settings = fields["kind"], {key: value for key, value in fields.items() if key != "kind"}
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }[kind]
    return model(config(**settings))


TINY = {"llama": {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                  "num_attention_heads": 2}}  # fmt: skip


def train(case: dict[str, Any], model: Any, steps: int, batch: int, length: int) -> Any:
    """Train for some steps; returns the engine."""
    import deepspeed
    import torch

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": case.get("rounds", 1),
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "lazytrain": case.get("block", {}),
        "steps_per_print": 10**6,
    }
    if case.get("dtype") == "bf16":
        config["bf16"] = {"enabled": True}
        model = model.bfloat16()
    engine = deepspeed.initialize(model=model, config=config)[0]
    ids = torch.randint(0, 50, (batch, length))
    for _ in range(steps * case.get("rounds", 1)):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
    return engine


def child(name: str) -> None:
    """Train one configuration and print its figures as JSON."""
    import psutil

    import lazytrain_ds  # noqa: F401

    case = CONFIGURATIONS[name]
    train(case, build({"kind": "llama", **TINY["llama"]}), 2, 1, 16).destroy()
    before = psutil.Process().memory_info().rss
    engine = train(case, build(case["model"]), 3, case["batch"], case["length"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    plan, instance = engine.lazytrain_plan, engine.lazytrain_instance
    figures = {
        "parameters": instance.parameter_count,
        "before": before,
        "host": plan.prediction.peak_bytes("host"),
        "device": plan.prediction.peak_bytes("device"),
        "peak": peak,
    }
    print("FIGURES", json.dumps(figures), flush=True)
    os._exit(0)


def main() -> None:
    """Run all configurations and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(CONFIGURATIONS), action="append")
    parser.add_argument("--port", type=int, default=29750)
    parser.add_argument("--child", choices=sorted(CONFIGURATIONS))
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
    root = Path(__file__).resolve().parents[1]
    print(f"{platform.processor() or platform.machine()}, python {platform.python_version()}\n")
    print("| configuration | parameters | before | host | device | predicted | measured | measured / predicted |")
    print("|---|---|---|---|---|---|---|---|")
    for number, name in enumerate(arguments.only or CONFIGURATIONS):
        environment = {
            **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(arguments.port + number), "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
            "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }  # fmt: skip
        answer = subprocess.run(
            [sys.executable, __file__, "--child", name], env=environment, capture_output=True, text=True, check=False
        )
        line = next((line for line in answer.stdout.splitlines() if line.startswith("FIGURES")), None)
        if line is None:
            sys.exit(f"{name} failed:\n{answer.stdout[-2000:]}\n{answer.stderr[-3000:]}")
        figures = json.loads(line.removeprefix("FIGURES"))
        predicted = figures["before"] + figures["host"] + figures["device"]
        cells = [f"{figures[key] / 1e9:.3f} GB" for key in ("before", "host", "device")]
        cells += [f"{predicted / 1e9:.3f} GB", f"{figures['peak'] / 1e9:.3f} GB", f"{figures['peak'] / predicted:.3f}"]
        print(f"| {name} | {figures['parameters'] / 1e6:.1f} M | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
