"""Everything that needs a GPU, in one run of less than eight minutes on a machine with one CUDA GPU and no network.

    python benchmarks/gpu.py --output gpu.jsonl [--nvme /mnt/nvme/lt] [--wheels wheels/] [--stages exact link models]
    DS_ACCELERATOR=cpu python benchmarks/gpu.py --dry-run --output /tmp/gpu.jsonl      # the same code, small shapes

Meant for 16 cores and 128 GiB of host memory. Stages, each optional, in this order:

* `exact`: small models in bf16 under every tier, rule, slot and step mode, with NaN in freed slots: losses and weights
  must be bit-identical to keep-all's, and close to stock DeepSpeed's;
* `link`: what the probe measures (links alone and both ways, matmul rates, host memory, optimizer kernels, NVMe);
* `kernels`: the 8-bit step on the device against the CPU's (with bitsandbytes);
* `models`: Llama shapes of 1B and 3B with random weights: stock ZeRO-3 offload, the rules and the planner's plan under
  caps of 70 GB and 20 GB: tokens/s, TFLOPS (6N), peak bytes, predicted against measured.

Every result is a JSON line, written when it is there; a stage that fails or runs out of time says so in a line of its
own and the next one goes on. Each run is a process of its own. `--wheels`: packages to install first, without an index.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STAGES = ("exact", "link", "kernels", "models")
PACKAGES = ("torch", "deepspeed", "transformers", "bitsandbytes", "ortools")
# vocabulary, width, MLP width, layers, heads, key-value heads; rows and tokens of a micro-batch; steps
SHAPES: dict[str, dict[str, int]] = {
    "llama-1b": dict(vocabulary=32000, width=2048, inner=8192, layers=16, heads=32, kv=8, rows=8, length=2048, steps=5),
    "llama-3b": dict(vocabulary=32000, width=3072, inner=8192, layers=28, heads=24, kv=8, rows=8, length=2048, steps=4),
}
SMALL = dict(vocabulary=211, width=64, inner=172, layers=3, heads=4, kv=2, rows=2, length=256, steps=3)
# (model, contestant, device cap, seconds it may take); what matters most comes first.
RUNS = (
    ("llama-1b", "auto", "70GB", 60),
    ("llama-1b", "stock", "", 60),
    ("llama-1b", "auto", "20GB", 60),
    ("llama-1b", "megatrain", "70GB", 60),
    ("llama-1b", "zero3_offload", "70GB", 60),
    ("llama-3b", "auto", "70GB", 90),
    ("llama-3b", "stock", "", 90),
    ("llama-3b", "auto", "20GB", 90),
    ("llama-3b", "megatrain", "20GB", 90),
    ("llama-1b", "checkpoint_all", "70GB", 60),
    ("llama-1b", "checkpoint_all_host", "20GB", 60),
    ("llama-1b", "keep_all", "70GB", 60),
    ("llama-3b", "megatrain", "70GB", 90),
)
DRY_RUNS = (("llama-1b", "auto", "40MB", 60), ("llama-1b", "stock", "", 60), ("llama-3b", "megatrain", "30MB", 60))
NVME_BLOCK = {"parameters": "nvme", "optimizer_states": "nvme", "activations": "nvme"}
# name -> (lazytrain block, whether freed slots are filled with NaN)
EXACT: dict[str, tuple[dict[str, Any], bool]] = {
    "keep_all": ({"planner": {"kind": "keep_all"}}, False),
    "keep_all, NaN": ({"planner": {"kind": "keep_all"}}, True),
    "checkpoint_all": ({"planner": {"kind": "checkpoint_all"}}, True),
    "checkpoint_all_host": ({"planner": {"kind": "checkpoint_all_host"}}, True),
    "megatrain (segments, serial step)": ({"planner": {"kind": "megatrain"}}, True),
    "zero3_offload (serial step)": ({"planner": {"kind": "zero3_offload"}}, True),
    "parameters resident": ({"parameters": "device", "planner": {"kind": "checkpoint_all"}}, True),
    "saved tensors in host memory": ({"activations": "host", "planner": {"kind": "keep_all"}}, True),
    "everything on NVMe": ({**NVME_BLOCK, "planner": {"kind": "keep_all"}}, True),
    "states on NVMe": ({"optimizer_states": "nvme", "planner": {"kind": "checkpoint_all"}}, True),
    "auto": ({}, True),
}


# -- what every run shares -------------------------------------------------------------------------------------------
def make_model(shape: dict[str, int]) -> Any:
    """A Hugging Face Llama with cheap random weights (its own initialisation takes minutes at 3B)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights

    settings = LlamaConfig(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["width"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        max_position_embeddings=shape["length"],
        use_cache=False,
        tie_word_embeddings=False,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # half the host memory while both the model and its masters exist
    try:
        with no_init_weights():
            model = LlamaForCausalLM(settings)
    finally:
        torch.set_default_dtype(default)
    noise = (torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            flat = parameter.view(-1)
            if name.endswith("norm.weight") or parameter.dim() == 1:
                flat.fill_(1.0)
                continue
            shift = (index * 7919) % noise.numel()
            pattern = torch.cat([noise[shift:], noise[:shift]])
            for start in range(0, flat.numel(), pattern.numel()):
                part = flat[start : start + pattern.numel()]
                part.copy_(pattern[: part.numel()])
    model.train()
    return model


def config(block: dict[str, Any] | None, rows: int, cpu_adam: bool = False) -> dict[str, Any]:
    """A user's config; without a block it is stock ZeRO-3 with offload to host memory."""
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": cpu_adam,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    if block is None and not cpu_adam:
        result["optimizer"]["params"]["torch_adam"] = True
    if block is not None:
        result["lazytrain"] = block
    return result


def start(model: Any, settings: dict[str, Any]) -> Any:
    """A one-process engine on a free port."""
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    import deepspeed

    import lazytrain_ds  # noqa: F401 - hooks DeepSpeed

    engine, *_ = deepspeed.initialize(model=model, config=settings)
    return engine


def device_name() -> str:
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().current_device_name())


def synchronize() -> None:
    import torch

    if torch.cuda.is_available() and device_name().startswith("cuda"):
        torch.cuda.synchronize()


def train(engine: Any, shape: dict[str, int], steps: int) -> tuple[list[float], list[float]]:
    """(losses, wall seconds of each optimizer step, the device's work included)."""
    import torch

    generator = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        ids = torch.randint(0, shape["vocabulary"], (shape["rows"], shape["length"]), generator=generator)
        ids = ids.to(device_name())
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        synchronize()
        now = time.perf_counter()
        seconds.append(now - started)
        started = now
    return losses, seconds


# -- stages ----------------------------------------------------------------------------------------------------------
def stage_exact(arguments: argparse.Namespace, emit: Any) -> None:
    """Bit-identical under every plan."""
    import deepspeed
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    shape = dict(SMALL)
    reference: tuple[list[float], list[Any]] | None = None

    def outcome(block: dict[str, Any] | None, nan: bool) -> tuple[list[float], list[Any]]:
        engine = start(make_model(shape), config(block, shape["rows"]))
        try:
            book = getattr(engine, "_lt_book", None)
            if nan and book is not None:
                book.device.debug = True
            torch.manual_seed(3)
            losses, _ = train(engine, shape, 4)
            weights = []
            for parameter in engine.module.parameters():
                with deepspeed.zero.GatheredParameters([parameter]):
                    weights.append(parameter.detach().to("cpu", copy=True))
            return losses, weights
        finally:
            engine.destroy()
            gc.collect()

    for name, (block, nan) in EXACT.items():
        keys = {"sequence_length": shape["length"], "device_memory": "4GB", "nvme_path": arguments.nvme, **block}
        try:
            losses, weights = outcome(keys, nan)
        except Exception as error:
            emit(stage="exact", plan=name, ok=False, error=repr(error)[:500])
            continue
        if reference is None:
            reference = losses, weights
        same = losses == reference[0] and all(torch.equal(a, b) for a, b in zip(weights, reference[1], strict=True))
        emit(stage="exact", plan=name, ok=same, losses=losses)
    losses, _ = outcome(None, False)
    if reference is not None:
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, reference[0], strict=True))
        emit(stage="exact", plan="stock", ok=worst < 1e-2, worst_relative_difference=worst, losses=losses)


