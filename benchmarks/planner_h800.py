"""H800, 27B, 70 GB, 12 GB/s, 73,728 tokens a step: our plans against the published MegaTrain executor's costs.

    python -m benchmarks.planner_h800

Every constant is in planner_instances.py (machine "h800", shape "27B") and planner.md. The published executor re-runs
every block of a segment (10N), fetches weights three times and steps the optimizer serially; it is charged by the
simulator's option `executor="published_megatrain"` on the `megatrain` rule at micro-batch 72.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.planner_instances import instance
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan, SubGroupPlan
from lazytrain_ds.planning.rules import apply
from lazytrain_ds.planning.simulator import Simulator
from lazytrain_ds.planning.solve import solve


def h800(precisions: tuple[str, ...] = ("fp32",)) -> Instance:
    """73,728 tokens a step: as one round, as in the paper, or in smaller micro-batches."""
    sizes = (8, 12, 18, 24, 36, 72)
    return instance("27B", "h800", sequence=1024, micro_batches=sizes, global_batch=72, precisions=precisions)


def published_seconds(value: Instance) -> float:
    """The published executor's step on the megatrain rule, all tokens in one round."""
    whole = replace(value, micro_batches=(72,))
    plan, _ = apply("megatrain", whole)
    return Simulator(whole, "published_megatrain").run(plan).step_seconds


def plans(value: Instance) -> dict[str, Plan]:
    """The executable rule, the paper's decisions only (one round), and everything."""
    whole = replace(value, micro_batches=(72,))
    return {
        "megatrain (our executor)": solve(whole, kind="megatrain"),
        "paper's decisions": solve(whole, kind="paper"),
        "auto": solve(value),
    }


def with_8bit_states(plan: Plan, blocks: int) -> float:
    """The step of `plan` where the first `blocks` decoder blocks have 8-bit states, stepped on the host."""
    whole = replace(h800(("fp32", "8bit")), micro_batches=(72,))
    group = SubGroupPlan("host", "8bit", "host")
    decided = [
        replace(block, optimizer=group) if 1 <= index <= blocks else block for index, block in enumerate(plan.blocks)
    ]
    return Simulator(whole).run(replace(plan, blocks=tuple(decided), prediction=None)).step_seconds


def main() -> None:
    value = h800()
    published = published_seconds(value)
    print(f"published executor: {published:.2f} s")
    for name, plan in plans(value).items():
        assert plan.prediction is not None
        p = plan.prediction
        print(
            f"{name:26s} {p.step_seconds:.2f} s, {published / p.step_seconds:.3f}x, micro-batch {plan.micro_batch}, "
            f"recompute {p.recompute_seconds:.2f} s, optimizer exposed {p.optimizer_exposed_seconds:.2f} s, "
            f"gap {p.gap:.2%}"
        )
        if plan.origin == "paper":
            for blocks, what in ((1, "2 % of"), (64, "all blocks'")):
                seconds = with_8bit_states(plan, blocks)
                print(f"  and {what} states in 8 bit: {seconds:.2f} s, {published / seconds:.3f}x")


if __name__ == "__main__":
    main()
