"""NVMe back ends side by side on one disk, interleaved: which one is the default of `NvmeStore`, and why.

    python benchmarks/swap_backends.py --directory /mnt/nvme --output benchmarks/swap_backends.md

Every case moves the same tensors; a round runs all cases once, in an order shuffled by a seed, so that a slow moment of
the disk hits all of them alike. `aio_handle alone` is DeepSpeed's handle without NvmeStore on memory that it locked
itself: no bounce copy, no check of the result. Rates are payload per wall second; CPU is process time per payload.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lazytrain_ds.errors import SwapError
from lazytrain_ds.runtime.swap import NvmeStore, aligned_empty, check_nvme_path

ACTIONS = ("write", "read", "both")
DEEPSPEED_DEFAULT = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1}
DEEPSPEED_DEEP = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 4}

Case = Callable[[str], None]
"""Does one action ("write", "read" or "both") on all tensors and returns when it is done."""


@contextlib.contextmanager
def store_case(directory: Path, name: str, numels: list[int], *, aligned: bool, **options: object) -> Iterator[Case]:
    """NvmeStore with one back end."""
    with NvmeStore(directory, name=name, **options) as store:  # type: ignore[arg-type]
        offset = 0 if aligned else 1
        sources = [aligned_empty(numel + 1, torch.float32)[offset : numel + offset].normal_() for numel in numels]
        targets = [torch.empty_like(source) if not aligned else aligned_empty(source.numel(), torch.float32)
                   for source in sources]  # fmt: skip

        def run(action: str) -> None:
            tickets = []
            for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
                if action != "read":
                    tickets.append(store.write(f"{'w' if action == 'both' else 'x'}{number}", source))
                if action != "write":
                    tickets.append(store.read(f"x{number}", target))
            for ticket in tickets:
                ticket.wait()

        run("write")
        run("both")  # allocates the second set of files
        run("read")
        if not all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True)):
            raise SystemExit(f"{name}: read something else than was written")
        yield run


@contextlib.contextmanager
def handle_case(directory: Path, name: str, numels: list[int], settings: dict[str, int]) -> Iterator[Case]:
    """aio_handle alone, one for each direction, as DeepSpeed's swappers use it."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    module = AsyncIOBuilder().load(verbose=False)
    reader, writer = (module.aio_handle(single_submit=False, overlap_events=True, **settings) for _ in range(2))
    files = [directory / f"{name}_{number}" for number in range(2 * len(numels))]
    try:
        padded = [-(-numel // 4096) * 4096 for numel in numels]
        example = torch.empty(0)
        sources = [writer.new_cpu_locked_tensor(numel, example).normal_() for numel in padded]
        targets = [reader.new_cpu_locked_tensor(numel, example) for numel in padded]

        def run(action: str) -> None:
            half = len(numels) if action == "both" else 0
            for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
                if action != "read":
                    writer.async_pwrite(source, str(files[half + number]), 0)
                if action != "write":
                    reader.async_pread(target, str(files[number]), 0)
            if action != "read":
                writer.wait()
            if action != "write":
                reader.wait()

        run("write")
        run("both")
        run("read")
        if not all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True)):
            raise SystemExit(f"{name}: read something else than was written")
        yield run
        for tensor in (*sources, *targets):
            writer.free_cpu_locked_tensor(tensor)
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def disk_of(directory: Path) -> str:
    report = check_nvme_path(directory)
    return f"{report.file_system}, O_DIRECT {'yes' if report.o_direct else 'no'}"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(": ")[1]
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="a directory on the disk to measure")
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=48, help="size of each tensor (MiB)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-aio", action="store_true", help="measure only what needs no build")
    parser.add_argument("--output", type=Path, help="write the result as markdown")
    arguments = parser.parse_args()

    # An odd count, as real sub-groups have: the last block is padded.
    numels = [arguments.megabytes * (1 << 18) + 67 for _ in range(arguments.tensors)]
    payload = sum(numels) * 4
    directory = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        cases: dict[str, Case] = {}

        def add(label: str, context: contextlib.AbstractContextManager[Case]) -> None:
            cases[label] = stack.enter_context(context)

        add("threads, default (4 MiB x 4), aligned memory", store_case(directory, "a", numels, aligned=True))
        add("threads, default, unaligned memory (bounce)", store_case(directory, "b", numels, aligned=False))
        add("threads, aio block 1 MiB x 8 x 1",
            store_case(directory, "c", numels, aligned=True, aio=DEEPSPEED_DEFAULT))  # fmt: skip
        if not arguments.without_aio:
            for label, settings in (("1 MiB x 8 x 1", DEEPSPEED_DEFAULT), ("1 MiB x 8 x 4", DEEPSPEED_DEEP)):
                name = f"d{settings['intra_op_parallelism']}"
                aio = store_case(directory, name, numels, aligned=True, backend="deepspeed_aio", aio=settings)
                try:
                    add(f"deepspeed_aio, {label}", aio)
                except SwapError as error:
                    raise SystemExit(f"{error}\n(--without-aio measures the rest)") from error
                add(f"aio_handle alone, {label}, unchecked", handle_case(directory, f"e{name}", numels, settings))

        rates: dict[tuple[str, str], list[float]] = {(case, action): [] for case in cases for action in ACTIONS}
        cpu: dict[tuple[str, str], list[float]] = {key: [] for key in rates}
        order = random.Random(arguments.seed)
        for _ in range(arguments.rounds):
            for action in ACTIONS:
                for case in order.sample(sorted(cases), len(cases)):
                    wall, process = time.perf_counter(), time.process_time()
                    cases[case](action)
                    moved = payload * (2 if action == "both" else 1) / 1e9
                    rates[case, action].append(moved / (time.perf_counter() - wall))
                    cpu[case, action].append((time.process_time() - process) / moved)

    lines = [
        "# NVMe back ends", "",
        f"* Hardware: {cpu_name()}, {os.cpu_count()} cores; disk: {disk_of(directory)}",
        f"* Versions: Python {platform.python_version()}, torch {torch.__version__}, Linux {platform.release()}",
        f"* Command: `python {' '.join(sys.argv)}`",
        f"* {arguments.tensors} tensors of {numels[0]} fp32 elements, {arguments.rounds} rounds, interleaved.",
        "", "GB/s as median (best); CPU seconds per GB as median.", "",
        "| case | write | read | read + write at once | CPU s/GB write | read | both |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for case in cases:
        rate = " | ".join(f"{statistics.median(rates[case, a]):.2f} ({max(rates[case, a]):.2f})" for a in ACTIONS)
        seconds = " | ".join(f"{statistics.median(cpu[case, a]):.3f}" for a in ACTIONS)
        lines.append(f"| {case} | {rate} | {seconds} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