def stage_link(arguments: argparse.Namespace, emit: Any) -> None:
    """The machine as the planner sees it, measured now."""
    from lazytrain_ds.hardware.probe import probe
    from lazytrain_ds.runtime.machine import update_seconds

    with tempfile.TemporaryDirectory() as cache:
        spec = probe(nvme_path=arguments.nvme, cache_dir=cache, refresh=True, optimizer=update_seconds)
    emit(stage="link", ok=True, hardware=json.loads(spec.to_json()))


def stage_kernels(arguments: argparse.Namespace, emit: Any) -> None:
    """The device's 8-bit step: its time, and its distance from the CPU's on the same numbers."""
    import torch

    from lazytrain_ds.optim.cuda_step import cuda_segments_step_
    from lazytrain_ds.optim.kernels import adamw_segments_step_
    from lazytrain_ds.optim.layout import StateLayout

    numel = 1 << (14 if arguments.dry_run else 26)
    hyper: dict[str, Any] = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, grad_scale=0.5)
    layout = StateLayout.whole(numel, "8bit")
    generator = torch.Generator().manual_seed(0)
    master, gradient = (torch.randn(numel, generator=generator) for _ in range(2))
    on_host, state = master.clone(), layout.new_state()
    started = time.perf_counter()
    adamw_segments_step_(on_host, gradient, state, layout, step=1, num_threads=os.cpu_count() or 1, **hyper)
    host_seconds = time.perf_counter() - started
    emit(stage="kernels", what="8-bit step, host", ok=True, seconds_per_parameter=host_seconds / numel)
    device = torch.device(device_name())
    on_device, device_gradient = master.to(device), gradient.to(device)
    device_state = layout.new_state(device)
    cuda_segments_step_(on_device, device_gradient, device_state, layout, step=1, **hyper)
    synchronize()
    distance = float((on_device.cpu() - on_host).abs().max())
    started = time.perf_counter()
    for step in range(2, 12):
        cuda_segments_step_(on_device, device_gradient, device_state, layout, step=step, **hyper)
    synchronize()
    seconds = (time.perf_counter() - started) / 10
    emit(
        stage="kernels", what="8-bit step, device", ok=distance < 1e-3, worst_difference=distance,
        seconds_per_parameter=seconds / numel,
    )  # fmt: skip


