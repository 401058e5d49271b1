"""Draw docs/planned_step.svg: `python docs/planned_step.py [--output FILE]`. Analytic: no model, no torch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.planner_instances import SHAPES, instance  # noqa: E402
from lazytrain_ds.planning.solve import solve  # noqa: E402
from lazytrain_ds.report.figure import draw  # noqa: E402
from lazytrain_ds.report.timelines import lanes_of  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "planned_step.svg")
    shape = replace(SHAPES["0.5B"], name="6 blocks of 0.5B", layers=6, vocabulary=32768)
    made = instance(shape, "rtx3090", rounds_of_first=2, device_bytes=3_600_000_000, device_step=False)
    plan = solve(made, time_limit_seconds=1.0)
    title = "6 blocks of a 0.5B model, cap 3.6 GB, 2 micro-batches a step (predicted)"
    draw(lanes_of(made, plan, None), made, title, parser.parse_args().output)


if __name__ == "__main__":
    main()
