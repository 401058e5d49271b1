"""The published activation program: which boundaries are kept, where they live, which blocks are re-run.

arXiv 2608.11919, section "schedule": edges (s, e) are backward segments between materialized boundaries, homes are
device / host / NVMe with a byte budget each, traffic is continuous per compute window, and only exposure beyond the
mandatory traffic is charged. Symbols here: `edge`, `home`, `down` (D2H), `up` (H2D), `write`, `read`.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Final, Literal

from ortools.math_opt.python import mathopt

from lazytrain_ds.errors import InfeasibleError, PlanError

__all__ = ["Home", "PaperProblem", "PaperSchedule", "solve_paper"]

Home = Literal["device", "host", "nvme"]
HOMES: Final[tuple[Home, ...]] = ("device", "host", "nvme")


@dataclass(frozen=True)
class PaperProblem:
    """`boundary_bytes[i]` for boundaries 0..L, `forward_seconds[j]` of block j; budgets per home in bytes.

    `down_capacity[w]` / `up_capacity[w]`: bytes the link carries in compute window w (one per block);
    `gradient_bytes[w]` / `parameter_bytes[w]`: the mandatory traffic there; `write_capacity`, `read_capacity`: the SSD.
    Rates in bytes per second turn exposed bytes into seconds. `nvme_limit` bounds the number of NVMe homes.
    """

    boundary_bytes: tuple[int, ...]
    forward_seconds: tuple[float, ...]
    device_budget_bytes: float
    host_budget_bytes: float
    nvme_budget_bytes: float
    down_capacity: tuple[float, ...]
    up_capacity: tuple[float, ...]
    write_capacity: tuple[float, ...]
    read_capacity: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    link_rate: float
    write_rate: float
    read_rate: float
    longest_segment: int = 8
    nvme_limit: int | None = None
    materialized_weight: float = 1e-6
    nvme_weight: float = 1e-6
    frozen_edges: tuple[tuple[int, int], ...] = ()

    @property
    def block_count(self) -> int:
        return len(self.forward_seconds)


@dataclass(frozen=True)
class PaperSchedule:
    """`homes[i]` is None for a re-run boundary. `objective_bound` equals `objective` when proven."""

    homes: tuple[Home | None, ...]
    recompute_seconds: float
    exposed_seconds: float
    objective: float
    objective_bound: float
    status: str

    @property
    def recomputed(self) -> tuple[int, ...]:
        return tuple(index for index, home in enumerate(self.homes) if home is None)

    def count(self, home: Home) -> int:
        return sum(1 for value in self.homes if value == home)


def solve_paper(
    problem: PaperProblem,
    *,
    solver: mathopt.SolverType = mathopt.SolverType.HIGHS,
    node_limit: int | None = None,
    gap: float = 1e-6,
    time_limit_seconds: float | None = None,
) -> PaperSchedule:
    """Solve it. Raises InfeasibleError when no schedule fits the budgets, PlanError when the solver returns none."""
    p = problem
    n = p.block_count
    model = mathopt.Model(name="paper")
    edges = p.frozen_edges or tuple(
        (start, stop) for start in range(n) for stop in range(start + 1, min(n, start + p.longest_segment) + 1)
    )
    edge = {pair: model.add_binary_variable(name=f"edge_{pair[0]}_{pair[1]}") for pair in edges}
    home = {(i, h): model.add_binary_variable(name=f"{h}_{i}") for i in range(n + 1) for h in HOMES}
    for i in range(n + 1):
        entering = mathopt.fast_sum(edge[pair] for pair in edges if pair[1] == i)
        leaving = mathopt.fast_sum(edge[pair] for pair in edges if pair[0] == i)
        kept = mathopt.fast_sum(home[i, h] for h in HOMES)
        if i > 0:
            model.add_linear_constraint(entering - kept == 0)
        if i < n:
            model.add_linear_constraint(leaving - kept == 0)
    for end in (0, n):
        model.add_linear_constraint(home[end, "device"] == 1)
    if p.frozen_edges:
        for variable in edge.values():
            model.add_linear_constraint(variable == 1)
    budgets = {"device": p.device_budget_bytes, "host": p.host_budget_bytes, "nvme": p.nvme_budget_bytes}
    for h in HOMES:
        used = mathopt.fast_sum(p.boundary_bytes[i] * home[i, h] for i in range(n + 1))
        model.add_linear_constraint(used <= budgets[h])
    if p.nvme_limit is not None:
        model.add_linear_constraint(mathopt.fast_sum(home[i, "nvme"] for i in range(n + 1)) <= p.nvme_limit)
    unit = max(p.boundary_bytes) or 1  # traffic in boundaries rather than bytes: better scaled
    exposures: list[mathopt.LinearTypes] = []
    flows = (
        ("down", p.down_capacity, p.gradient_bytes, p.link_rate, ("host", "nvme"), 0),
        ("up", p.up_capacity, p.parameter_bytes, p.link_rate, ("host", "nvme"), 1),
        ("write", p.write_capacity, (0.0,) * n, p.write_rate, ("nvme",), 0),
        ("read", p.read_capacity, (0.0,) * n, p.read_rate, ("nvme",), 1),
    )
    for name, capacity, mandatory, rate, homes, late in flows:
        flow: dict[int, list[mathopt.Variable]] = {w: [] for w in range(n)}
        for i in range(1, n):
            # Leaving: in any window from its production on. Coming back: in any window of backward after its index.
            parts = []
            for w in range(i + late, n):
                variable = model.add_variable(lb=0.0, name=f"{name}_{i}_{w}")
                flow[w].append(variable)
                parts.append(variable)
            share = p.boundary_bytes[i] / unit
            total = mathopt.fast_sum(parts)
            away = mathopt.fast_sum(share * home[i, h] for h in homes)  # type: ignore[index]
            model.add_linear_constraint(total - away == 0)
        for w in range(n):
            exposed = model.add_variable(lb=0.0, name=f"{name}_exposed_{w}")
            free = max(0.0, capacity[w] - mandatory[w]) / unit
            model.add_linear_constraint(mathopt.fast_sum(flow[w]) - exposed <= free)
            exposures.append(exposed * (unit / rate))
    recompute = mathopt.fast_sum(sum(p.forward_seconds[s : e - 1]) * edge[s, e] for s, e in edges)
    materialized = mathopt.fast_sum(home[i, h] for i in range(n + 1) for h in HOMES)
    on_nvme = mathopt.fast_sum(home[i, "nvme"] for i in range(n + 1))
    model.minimize(
        recompute + mathopt.fast_sum(exposures) + p.materialized_weight * materialized + p.nvme_weight * on_nvme
    )
    limit = None if time_limit_seconds is None else datetime.timedelta(seconds=time_limit_seconds)
    parameters = mathopt.SolveParameters(relative_gap_tolerance=gap, node_limit=node_limit, time_limit=limit)
    result = mathopt.solve(model, solver, params=parameters)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        raise InfeasibleError(
            f"no boundary schedule fits: {n + 1} boundaries of up to {unit} bytes into device "
            f"{p.device_budget_bytes:.0f}, host {p.host_budget_bytes:.0f}, NVMe {p.nvme_budget_bytes:.0f} bytes with "
            f"segments of at most {p.longest_segment}; raise a budget or allow longer segments"
        )
    if not result.has_primal_feasible_solution():
        raise PlanError(f"the solver returned no schedule: {reason.name}; raise its limit or use another solver")
    values = result.variable_values()
    homes_out: list[Home | None] = []
    for i in range(n + 1):
        homes_out.append(next((h for h in HOMES if values[home[i, h]] > 0.5), None))
    again = sum(sum(p.forward_seconds[s : e - 1]) for s, e in edges if values[edge[s, e]] > 0.5)
    tie = p.materialized_weight * sum(h is not None for h in homes_out) + p.nvme_weight * homes_out.count("nvme")
    objective = result.objective_value()
    return PaperSchedule(
        homes=tuple(homes_out),
        recompute_seconds=again,
        exposed_seconds=max(0.0, objective - again - tie),
        objective=objective,
        objective_bound=result.best_objective_bound(),
        status=reason.name.lower(),
    )