def run_model(name: str, contestant: str, cap: str, arguments: argparse.Namespace, emit: Any) -> None:
    """One contestant on one shape."""
    import torch

    shape = dict(SMALL if arguments.dry_run else SHAPES[name])
    cuda = torch.cuda.is_available() and not arguments.dry_run
    began = time.perf_counter()
    model = make_model(shape)
    count = sum(parameter.numel() for parameter in model.parameters())
    row: dict[str, Any] = {"stage": "models", "model": name, "contestant": contestant, "cap": cap, "parameters": count}
    if contestant == "stock":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        engine, row["optimizer"] = start_stock(model, shape["rows"], arguments.dry_run)
    else:
        block = {"sequence_length": shape["length"], "device_memory": cap, "planner": {"kind": contestant}}
        engine = start(model, config(block, shape["rows"]))
        row["optimizer"] = "lazytrain's own"
    row["start_seconds"] = time.perf_counter() - began
    losses, seconds = train(engine, shape, 2)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    more, seconds = train(engine, shape, shape["steps"])
    step = statistics.median(seconds)
    tokens = shape["rows"] * shape["length"]
    row.update(
        ok=all(value == value for value in losses + more),
        losses=losses + more,
        step_seconds=step,
        steps=seconds,
        tokens_per_second=tokens / step,
        tflops_6n=6 * count * tokens / step / 1e12,
        peak_allocated_bytes=torch.cuda.max_memory_allocated() if cuda else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved() if cuda else None,
    )
    book = getattr(engine, "_lt_book", None)
    if book is not None:
        prediction, timeline = book.plan.prediction, book.monitor.timelines[-1]
        row.update(
            predicted_step_seconds=prediction.step_seconds,
            lower_bound_seconds=prediction.lower_bound_seconds,
            predicted_peak_bytes=prediction.peak_bytes("device"),
            ledger_peak_bytes=book.device.ledger.peak_bytes,
            stalls={stall.channel: stall.seconds for stall in timeline.stalls},
            bytes={c: timeline.channel_bytes(c) for c in ("h2d", "d2h", "nvme_read", "nvme_write")},
            plan=json.loads(book.plan.to_json())["blocks"][1],
            optimizer_step=book.plan.optimizer_step,
        )
    emit(**row)
    engine.destroy()


