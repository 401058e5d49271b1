"""`kind="paper"`: the published activation program applied to an Instance; the rest is as zero3_offload has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lazytrain_ds.errors import InfeasibleError
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.milp import solver_type
from lazytrain_ds.planning.paper import PaperProblem, solve_paper
from lazytrain_ds.planning.plan import BlockPlan, Plan
from lazytrain_ds.planning.rules import apply
from lazytrain_ds.planning.simulator import Outcome, Simulator

__all__ = ["paper_plan"]

_NODE_LIMIT: Final = 20_000


def _recomputed_run(instance: Instance, plan: Plan) -> tuple[int, int]:
    """(start, stop) of the longest run of blocks that keep their boundary only: what the program schedules."""
    best, start = (0, 0), 0
    for index in range(instance.block_count + 1):
        inside = index < instance.block_count
        kind = instance.costs(index, plan.micro_batch).choice(plan.blocks[index].choice).kind if inside else ""
        if kind != "boundary":
            if index - start > best[1] - best[0]:
                best = (start, index)
            start = index + 1
    return best


def paper_plan(instance: Instance, simulator: Simulator, solver: str = "auto") -> tuple[Plan, Outcome]:
    """The fastest feasible plan over the micro-batches (else the one that exceeds the caps least)."""
    best: tuple[Plan, Outcome] | None = None
    for micro_batch in instance.micro_batches:
        single = replace(instance, micro_batches=(micro_batch,))
        plan, outcome = _one(single, simulator, micro_batch, solver)
        if best is None or (outcome.excess, outcome.step_seconds) < (best[1].excess, best[1].step_seconds):
            best = plan, outcome
    assert best is not None
    return best


def _one(instance: Instance, simulator: Simulator, micro_batch: int, solver: str) -> tuple[Plan, Outcome]:
    base, base_outcome = apply("zero3_offload", instance, simulator)
    base = replace(base, origin="paper")
    start, stop = _recomputed_run(instance, base)
    length = stop - start
    if length < 2:
        return base, base_outcome
    # What is left for boundaries: the caps less what the same plan needs without the run's boundaries.
    _, bare_outcome = apply("checkpoint_all_host", instance, simulator)
    sizes = [instance.costs(index, micro_batch).boundary_bytes for index in range(start, stop)]
    sizes.append(instance.costs(stop, micro_batch).boundary_bytes if stop < instance.block_count else 0)
    needs = simulator.phase_needs(bare_outcome.program, bare_outcome.peaks)
    caps = bare_outcome.program.costs.caps
    spare = {tier: caps[tier] - max(need.values()) for tier, need in needs.items()}
    if "host" in instance.allowed.boundary_tiers:
        spare["host"] += sum(sizes[:-1])
    tiers = instance.allowed.boundary_tiers
    forward = tuple(instance.costs(index, micro_batch).forward_seconds for index in range(start, stop))
    backward = [
        instance.costs(index, micro_batch).backward_seconds + forward[index - start] for index in range(start, stop)
    ]
    link, writes, reads = (instance.channel(name) for name in ("h2d", "nvme_write", "nvme_read"))
    down = instance.channel("d2h").bytes_per_second
    problem = PaperProblem(
        boundary_bytes=tuple(sizes),
        forward_seconds=forward,
        # Both ends are on the device in the published program; they were not part of the bare plan's boundaries.
        device_budget_bytes=max(0, spare["device"]) + sizes[0] + sizes[-1]
        if "device" in tiers
        else sizes[0] + sizes[-1],
        host_budget_bytes=max(0, spare["host"]) if "host" in tiers else 0,
        nvme_budget_bytes=max(0, spare["nvme"]) if "nvme" in tiers else 0,
        down_capacity=tuple(seconds * down for seconds in forward),
        up_capacity=tuple(seconds * link.bytes_per_second for seconds in backward),
        write_capacity=tuple(seconds * writes.bytes_per_second for seconds in forward),
        read_capacity=tuple(seconds * reads.bytes_per_second for seconds in backward),
        gradient_bytes=(0.0,) * length,
        parameter_bytes=tuple(float(instance.block_class(index).parameter_bytes) for index in range(start, stop)),
        link_rate=link.bytes_per_second,
        write_rate=writes.bytes_per_second,
        read_rate=reads.bytes_per_second,
        longest_segment=instance.allowed.longest_segment if instance.allowed.drop_boundaries else 1,
    )
    try:
        schedule = solve_paper(problem, solver=solver_type(solver), node_limit=_NODE_LIMIT, gap=1e-4)
    except InfeasibleError:
        return base, base_outcome
    blocks: list[BlockPlan] = list(base.blocks)
    for offset, home in enumerate(schedule.homes[:-1]):
        blocks[start + offset] = replace(blocks[start + offset], boundary=home or "dropped")
    plan = replace(base, blocks=tuple(blocks))
    return plan, simulator.run(plan)
