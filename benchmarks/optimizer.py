"""How fast a CPU optimizer step is: ours against DeepSpeed's own sequence of passes, interleaved in one process.

    python benchmarks/optimizer.py                # 200 M parameters, 15 repetitions, minutes; writes optimizer.md
    python benchmarks/optimizer.py --parameters 50 --repetitions 7 --output -     # smaller, to the terminal

Every variant does one step over one flat tensor. "DeepSpeed's sequence" is what ZeRO-3 with CPU offload does per
sub-group: (cast the bf16 gradient to fp32,) multiply the gradient by the clip coefficient, DeepSpeedCPUAdam, copy the
fp32 parameter to bf16. Ours does all of that in its one pass. Medians over the repetitions; in every repetition all
variants run once. The floor is bytes / bandwidth, with the bandwidth of a read-modify-write pass (12 bytes per element)
of the same run.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lazytrain_ds.optim import kernels
from lazytrain_ds.optim.layout import StateLayout

LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-5, 0.9, 0.999, 1e-8, 0.01


@dataclass
class Variant:
    """`bytes_per_parameter` is the least traffic of this algorithm (no write-allocate, absmax included)."""

    name: str
    run: Callable[[], object]
    bytes_per_parameter: float
    threads: int
    elements: int
    every: int = 1  # slow ones run in every n-th repetition
    seconds: list[float] = field(default_factory=list)

    @property
    def nanoseconds(self) -> float:
        return statistics.median(self.seconds) / self.elements * 1e9


def filled(n: int, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
    t = torch.empty(n)
    for chunk in t.split(1 << 22):
        fill(chunk)
    return t


def variants(n: int, threads: int) -> list[Variant]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(0)
    param = torch.nn.Parameter(filled(n, lambda c: c.normal_(0, 0.02)))
    p = param.data
    grad = filled(n, lambda c: c.normal_(0, 1e-3))
    grad_bf16, out = grad.bfloat16(), torch.zeros(n, dtype=torch.bfloat16)
    param.grad = grad
    theirs = DeepSpeedCPUAdam([param], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY)
    theirs.step()
    m, v = theirs.state[param]["exp_avg"], theirs.state[param]["exp_avg_sq"]
    layout = StateLayout.whole(n, "8bit")
    state8 = layout.new_state()
    for key, moment, signed in (("exp_avg", m, True), ("exp_avg_sq", v, False)):
        state8[f"{key}_codes"], state8[f"{key}_absmax"] = kernels.quantize(moment, signed, num_threads=threads)
    hyper = dict(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY, step=10)
    clip = torch.tensor(0.9999999)

    def ours8(g: torch.Tensor, o: torch.Tensor | None, t: int = threads) -> None:
        kernels.adamw_segments_step_(p, g, state8, layout, **hyper, grad_scale=0.9999999, out=o, num_threads=t)

    def ours32(g: torch.Tensor, o: torch.Tensor | None, t: int = threads) -> None:
        kernels.adamw_step_(p, g, m, v, **hyper, grad_scale=0.9999999, out=o, num_threads=t)

    def deepspeed(cast: bool, t: int = threads) -> None:
        torch.set_num_threads(t)  # sets OpenMP's threads, which DeepSpeedCPUAdam uses
        if cast:
            grad.copy_(grad_bf16)
        grad.mul_(clip)
        theirs.step()
        out.copy_(p)
        torch.set_num_threads(threads)

    low = torch.nn.Parameter(grad_bf16.clone())
    low.grad = grad_bf16
    theirs_bf16 = DeepSpeedCPUAdam([low], lr=LR, betas=(BETA1, BETA2), eps=EPS, fp32_optimizer_states=False)
    theirs_bf16.step()
    step_tensor = torch.tensor(10.0)

    def torch_fused() -> None:
        torch._fused_adamw_(
            [p], [grad], [m], [v], [], [step_tensor], amsgrad=False, lr=LR, beta1=BETA1, beta2=BETA2,
            weight_decay=WEIGHT_DECAY, eps=EPS, maximize=False,
        )  # fmt: skip

    few = min(n, 20_000_000) // 256 * 256

    def bitsandbytes() -> None:
        from lazytrain_ds.optim.cuda_step import _blockwise_op, _maps

        _blockwise_op()(
            "adam", grad[:few], p[:few], state8["exp_avg_codes"][:few], state8["exp_avg_sq_codes"][:few], BETA1, BETA2,
            0.0, 0.0, EPS, 10, LR, *_maps(torch.device("cpu")), state8["exp_avg_absmax"][: few // 256],
            state8["exp_avg_sq_absmax"][: few // 256], WEIGHT_DECAY, 1.0, False,
        )  # fmt: skip

    state = 2 * (2 + 8 / 256)  # both moments' codes and absmax, read and written
    other = torch.zeros(n)
    two, one = threads, 1
    return [
        Variant("bandwidth: a += b (fp32)", lambda: kernels.accumulate_(other, grad, num_threads=two), 12, two, n),
        Variant("DeepSpeed's sequence, fp32 gradients", lambda: deepspeed(False), 42, two, n),
        Variant("DeepSpeed's sequence, bf16 gradients", lambda: deepspeed(True), 48, two, n),
        Variant("DeepSpeedCPUAdam alone", theirs.step, 28, two, n),
        Variant("DeepSpeedCPUAdam alone, all bf16 (parameter too)", theirs_bf16.step, 14, two, n),
        Variant("torch fused AdamW alone", torch_fused, 28, two, n),
        Variant("ours, fp32 states, fp32 gradients", lambda: ours32(grad, out), 30, two, n),
        Variant("ours, fp32 states, bf16 gradients", lambda: ours32(grad_bf16, out), 28, two, n),
        Variant("**ours, 8-bit states, fp32 gradients**", lambda: ours8(grad, out), 14 + state, two, n),
        Variant("**ours, 8-bit states, bf16 gradients**", lambda: ours8(grad_bf16, out), 12 + state, two, n),
        Variant("ours, 8-bit states, fp32 gradients, no copy-out", lambda: ours8(grad, None), 12 + state, two, n),
        Variant("bitsandbytes 8-bit (20 M parameters)", bitsandbytes, 12 + state, two, few, every=7),
        Variant("our norm, fp32", lambda: kernels.squared_norm(grad, num_threads=two), 4, two, n),
        Variant("our norm, bf16", lambda: kernels.squared_norm(grad_bf16, num_threads=two), 2, two, n),
        Variant("1 thread: bandwidth", lambda: kernels.accumulate_(other, grad, num_threads=1), 12, one, n, 3),
        Variant("1 thread: DeepSpeed's sequence, fp32 gradients", lambda: deepspeed(False, 1), 42, one, n, 3),
        Variant("1 thread: DeepSpeed's sequence, bf16 gradients", lambda: deepspeed(True, 1), 48, one, n, 3),
        Variant("1 thread: ours, fp32 states, fp32 gradients", lambda: ours32(grad, out, 1), 30, one, n, 3),
        Variant("1 thread: ours, 8-bit states, fp32 gradients", lambda: ours8(grad, out, 1), 14 + state, one, n, 3),
        Variant(
            "1 thread: ours, 8-bit states, bf16 gradients", lambda: ours8(grad_bf16, out, 1), 12 + state, one, n, 3
        ),
    ]


def measure(rows: list[Variant], repetitions: int) -> None:
    for row in rows:
        row.run()  # page faults and first-use builds
    for repetition in range(repetitions):
        for row in rows:
            if repetition % row.every == 0:
                begin = time.perf_counter()
                row.run()
                row.seconds.append(time.perf_counter() - begin)
        print(
            f"repetition {repetition + 1} of {repetitions}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True
        )


def report(rows: list[Variant], n: int, threads: int, repetitions: int, loads: tuple[float, float]) -> str:
    by_name = {r.name: r for r in rows}
    bandwidth = {
        threads: 12 / by_name["bandwidth: a += b (fp32)"].nanoseconds,
        1: 12 / by_name["1 thread: bandwidth"].nanoseconds,
    }  # GB/s
    base = {g: by_name[f"DeepSpeed's sequence, {g} gradients"].nanoseconds for g in ("fp32", "bf16")}
    base1 = {g: by_name[f"1 thread: DeepSpeed's sequence, {g} gradients"].nanoseconds for g in ("fp32", "bf16")}
    import bitsandbytes
    import deepspeed

    lines = [
        "# The CPU optimizer step",
        "",
        f'{n / 1e6:.0f} M parameters in one flat tensor, {threads} threads (rows marked "1 thread": one), medians of '
        f"{repetitions} interleaved repetitions (every 3rd for one thread, every 7th for bitsandbytes), minima in "
        'brackets. bf16 copy-out included where the row does not say "alone" or "no copy-out"; the cast is part '
        "of DeepSpeed's bf16 row. Speed-up: against DeepSpeed's sequence with the same gradients and threads.",
        "",
        f"* Processor: {processor()}; instruction sets used: {', '.join(kernels.available_isas()[:1])} (ours).",
        f"* Load average before and after: {loads[0]:.1f}, {loads[1]:.1f} (above {threads}: busy, repeat).",
        f"* Bandwidth of a += b: {bandwidth[threads]:.1f} GB/s with {threads} threads, {bandwidth[1]:.1f} with one.",
        f"* torch {torch.__version__}, deepspeed {deepspeed.__version__}, bitsandbytes {bitsandbytes.__version__}, "
        f"Python {platform.python_version()}.",
        f"* Command: `python benchmarks/optimizer.py {' '.join(sys.argv[1:])}`".rstrip("` ") + "`",
        "",
        "| step | ns / parameter | bytes / parameter | % of floor | speed-up |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        floor = r.bytes_per_parameter / bandwidth[r.threads]
        reference = base1 if r.threads == 1 and threads != 1 else base
        speed = f"{reference['bf16' if 'bf16 g' in r.name else 'fp32'] / r.nanoseconds:.2f}"
        if "bandwidth" in r.name or "norm" in r.name:
            speed = ""
        lines.append(
            f"| {r.name} | {r.nanoseconds:.3f} ({min(r.seconds) / r.elements * 1e9:.3f}) | {r.bytes_per_parameter:.2f} "
            f"| {100 * floor / r.nanoseconds:.0f} | {speed} |"
        )
    layout = StateLayout.whole(n, "8bit")
    lines += [
        "",
        f"State: {layout.state_bytes / n:.4f} bytes per parameter with 8-bit moments, 8 with fp32.",
        "",
        "With fp32 states our kernel computes in fp64 and rounds its three results once (exact to one unit in the last "
        "place, DeepSpeed's is not); on processors without AVX-512 that, not memory, bounds it with few threads.",
    ]
    return "\n".join(lines) + "\n"


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
        model = next(x.split(":")[1].strip() for x in text.splitlines() if x.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} logical"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=200, help="millions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--output", default=str(Path(__file__).with_suffix(".md")), help='a file, or "-"')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    n = int(args.parameters * 1e6) // 8192 * 8192 + 33  # an odd tail, as real sub-groups have
    before = os.getloadavg()[0]
    rows = variants(n, args.threads)
    measure(rows, args.repetitions)
    text = report(rows, n, args.threads, args.repetitions, (before, os.getloadavg()[0]))
    if args.output == "-":
        print(text)
    else:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    main()
