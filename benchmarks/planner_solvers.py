"""Which solver for the count model: CPU seconds and bounds of HiGHS and SCIP through MathOpt on the same models.

    python -m benchmarks.planner_solvers

CP-SAT is refused: it takes integers only, rounds the model's continuous times and calls the result optimal.
"""

from __future__ import annotations

import time

from benchmarks.planner_instances import GB, instance
from lazytrain_ds.errors import PlanError
from lazytrain_ds.planning.milp import CountModel
from lazytrain_ds.planning.relaxation import Relaxation
from lazytrain_ds.planning.simulator import Simulator


def main() -> None:
    instances = (
        instance("27B", "h200", device_bytes=70 * GB),
        instance("70B", "h200"),
        instance("120B", "h100"),
        instance("8B", "h800", rounds_of_first=4, device_bytes=42 * GB, host_bytes=129 * GB),
        instance("14B", "rtx3090", host_bytes=100 * GB, precisions=("fp32", "8bit")),
    )
    for value in instances:
        relaxation = Relaxation(value, Simulator(value).costs(value.micro_batches[0]), "hidden")
        for solver in ("highs", "scip", "cp_sat"):
            for gap in (1e-3, 5e-3):
                begin = time.process_time()
                try:
                    solution = CountModel(relaxation).solve(solver=solver, gap=gap)
                except PlanError as error:
                    print(f"{value.name:14s} {solver:6s} {str(error)[:90]}")
                    break
                seconds = time.process_time() - begin
                print(
                    f"{value.name:14s} {solver:6s} gap {gap:.1%}: {seconds:.2f} s, {solution.status}, plan "
                    f"{solution.seconds:.3f} s, bound {solution.bound_seconds:.3f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
