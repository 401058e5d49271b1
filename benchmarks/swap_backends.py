"""NVMe back ends side by side on one disk: which one is the default of `NvmeStore`, and why.

    python benchmarks/swap_backends.py --directory /mnt/nvme --output benchmarks/swap_backends.md

Every case moves the same tensors between the *same* files and the *same* page-locked memory (DeepSpeed's own, so that
its handle needs no copy): where a file lies on a virtual disk and how scattered its memory is decide more than the
back end. A round runs all cases once, in an order shuffled by a seed. Everything is measured twice: with the other
Python threads asleep, and with one that computes in Python all the time and wants the GIL, as a training loop does.
`aio_handle alone` is DeepSpeed's handle without NvmeStore: nothing checks what it did.
Rates are payload per wall second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lazytrain_ds.runtime.swap import NvmeStore, aligned_empty, inspect_swap_path

ACTIONS = ("write", "read", "both")
READING = "\n## Reading\n"

THREADS = ((4, 4), (8, 4), (16, 2), (16, 4), (32, 2))
"""(MiB per request, threads per direction)."""

Case = Callable[[str], None]
"""Does one action ("write", "read" or "both") on all tensors and returns when it is done."""


@dataclass
class Shared:
    """What all cases have in common. `sources` and `targets` are locked memory, padded; a tensor has `numel` of it."""

    numel: int
    files: list[Path]
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]


def aio_module() -> Any:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load(verbose=False)


@contextlib.contextmanager
def shared_files_and_memory(directory: Path, tensors: int, numel: int, locked: bool) -> Iterator[Shared]:
    """The files of a first store and memory from DeepSpeed's locking allocator (`locked` false: from ours)."""
    padded = -(-numel // 1024) * 1024
    handle = aio_module().aio_handle() if locked else None

    def allocate() -> torch.Tensor:
        if handle is None:
            return aligned_empty(padded, torch.float32)
        tensor: torch.Tensor = handle.new_cpu_locked_tensor(padded, torch.empty(0))
        return tensor

    memory = [allocate() for _ in range(2 * tensors)]
    for tensor in memory:
        tensor.normal_()
    with NvmeStore(directory, name="shared") as store:
        for number, source in enumerate(memory[:tensors]):  # one set to read and one to write
            store.write(f"x{number}", source[:numel])
            store.write(f"w{number}", source[:numel])
        store.synchronize()
        files = [store._entries[f"{letter}{number}"].path for letter in "xw" for number in range(tensors)]
        yield Shared(numel, files, memory[:tensors], memory[tensors:])
    if handle is not None:
        for tensor in memory:
            handle.free_cpu_locked_tensor(tensor)


@contextlib.contextmanager
def store_case(directory: Path, name: str, shared: Shared, *, memory: str = "shared", **options: Any) -> Iterator[Case]:
    """NvmeStore with one back end; `memory`: "shared", "huge" (aligned_empty) or "unaligned" (bounce buffers)."""
    numel = shared.numel
    sources, targets = [tensor[:numel] for tensor in shared.sources], [tensor[:numel] for tensor in shared.targets]
    if memory != "shared":
        offset = 1 if memory == "unaligned" else 0
        sources = [aligned_empty(numel + 1, torch.float32)[offset : offset + numel].copy_(it) for it in sources]
        targets = [aligned_empty(numel + 1, torch.float32)[offset : offset + numel] for _ in targets]
    with NvmeStore(directory, name=name, **options) as store:
        for number, source in enumerate(sources):
            for key in (f"x{number}", f"w{number}"):
                store.write(key, source).wait()
        for key, path in zip(
            [f"{letter}{n}" for letter in "xw" for n in range(len(sources))], shared.files, strict=True
        ):
            store._entries[key].path.unlink()
            store._entries[key].path = path

        def run(action: str) -> None:
            tickets = []
            for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
                if action != "read":
                    tickets.append(store.write(f"w{number}", source))
                if action != "write":
                    tickets.append(store.read(f"x{number}", target))
            for ticket in tickets:
                ticket.wait()

        run("both")
        if not all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True)):
            raise SystemExit(f"{name}: read something else than was written")
        yield run