def start_stock(model: Any, rows: int, dry_run: bool) -> tuple[Any, str]:
    """Stock's engine, with DeepSpeed's own CPU Adam where it can be built, and which optimizer it is."""
    reason = "dry run: nothing is compiled"
    if not dry_run:
        try:
            from deepspeed.ops.op_builder import CPUAdamBuilder

            CPUAdamBuilder().load(verbose=False)
            return start(model, config(None, rows, cpu_adam=True)), "DeepSpeedCPUAdam"
        except Exception as error:
            reason = repr(error)[:200]
    return start(model, config(None, rows)), f"torch AdamW (DeepSpeedCPUAdam: {reason})"


# -- the parent ------------------------------------------------------------------------------------------------------
class Results:
    """One JSON line per result, on disk as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def emit(self, **row: Any) -> None:
        line = json.dumps({"at": round(time.time(), 1), **row})
        with self.path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line if len(line) < 600 else line[:600] + "...", flush=True)


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Hardware, versions, command."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    smi = shutil.which("nvidia-smi")
    query = [str(smi), "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip() if smi else "none"
    return {
        "stage": "environment",
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "versions": versions,
        "gpu": gpu,
        "cores": os.cpu_count(),
        "dry_run": arguments.dry_run,
    }


def install_wheels(directory: str) -> None:
    """Carried packages; nothing is fetched."""
    wheels = sorted(str(wheel) for wheel in Path(directory).glob("*.whl"))
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", *wheels]
    subprocess.run(command, check=True)


def child(arguments: argparse.Namespace, what: list[str], seconds: float, results: Results) -> None:
    """Run one stage, or one model's run, in its own process; whatever happens to it becomes a line."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *what, "--output", str(results.path)]
    command += ["--nvme", arguments.nvme] + (["--dry-run"] if arguments.dry_run else [])
    environment = {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if arguments.dry_run:
        environment["DS_ACCELERATOR"] = "cpu"
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        results.emit(stage=what[0], what=what[1:], ok=False, error=f"not done after {seconds:.0f} s")
        return
    if done.returncode:
        tail = (done.stdout + done.stderr)[-1500:]
        results.emit(stage=what[0], what=what[1:], ok=False, error=f"exit status {done.returncode}", tail=tail)
    else:
        results.emit(stage=what[0], what=what[1:], ok=True, seconds=round(time.perf_counter() - started, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="gpu.jsonl", help="results, appended as they come")
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES)
    parser.add_argument("--seconds", type=float, default=450.0, help="no run starts that may end later than this")
    parser.add_argument("--nvme", help="directory on a local disk (default: a temporary one)")
    parser.add_argument("--wheels", help="directory of wheels to install first")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU, the same code path")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    results = Results(Path(arguments.output))
    if arguments.child:
        stage, *what = arguments.child
        if stage == "models":
            run_model(what[0], what[1], what[2], arguments, results.emit)
        else:
            {"exact": stage_exact, "link": stage_link, "kernels": stage_kernels}[stage](arguments, results.emit)
        return 0
    began = time.perf_counter()
    own_nvme = None if arguments.nvme else tempfile.mkdtemp(prefix="lt-gpu-")
    arguments.nvme = arguments.nvme or own_nvme
    try:
        if arguments.wheels:
            install_wheels(arguments.wheels)
        results.emit(**environment(arguments))
        plan: list[tuple[list[str], float]] = []
        for stage in STAGES:
            if stage in arguments.stages and stage != "models":
                plan.append(([stage], 120.0))
        if "models" in arguments.stages:
            runs = DRY_RUNS if arguments.dry_run else RUNS
            plan += [(["models", *run[:3]], float(run[3])) for run in runs]
        for what, seconds in plan:
            left = arguments.seconds - (time.perf_counter() - began)
            if left < min(seconds, 30.0):
                results.emit(stage=what[0], what=what[1:], ok=False, error=f"left out: {left:.0f} s are left")
                continue
            child(arguments, what, min(seconds, left), results)
    finally:
        if own_nvme is not None:
            shutil.rmtree(own_nvme, ignore_errors=True)
    rows = [json.loads(line) for line in Path(arguments.output).read_text().splitlines()]
    failed = [row for row in rows if row.get("ok") is False]
    print(f"{len(rows)} results in {arguments.output}, {len(failed)} failed, {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
