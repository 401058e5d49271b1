"""What a plan that keeps everything costs: CPU time of the compute thread per step, with LazyTrain's hooks and without.

    OMP_NUM_THREADS=1 python benchmarks/activation_overhead.py

Hidden 512, 12 blocks; a step is a forward and a backward of one micro-batch. Steps with and without are interleaved, in
alternating order; the figure is the ratio of the medians over the repetitions, for several series, because one
series on a shared machine is off by a few per cent either way. The last column is the same code without our hooks
on both sides: what the method shows where there is nothing to show.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.runtime.activation_tools import GPT, KEEP, language_step, running


class Slots:
    """Stands for the parameter store, which looks at the storage of each saved tensor."""

    def hold(self, index: int) -> None:
        raise AssertionError("a kept block never holds its slot")

    def view_of(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().data_ptr()


def series(model: GPT, length: int, repetitions: int, hooked: bool) -> float:
    """Median CPU time of the first kind of step over that of the second."""
    step = language_step(length=length, batch=1)
    blocks = list(model.blocks)

    def plain() -> float:
        model.zero_grad(set_to_none=False)
        started = time.thread_time()
        step(model, 0).backward()
        return time.thread_time() - started

    def planned() -> float:
        with running(model, blocks, [KEEP] * len(blocks), parameters=Slots()) as runtime:
            model.zero_grad(set_to_none=False)
            started = time.thread_time()
            runtime.micro_step_begins()
            with runtime.outer_context():
                loss = step(model, 0)
            runtime.backward_begins()
            loss.backward()
            runtime.micro_step_ends()
            return time.thread_time() - started

    first = planned if hooked else plain
    first(), plain()
    ours, theirs = [], []
    for turn in range(repetitions):
        for which in (ours, theirs) if turn % 2 else (theirs, ours):
            which.append(first() if which is ours else plain())
    return statistics.median(ours) / statistics.median(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--series", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        f"{platform.machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}; ratios of CPU time per step\n"
    )
    print("| tokens | keep-all plan / without | without / without |\n|---|---|---|")
    for length in arguments.lengths:
        model = GPT(12, width=512, length=length)
        columns = [
            ", ".join(f"{series(model, length, arguments.repetitions, hooked):.4f}" for _ in range(arguments.series))
            for hooked in (True, False)
        ]
        print(f"| {length} | {columns[0]} | {columns[1]} |", flush=True)


if __name__ == "__main__":
    main()
