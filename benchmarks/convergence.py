"""Does training with 8-bit moments end where training with fp32 moments ends?

    python benchmarks/convergence.py                       # everything; hours on two cores, resumable
    python benchmarks/convergence.py text --steps 300 --seeds 1
    python benchmarks/convergence.py math | wide | rare

text: a byte-level GPT of about 2 M parameters on the sources of Python's standard library; validation loss per seed.
math: a small transformer learns additions with exact answers; accuracy on 20,000 paired problems.
wide: gradients of very different sizes inside one block; the largest single update and the distance to fp32's path.
rare: tokens seen every 40th step with large gradients in a 300-row embedding, moments forced to 8 bit and by default.

Runs of one seed share their initial weights and batches. Finished runs are kept in --results (JSON) and not repeated;
the table in convergence.md is written from what is there, with the number of steps of every run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from lazytrain_ds.optim import kernels
from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit
from lazytrain_ds.optim.layout import StateLayout

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from math_accuracy import CONTEXT, DIGITS, GPT, VOCABULARY, random_additions, solved

OPTIMIZERS = ("fp32", "8bit")
HYPER = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)


def make_optimizer(kind: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    options = dict(lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    return (
        torch.optim.AdamW(model.parameters(), **options)
        if kind == "fp32"
        else HybridAdamW8bit(model.parameters(), model=model, **options)
    )


def fit(
    kind: str,
    model: nn.Module,
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    lr: float,
    label: str,
) -> torch.optim.Optimizer:
    """Warm-up over 5 % of the steps, cosine to a tenth, gradients clipped to norm 1. Targets of -100 are ignored."""
    optimizer = make_optimizer(kind, model, lr)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * min(1, s / steps)))
    )
    begin = time.time()
    for step in range(steps):
        ids, targets = batch(step)
        loss = functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"{label} step {step + 1}/{steps} loss {loss.item():.4f} ({time.time() - begin:.0f} s)", flush=True)
    return optimizer


# --- text ---


def standard_library_bytes() -> torch.Tensor:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts and "test" not in p.parts)
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)


def text_run(kind: str, seed: int, steps: int) -> dict:
    data = standard_library_bytes()
    cut, context, rows = int(0.9 * len(data)), 64, 8
    torch.manual_seed(seed)
    model = GPT(256, context, 192, 4, 6)

    def sample(generator: torch.Generator, low: int, high: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(low, high - context - 1, (count,), generator=generator)
        window = torch.stack([data[s : s + context + 1] for s in starts]).long()
        return window[:, :-1], window[:, 1:]

    generator = torch.Generator().manual_seed(1000 + seed)
    optimizer = fit(kind, model, lambda _: sample(generator, 0, cut, rows), steps, 2e-3, f"text {kind} seed {seed}")
    losses = []
    fixed = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for _ in range(32):
            ids, targets = sample(fixed, cut, len(data), 16)
            losses.append(functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).item())
    result = {"loss": sum(losses) / len(losses), "parameters": sum(p.numel() for p in model.parameters())}
    if isinstance(optimizer, HybridAdamW8bit):
        result["state_bytes"] = optimizer.state_bytes()["held"]
    return result


# --- math ---


def math_run(kind: str, seed: int, steps: int) -> dict:
    torch.manual_seed(seed)
    model = GPT(VOCABULARY, CONTEXT, 128, 2, 4)
    generator = torch.Generator().manual_seed(1000 + seed)

    fit(kind, model, lambda _: random_additions(128, generator), steps, 2e-3, f"math {kind} seed {seed}")
    correct = solved(model)
    return {"accuracy": correct.double().mean().item(), "correct": "".join("01"[int(c)] for c in correct)}


# --- wide and rare ---


PARITY = "lognormal, sigma 1"  # the set-up of the prototype that compared rules for the second moment


def sizes(n: int, spread: float, gen: torch.Generator) -> torch.Tensor:
    """Sizes of n gradients: lognormal with sigma `spread` (times a factor per block, sigma 1.5), or, negative, even
    over that many decades."""
    if spread < 0:
        return 10 ** (spread * torch.rand(n, generator=gen))
    blocks, elements = torch.randn(n // 256, 1, generator=gen), torch.randn(n // 256, 256, generator=gen)
    return torch.exp(blocks * 1.5 + elements * spread).view(-1) * 1e-3


def wide_run() -> dict:
    """After 100 steps, by spread of sizes, all relative to fp32 moments: the largest movement of an element, the
    largest update of one step, the largest deviation (over the largest movement), the distance of the paths."""
    n = 1 << 18
    out = {}
    spreads = {f"lognormal, sigma {s:g}": (s, False) for s in (0.5, 1.0, 2.0, 3.0)}
    spreads |= {f"even over {d} decades": (-d, False) for d in (1, 2, 3, 5)}
    spreads |= {f"lognormal, sigma {s:g}, drawn anew every step": (s, True) for s in (1.0, 2.0, 3.0)}
    spreads |= {f"even over {d} decades, drawn anew every step": (-d, True) for d in (3, 5)}
    for name, (spread, anew) in spreads.items():
        gen = torch.Generator().manual_seed(0)
        scale = sizes(n, spread, gen)
        layouts = {"8bit": StateLayout.whole(n, "8bit"), "fp32": StateLayout.whole(n, "fp32")}
        params, states = {k: torch.zeros(n) for k in layouts}, {k: x.new_state() for k, x in layouts.items()}
        largest = dict.fromkeys(layouts, 0.0)
        for step in range(1, 101):
            if anew and step > 1:
                scale = sizes(n, spread, gen)
            grad = (torch.randn(n, generator=gen) + 0.2) * scale
            for k, layout in layouts.items():
                before = params[k].clone()
                kernels.adamw_segments_step_(
                    params[k],
                    grad,
                    states[k],
                    layout,
                    lr=1e-3,
                    beta1=0.9,
                    beta2=0.999,
                    eps=1e-8,
                    weight_decay=0.0,
                    step=step,
                )
                largest[k] = max(largest[k], (params[k] - before).abs().max().item())
        ours, theirs = params["8bit"], params["fp32"]
        top = theirs.abs().max()
        out[name] = {
            "moved": (ours.abs().max() / top).item(),
            "step": largest["8bit"] / largest["fp32"],
            "deviation": ((ours - theirs).abs().max() / top).item(),
            "distance": ((ours - theirs).norm() / theirs.norm()).item(),
        }
    return out


def rare_run() -> dict:
    """How far the embedding's entries moved at most in 400 steps, relative to torch's AdamW."""
    far = {}
    for name in ("torch", "default", "8bit"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 300))
        options = dict(lr=1e-2, weight_decay=0.0)
        forced = ["0.weight"] if name == "8bit" else []
        optimizer = (
            torch.optim.AdamW(net.parameters(), **options)
            if name == "torch"
            else HybridAdamW8bit(net.parameters(), model=net, quantized_parameters=forced, **options)
        )
        start = net[0].weight.detach().clone()
        for step in range(400):
            tokens = torch.randint(0, 60, (256,))
            rare = step % 40 == 39
            if rare:
                tokens[:4] = 100 + step // 40 * 7 + torch.arange(4)
            loss = functional.cross_entropy(net(tokens), (tokens * 7 + 3) % 300, reduction="none")
            optimizer.zero_grad()
            (loss * (torch.arange(256) < 4).float().mul(99).add(1) if rare else loss).mean().backward()
            optimizer.step()
        far[name] = (net[0].weight.detach() - start).abs().max().item()
    return {k: v / far["torch"] for k, v in far.items()}


# --- results ---


class Results:
    """One JSON file; a run is keyed by its task, optimizer, seed and number of steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, run: Callable[[], dict]) -> dict:
        if key not in self.data:
            begin = time.time()
            self.data[key] = {**run(), "seconds": time.time() - begin}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.data))
        return self.data[key]


