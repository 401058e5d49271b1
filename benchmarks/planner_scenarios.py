"""Stored planner scenarios: their list, their best known step times, and the check against regressions.

    python -m benchmarks.planner_scenarios check [--part K/N] [--names a,b]   # solve and compare with the stored file
    python -m benchmarks.planner_scenarios update [--part K/N]               # the same, then keep what is better

    python -m benchmarks.planner_scenarios long [--seconds 600] [--names a,b]  # how much more time would bring

    python -m benchmarks.planner_scenarios list                              # stored gaps above 3 %, and the median

A scenario is a shape, a machine and a few numbers; its Instance is made by planner_instances.py, so the file stays
small. Failure classes: `infeasible` (a plan was known), `slower` (more than TOLERANCE above the best known time),
`worse than rule`, `over cap`, `digest` (the scenario itself changed: update the file deliberately).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner_instances import GB, MACHINES, SHAPES, instance
from lazytrain_ds.errors import InfeasibleError
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.rules import best_rule
from lazytrain_ds.planning.schema import TIERS, digest
from lazytrain_ds.planning.simulator import Simulator
from lazytrain_ds.planning.solve import solve

STORE = Path(__file__).parent / "scenarios" / "scenarios.json"
TOLERANCE = 0.01
# Solved for ten minutes by `long`: each machine's trouble, none that is within half a percent of its bound anyway.
LONG = (
    "3B-rtx3090-loose",
    "14B-a100-tight",
    "27B-h100-loose",
    "70B-rtx4090-tight",
    "8B-a100-loose",
    "32B-h200-loose",
)


@dataclass(frozen=True)
class Result:
    """One solved scenario: None where nothing fits."""

    name: str
    step_seconds: float | None
    bound_seconds: float | None
    rule: str
    rule_seconds: float | None
    over_cap: bool
    cpu_seconds: float

    @property
    def gap(self) -> float | None:
        return None if self.step_seconds is None else self.step_seconds / (self.bound_seconds or 1.0) - 1


def specifications() -> dict[str, dict[str, Any]]:
    """Name and keyword arguments of every scenario (arguments of `planner_instances.instance`)."""
    result: dict[str, dict[str, Any]] = {}
    micro_batches = ((1,), (4,), (2, 4, 8), (8,))
    rounds = (1, 8, 2, 16)
    sequences = (2048, 1024, 4096)
    index = 0
    for machine in MACHINES.values():
        for shape in SHAPES.values():
            size = shape.block_parameters * shape.layers
            if machine.name == "cpu" and size > 4e9:
                continue
            for caps in ("loose", "tight"):
                index += 1
                sizes = micro_batches[index % 4]
                count = rounds[(index // 4 + index) % 4]
                keywords: dict[str, Any] = dict(
                    shape=shape.name,
                    machine=machine.name,
                    sequence=sequences[index % 3],
                    micro_batches=sizes,
                    global_batch=max(sizes) * count,
                    precisions=("fp32", "8bit") if index % 5 == 0 else ("fp32",),
                    host_bytes=int(max(64 * GB, 24 * size)),
                )
                if caps == "tight":
                    keywords["device_bytes"] = int(machine.device_bytes * 0.6)
                    keywords["host_bytes"] = int(max(48 * GB, 15 * size if index % 4 == 1 else 18.5 * size))
                result[f"{shape.name}-{machine.name}-{caps}"] = keywords
    return result


def build(keywords: dict[str, Any], name: str = "") -> Instance:
    """The Instance of a specification (as stored in JSON or as made above)."""
    values = dict(keywords)
    for key in ("micro_batches", "precisions"):
        values[key] = tuple(values[key])
    return instance(values.pop("shape"), values.pop("machine"), name=name, **values)


def run(name: str, value: Instance, seconds: float | None = None) -> Result:
    """Solve one scenario (`seconds`: the solver's time limit) and judge the plan on the simulator."""
    begin = time.process_time()
    rule, _, rule_outcome = best_rule(value)
    rule_seconds = rule_outcome.step_seconds if rule_outcome.fits else None
    try:
        plan = solve(value, time_limit_seconds=seconds)
    except InfeasibleError:
        return Result(name, None, None, rule, rule_seconds, False, time.process_time() - begin)
    plan.check(value)
    outcome = Simulator(value).run(plan)
    assert plan.prediction is not None
    over = any(plan.prediction.peak_bytes(tier) > value.tier(tier).usable_bytes for tier in TIERS)
    return Result(
        name,
        outcome.step_seconds,
        plan.prediction.lower_bound_seconds,
        rule,
        rule_seconds,
        over or not outcome.fits,
        time.process_time() - begin,
    )


def failures(result: Result, stored: dict[str, Any], value: Instance) -> list[str]:
    """Failure classes of a result against its stored entry."""
    found = []
    if stored.get("digest") != digest(value):
        found.append("digest")
    best = stored.get("best_seconds")
    if result.step_seconds is None:
        if best is not None or result.rule_seconds is not None:
            found.append("infeasible")
        return found
    if best is not None and result.step_seconds > best * (1 + TOLERANCE):
        found.append(f"slower ({result.step_seconds / best - 1:+.2%})")
    if result.rule_seconds is not None and result.step_seconds > result.rule_seconds * (1 + 1e-9):
        found.append("worse than rule")
    if result.over_cap:
        found.append("over cap")
    return found


def load() -> dict[str, dict[str, Any]]:
    """Stored entries by name."""
    return json.loads(STORE.read_text()) if STORE.exists() else {}


def keep(name: str, **values: Any) -> None:
    """Put `values` into a stored entry (or make it) and write the file."""
    entries = load()
    entries[name] = {**entries.get(name, {}), **values}
    lines = [f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in entries.items()]
    STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def compare_long(name: str, seconds: float) -> None:
    """Solve a scenario as always and with a limit of `seconds`; store and print both steps."""
    value = build(specifications()[name], name)
    short, long = run(name, value), run(name, value, seconds)
    if short.step_seconds is None or long.step_seconds is None:
        print(f"{name:24s} infeasible")
        return
    keep(
        name,
        long={
            "limit_seconds": seconds,
            "cpu_seconds": round(long.cpu_seconds, 1),
            "step_seconds": long.step_seconds,
            "default_step_seconds": short.step_seconds,
        },
    )
    print(
        f"{name:24s} {short.step_seconds:.4f} s in {short.cpu_seconds:.1f} CPU seconds, {long.step_seconds:.4f} s in "
        f"{long.cpu_seconds:.1f}: {1 - long.step_seconds / short.step_seconds:.2%} better",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "update", "list", "long"))
    parser.add_argument("--part", default="1/1", help="K/N: every N-th scenario, starting with the K-th")
    parser.add_argument("--names", default="")
    parser.add_argument("--seconds", type=float, default=None, help="the solver's time limit (600: ten minutes)")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.part.split("/"))
    wanted = options.names.split(",") if options.names else None
    bad = 0
    entries = load()
    if options.command == "list":
        gaps = {n: e["best_seconds"] / e["bound_seconds"] - 1 for n, e in entries.items() if e["best_seconds"]}
        for name, gap in sorted(gaps.items(), key=lambda item: -item[1]):
            if gap > 0.03:
                print(f"{name:24s} {gap:.1%} above its bound")
        print(f"{len(entries)} scenarios, {len(gaps)} feasible, median gap {statistics.median(gaps.values()):.2%}")
        return 0
    if options.command == "long":
        for name in wanted or LONG:
            compare_long(name, options.seconds or 600.0)
        return 0
    for index, (name, keywords) in enumerate(specifications().items()):
        if (wanted and name not in wanted) or (not wanted and index % parts != part - 1):
            continue
        value = build(keywords, name)
        result = run(name, value, options.seconds)
        stored = entries.get(name, {})
        found = failures(result, stored, value)
        bad += bool(found)
        gap = "-" if result.gap is None else f"{result.gap:.2%}"
        print(
            f"{name:24s} step {result.step_seconds} bound {result.bound_seconds} gap {gap} rule {result.rule} "
            f"{result.rule_seconds} cpu {result.cpu_seconds:.1f}s {' '.join(found)}",
            flush=True,
        )
        if options.command == "update":
            same = stored.get("digest") == digest(value)
            best = [x for x in (stored.get("best_seconds") if same else None, result.step_seconds) if x is not None]
            bounds = [x for x in (stored.get("bound_seconds") if same else None, result.bound_seconds) if x is not None]
            keep(
                name,
                digest=digest(value),
                spec=keywords,
                best_seconds=min(best) if best else None,
                bound_seconds=max(bounds) if bounds else None,
                rule=result.rule,
                rule_seconds=result.rule_seconds,
                cpu_seconds=round(result.cpu_seconds, 2),
            )
    print(f"{bad} scenario(s) failed" if bad else "all scenarios pass")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
