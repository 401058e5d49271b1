"""The paper's published instance, restricted to its decisions: cost in re-run blocks.

    python -m benchmarks.planner_published

Assumed (not published): the blocks' equal forward time, from 2N FLOPs per token at the published 220 TFLOP/s; mandatory
traffic of one block's bf16 parameters and gradients per window.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

from lazytrain_ds.planning.paper import PaperProblem, solve_paper

GIB = 2**30
BLOCKS = 64
BOUNDARY = 72 * 1024 * 5120 * 2
LINK = 12e9
DEVICE = (0, 10, 15, 16, 20, 22, 23, 24, 28, 29, 32, 36, *range(39, 45), 48, 50, 51, 52, *range(56, 61), 62, 63, 64)
HOST = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 14, 26, 27, 30, 31, 33, 34, 35, 38, 49)
NVME = (21,)


def published() -> PaperProblem:
    """Costs count re-run blocks: every block's forward is 1; traffic is in bytes and windows' capacities in bytes."""
    seconds = 2 * 23.68e9 / BLOCKS * 72 * 1024 / 220e12
    moved = 2 * 23.68e9 / BLOCKS
    return PaperProblem(
        boundary_bytes=(BOUNDARY,) * (BLOCKS + 1),
        forward_seconds=(1.0,) * BLOCKS,
        device_budget_bytes=21.55 * GIB,
        host_budget_bytes=15 * GIB,
        nvme_budget_bytes=32 * GIB,
        down_capacity=(seconds * LINK,) * BLOCKS,
        up_capacity=(seconds * LINK,) * BLOCKS,
        write_capacity=(seconds * 3.35e9,) * BLOCKS,
        read_capacity=(seconds * 2.83e9,) * BLOCKS,
        gradient_bytes=(moved,) * BLOCKS,
        parameter_bytes=(moved,) * BLOCKS,
        # One boundary in the open costs about as much as re-running a block: what is left exposed then shows.
        link_rate=LINK * seconds,
        write_rate=3.35e9 * seconds,
        read_rate=2.83e9 * seconds,
    )


def published_edges() -> tuple[tuple[int, int], ...]:
    """The published segments: between neighbouring materialized boundaries."""
    kept = sorted((*DEVICE, *HOST, *NVME))
    return tuple(itertools.pairwise(kept))


def cases() -> dict[str, tuple[PaperProblem, int]]:
    """Problem and expected number of re-run blocks."""
    base = published()
    return {
        "as published": (base, 0),
        "published edges frozen": (replace(base, frozen_edges=published_edges()), 13),
        "one NVMe boundary only": (replace(base, nvme_limit=1), 13),
        "8 GiB host, 32 GiB NVMe": (replace(base, host_budget_bytes=8 * GIB), 0),
        "8 GiB host, no NVMe": (replace(base, host_budget_bytes=8 * GIB, nvme_budget_bytes=0.0), 24),
    }


def main() -> None:
    for name, (problem, expected) in cases().items():
        begin = time.perf_counter()
        schedule = solve_paper(problem)
        print(
            f"{name:26s} re-run {len(schedule.recomputed):2d} (expected {expected}), exposed "
            f"{schedule.exposed_seconds:.2e}, device {schedule.count('device')} host {schedule.count('host')} NVMe "
            f"{schedule.count('nvme')}, {schedule.status}, bound {schedule.objective_bound:.6f} of "
            f"{schedule.objective:.6f}, {time.perf_counter() - begin:.2f} s"
        )


if __name__ == "__main__":
    main()
