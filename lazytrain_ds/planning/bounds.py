"""Lower bounds of the simulated step, valid for every plan of an instance; the least over micro-batches and step modes.

Each is a relaxation of the simulator's contract: `compute` ignores memory and channels, `channels` memory only,
`aggregated` is the linear relaxation of the count model (relaxation.py), which contains the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.milp import CountModel
from lazytrain_ds.planning.relaxation import Relaxation
from lazytrain_ds.planning.simulator import Simulator

__all__ = ["Bounds", "bounds", "lower_bound"]


@dataclass(frozen=True)
class Bounds:
    """Seconds per step that no plan at this micro-batch and step mode can beat.

    `compute_seconds`: no recomputation, no waiting. `recompute_seconds`: with the least recomputation that memory
    allows. `link_seconds`, `nvme_seconds`, `host_seconds`: what the channel must carry at least, whatever compute does.
    `aggregated_seconds`: everything together. Infinity: nothing fits.
    """

    compute_seconds: float
    recompute_seconds: float
    link_seconds: float
    nvme_seconds: float
    host_seconds: float
    aggregated_seconds: float

    @property
    def best_seconds(self) -> float:
        return max(self.compute_seconds, self.aggregated_seconds)


def bounds(instance: Instance, simulator: Simulator, micro_batch: int, mode: str) -> Bounds:
    """All bounds for one micro-batch and step mode."""
    costs = simulator.costs(micro_batch)
    compute = costs.rounds * sum(block.forward_seconds + block.backward_seconds for block in costs.blocks)

    def solved(*names: str) -> float:
        relaxation = Relaxation(instance, costs, mode)  # type: ignore[arg-type]
        if names:
            for phase, rows in relaxation.times.items():
                relaxation.times[phase] = [row for row in rows if row.name in names]
        return CountModel(relaxation, relaxed=True).solve().bound_seconds

    return Bounds(
        compute_seconds=compute,
        recompute_seconds=solved("compute"),
        link_seconds=solved("h2d", "d2h"),
        nvme_seconds=solved("nvme_read", "nvme_write"),
        host_seconds=solved("host"),
        aggregated_seconds=solved(),
    )


def lower_bound(instance: Instance, simulator: Simulator | None = None) -> float:
    """No plan of `instance` has a shorter simulated step. Infinity when the relaxation proves that none fits."""
    simulator = simulator or Simulator(instance)
    best = float("inf")
    for micro_batch in instance.micro_batches:
        for mode in instance.allowed.step_modes:
            relaxation = Relaxation(instance, simulator.costs(micro_batch), mode)
            best = min(best, CountModel(relaxation, relaxed=True).solve().bound_seconds)
    return best