def table(data: dict[str, dict]) -> str:
    lines = [
        "# Convergence with 8-bit moments",
        "",
        f"HybridAdamW8bit with its defaults against torch.optim.AdamW; CPU, torch {torch.__version__}, kernels "
        f"{kernels.available_isas()[0]}, Python {platform.python_version()}. Runs of one seed share weights and "
        "batches. `benchmarks/convergence.py` says what each task is and how to repeat it.",
    ]

    def pairs(task: str) -> list[tuple[int, int, dict, dict]]:
        keys = [k.split("/") for k in data if k.startswith(task + "/")]
        found = sorted({(int(steps), int(seed)) for _, kind, seed, steps in keys if kind == "fp32"})
        return [
            (steps, seed, data[f"{task}/fp32/{seed}/{steps}"], data[f"{task}/8bit/{seed}/{steps}"])
            for steps, seed in found
            if f"{task}/8bit/{seed}/{steps}" in data
        ]

    if pairs("text"):
        lines += ["", "## Text: byte-level GPT on Python's standard library, validation loss in nats", ""]
        lines += ["| steps | seed | parameters | fp32 | 8-bit | difference |", "|---|---|---|---|---|---|"]
        for steps, seed, a, b in pairs("text"):
            lines.append(
                f"| {steps} | {seed} | {a['parameters'] / 1e6:.2f} M | {a['loss']:.4f} | {b['loss']:.4f} "
                f"| {b['loss'] - a['loss']:+.4f} |"
            )
    if pairs("math"):
        lines += ["", f"## Math: additions of {DIGITS}-digit numbers, all digits right, 20,000 paired problems", ""]
        lines += [
            "| steps | seed | fp32 | 8-bit | difference in points | right in one only |",
            "|---|---|---|---|---|---|",
        ]
        for steps, seed, a, b in pairs("math"):
            differ = sum(x != y for x, y in zip(a["correct"], b["correct"], strict=True))
            lines.append(
                f"| {steps} | {seed} | {100 * a['accuracy']:.2f} % | {100 * b['accuracy']:.2f} % "
                f"| {100 * (b['accuracy'] - a['accuracy']):+.2f} | {differ} |"
            )
    if "wide" in data:
        lines += ["", "## Gradients of different sizes inside a block: 100 steps, default eps", ""]
        lines += [
            "| spread of sizes | largest movement | largest single step | largest deviation | distance of paths |"
        ]
        lines += ["|---|---|---|---|---|"]
        for name, row in data["wide"].items():
            if name != "seconds":
                lines.append(
                    f"| {name}{' (*)' if name == PARITY else ''} | "
                    + " | ".join(f"{row[k]:.2f}" for k in ("moved", "step", "deviation", "distance"))
                    + " |"
                )
        lines += [
            "",
            "All relative to fp32's (the deviation to its largest movement). Sizes are drawn once per element unless "
            "the row says otherwise; drawn anew, they come as spikes, as with sparse gradients.",
            "",
            "(*) The set-up in which the plain rule, by which a small second moment may get code 0, deviated by 41 "
            "times fp32's largest movement (the measure of the column 'largest deviation').",
        ]
    if "rare" in data:
        r = data["rare"]
        lines += [
            "",
            "## Rare tokens: largest movement of an embedding entry in 400 steps, relative to torch's AdamW",
            "",
        ]
        lines += [f"Default (fp32 moments for embeddings): {r['default']:.3f}. Forced to 8 bit: {r['8bit']:.3f}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["wide", "rare", "math", "text"], metavar="task")
    parser.add_argument("--steps", type=int, help="default: 1500")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=Path("runs/convergence.json"))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = Results(args.results)
    for task in args.tasks:
        if task == "wide":
            results.get("wide", wide_run)
        elif task == "rare":
            results.get("rare", rare_run)
        elif task in ("text", "math"):
            run = text_run if task == "text" else math_run
            steps = args.steps or 1500
            for seed in range(args.seeds if task == "text" else 1):
                for kind in OPTIMIZERS:
                    results.get(f"{task}/{kind}/{seed}/{steps}", lambda k=kind, s=seed, n=steps, r=run: r(k, s, n))
        else:
            parser.error(f"unknown task {task!r}")
        args.output.write_text(table(results.data))


if __name__ == "__main__":
    main()