@contextlib.contextmanager
def handle_case(shared: Shared, settings: dict[str, int]) -> Iterator[Case]:
    """aio_handle alone, one for each direction, as DeepSpeed's swappers use it."""
    module = aio_module()
    reader, writer = (module.aio_handle(single_submit=False, overlap_events=True, **settings) for _ in range(2))
    count = len(shared.sources)
    unit = 4096 * settings["intra_op_parallelism"]  # the handle splits evenly among its threads
    views = [tensor[: tensor.numel() * 4 // unit * unit // 4] for tensor in (*shared.sources, *shared.targets)]

    def run(action: str) -> None:
        for number in range(count):
            if action != "read":
                writer.async_pwrite(views[number], str(shared.files[count + number]), 0)
            if action != "write":
                reader.async_pread(views[count + number], str(shared.files[number]), 0)
        if action != "read":
            writer.wait()
        if action != "write":
            reader.wait()

    run("both")
    size = min(shared.numel, views[0].numel())  # without the padding
    if not all(torch.equal(views[number][:size], views[count + number][:size]) for number in range(count)):
        raise SystemExit("aio_handle: read something else than was written")
    yield run


@contextlib.contextmanager
def busy_thread(wanted: bool) -> Iterator[None]:
    """A Python thread that never gives up the GIL by itself."""
    going = wanted

    def spin() -> None:
        while going:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        going = False
        thread.join()


def disk_of(directory: Path) -> str:
    report = inspect_swap_path(directory)
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
    parser.add_argument("--megabytes", type=int, default=32, help="size of each tensor (MiB)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-aio", action="store_true", help="measure only what needs no build")
    parser.add_argument("--output", type=Path, help="write the result as markdown")
    arguments = parser.parse_args()

    numel = arguments.megabytes * (1 << 18) + 67  # odd, as real sub-groups are: the last block is padded
    payload = arguments.tensors * numel * 4
    directory = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        locked = not arguments.without_aio
        shared = stack.enter_context(shared_files_and_memory(directory, arguments.tensors, numel, locked))
        cases: dict[str, Case] = {}
        for megabytes, threads in THREADS:
            aio = {"block_size": megabytes << 20, "queue_depth": 1, "intra_op_parallelism": threads}
            case = store_case(directory, f"t{megabytes}x{threads}", shared, aio=aio)
            cases[f"threads, {megabytes} MiB x {threads}"] = stack.enter_context(case)
        for memory in ("huge", "unaligned"):
            cases[f"threads, default, {memory}"] = stack.enter_context(
                store_case(directory, memory, shared, memory=memory)
            )
        if locked:
            for threads in (1, 4):
                settings = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": threads}
                label = f"1 MiB x 8 x {threads}"
                case = store_case(directory, f"d{threads}", shared, backend="deepspeed_aio", aio=settings)
                cases[f"deepspeed_aio, {label}"] = stack.enter_context(case)
                cases[f"aio_handle alone, {label}"] = stack.enter_context(handle_case(shared, settings))

        rates: dict[tuple[bool, str, str], list[float]] = {}
        cpu: dict[str, list[float]] = {}
        order = random.Random(arguments.seed)
        for busy in (False, True):
            with busy_thread(busy):
                for _ in range(arguments.rounds):
                    for action in ACTIONS:
                        for case_name in order.sample(sorted(cases), len(cases)):
                            wall, process = time.perf_counter(), time.process_time()
                            cases[case_name](action)
                            moved = payload * (2 if action == "both" else 1) / 1e9
                            rates.setdefault((busy, case_name, action), []).append(moved / (time.perf_counter() - wall))
                            if not busy:
                                cpu.setdefault(case_name, []).append((time.process_time() - process) / moved)
        best = "/".join(f"{os.getloadavg()[index]:.1f}" for index in range(2))

    head = "| case | write | read | both | write, GIL wanted | read, GIL wanted | both, GIL wanted | CPU s/GB |"
    lines = [
        "# NVMe back ends",
        "",
        f"* Hardware: {cpu_name()}, {os.cpu_count()} cores; disk: {disk_of(directory)}; load average {best}",
        f"* Versions: Python {platform.python_version()}, torch {torch.__version__}, Linux {platform.release()}",
        f"* Command: `python {' '.join(sys.argv)}`",
        f"* {arguments.tensors} tensors of {numel} fp32 elements, {arguments.rounds} rounds, interleaved.",
        "",
        "GB/s, median (best) over the rounds; `both`: reads and writes at once, added up.",
        "",
        head,
        "|---|---|---|---|---|---|---|---|",
    ]
    for case_name in cases:
        columns = [
            f"{statistics.median(values):.2f} ({max(values):.2f})"
            for busy in (False, True)
            for action in ACTIONS
            for values in (rates[busy, case_name, action],)
        ]
        lines.append(f"| {case_name} | {' | '.join(columns)} | {statistics.median(cpu[case_name]):.3f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        # What people concluded from the figures stays.
        old = arguments.output.read_text() if arguments.output.exists() else ""
        arguments.output.write_text(text + old[old.index(READING) :] if READING in old else text)


if __name__ == "__main__":
    main()
