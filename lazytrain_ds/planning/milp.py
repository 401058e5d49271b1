"""The mixed-integer program over counts: equal blocks are planned as classes, through OR-Tools MathOpt.

Its optimum is a proven lower bound of the simulator's step for one micro-batch and step mode (see relaxation.py for why
each row holds); its counts are what `arrange.py` turns into plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ortools.math_opt.python import mathopt

from lazytrain_ds.errors import PlanError
from lazytrain_ds.planning.counts import Key, Phase, Row
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.relaxation import Relaxation
from lazytrain_ds.planning.schema import TIERS, TRANSFER_CHANNELS, TierName

__all__ = ["SOLVERS", "CountModel", "CountSolution", "solver_type"]

SOLVERS: Final = {
    "auto": mathopt.SolverType.HIGHS,
    "highs": mathopt.SolverType.HIGHS,
    "scip": mathopt.SolverType.GSCIP,
}

# Weight of the tie-breaker (an effort of at most 1): among equal times, move little. Subtracted from the bound again.
_TIE: Final = 1e-4


def solver_type(name: str) -> mathopt.SolverType:
    """The MathOpt solver called `name`; PlanError for another name."""
    if name == "cp_sat":
        raise PlanError(
            "solver 'cp_sat' takes integers only: it would round this model's times to whole units and call the result "
            "optimal; use 'highs' or 'scip'"
        )
    if name not in SOLVERS:
        raise PlanError(f"unknown solver {name!r}; there are {', '.join(SOLVERS)}")
    return SOLVERS[name]


@dataclass(frozen=True)
class CountSolution:
    """`counts` is None where no count fits. `bound_seconds` is proven: no plan's step is shorter."""

    counts: dict[Key, float] | None
    seconds: float
    bound_seconds: float
    status: str
    short_bytes: dict[TierName, float]


class CountModel:
    """The program for one Relaxation; `relaxed` drops integrality (with `whole_ends` only that of groups of several
    blocks: what a half embedding leaves on the device is no guide), `elastic` tiers may be exceeded: then the
    missing bytes are minimized, not time.

    `derate` below 1 pretends slower channels: plans with slack for what averages hide (no bound then).
    """

    def __init__(
        self,
        relaxation: Relaxation,
        *,
        relaxed: bool = False,
        whole_ends: bool = False,
        elastic: tuple[TierName, ...] = (),
        derate: float = 1.0,
    ) -> None:
        self.relaxation = relaxation
        self.derate = derate
        self.relaxed = relaxed
        self._whole_ends = whole_ends
        self.elastic = elastic
        self.model = mathopt.Model(name="counts")
        self.variables: dict[Key, mathopt.Variable] = {}
        self.capacity: dict[str, tuple[mathopt.LinearConstraint, float]] = {}
        self.short: dict[TierName, mathopt.Variable] = {}
        self._scale = self._time_scale()
        # Bytes enter the program in units that make the device's capacity, and so all coefficients, moderate numbers.
        self._unit = max(1.0, relaxation.costs.useful["device"] / 256, relaxation.costs.useful["host"] / 16384)
        self._counts()
        self._segments()
        self._times()
        self._memory()
        if elastic:
            self.model.minimize(mathopt.fast_sum(self.short.values()))
        else:
            self.model.minimize(self.total + _TIE * self._effort())

    def _effort(self) -> mathopt.LinearSum:
        """Share of blocks' activations, parameters and states that live away from the device; NVMe counts double."""
        weights = {"device": 0.0, "host": 0.5, "nvme": 1.0, "dropped": 0.25}
        total = 3.0 * self.relaxation.instance.block_count
        terms = []
        for g, group in enumerate(self.relaxation.groups):
            for index, option in enumerate(group.activations):
                weight = 0.5 * (weights[option.saved] + weights[option.boundary])
                terms.append(weight / total * self.variables[Key(g, "activation", index)])
            for index, (tier, keep) in enumerate(group.parameters):
                weight = weights[tier] + (0.1 if keep else 0.0)
                terms.append(weight / 1.1 / total * self.variables[Key(g, "parameter", index)])
            if group.numbers.trainable:
                for index, sub_group in enumerate(group.optimizers):
                    weight = weights[sub_group.tier]
                    terms.append(weight / total * self.variables[Key(g, "optimizer", index)])
        return mathopt.fast_sum(terms)

    def _segments(self) -> None:
        """Every segment starts with a kept boundary and has a limited length."""
        longest = self.relaxation.instance.allowed.longest_segment
        dropped: list[mathopt.Variable] = []
        starts: list[mathopt.Variable] = []
        for g, group in enumerate(self.relaxation.groups):
            menu = self.relaxation.costs.choices[group.blocks[0]]
            for index, option in enumerate(group.activations):
                variable = self.variables[Key(g, "activation", index)]
                if option.boundary == "dropped":
                    dropped.append(variable)
                elif menu[option.choice][4]:
                    starts.append(variable)
        if dropped:
            limit = mathopt.fast_sum(dropped) - (longest - 1) * mathopt.fast_sum(starts)
            self.model.add_linear_constraint(limit <= 0)

    def _time_scale(self) -> float:
        compute = sum(block.forward_seconds + block.backward_seconds for block in self.relaxation.costs.blocks)
        return compute or 1.0

    def _counts(self) -> None:
        model, fixed = self.model, self.relaxation.fixed
        for g, group in enumerate(self.relaxation.groups):
            kinds = {
                "activation": len(group.activations),
                "parameter": len(group.parameters),
                "optimizer": len(group.optimizers) if group.numbers.trainable else 0,
            }
            for kind, count in kinds.items():
                if not count:
                    continue
                keys = [Key(g, kind, option) for option in range(count)]  # type: ignore[arg-type]
                for key in keys:
                    low, high = 0.0, float(group.size)
                    if fixed is not None and kind != "activation":
                        low = high = fixed.get(key, 0.0)
                    name = f"{kind}_{g}_{key.option}"
                    whole = not self.relaxed or (self._whole_ends and group.size == 1)
                    self.variables[key] = model.add_variable(lb=low, ub=high, is_integer=whole, name=name)
                model.add_linear_constraint(mathopt.fast_sum(self.variables[key] for key in keys) == group.size)
            self._overlaps(g)
        self._refetches()

    def _refetches(self) -> None:
        """Fetches for re-runs: by any group's blocks, at least as many as are certain in all."""
        refetches = self.relaxation.refetches
        if not refetches.terms:
            return
        for g, group in enumerate(self.relaxation.groups):
            self.variables[Key(g, "refetch")] = self.model.add_variable(lb=0.0, ub=group.size, name=f"refetch_{g}")
        every = mathopt.fast_sum(variable for key, variable in self.variables.items() if key.kind == "refetch")
        self.model.add_linear_constraint(every - self._expression(refetches, 1.0) >= 0.0)

    def _overlaps(self, g: int) -> None:
        """Blocks that must have both of two options because there are not enough others."""
        group = self.relaxation.groups[g]
        if not group.numbers.trainable or not group.numbers.parameter_bytes:
            return
        resident = [
            self.variables[Key(g, "parameter", option)]
            for option, (tier, _) in enumerate(group.parameters)
            if tier == "device"
        ]
        on_device = [
            self.variables[Key(g, "optimizer", option)]
            for option, sub_group in enumerate(group.optimizers)
            if sub_group.step_device == "device"
        ]
        residents, stepped = mathopt.fast_sum(resident), mathopt.fast_sum(on_device)
        back = self.model.add_variable(lb=0.0, ub=group.size, name=f"write_back_{g}")
        self.model.add_linear_constraint(back - residents + stepped >= 0)
        self.variables[Key(g, "write_back")] = back
        out = self.model.add_variable(lb=0.0, ub=group.size, name=f"parameter_out_{g}")
        self.model.add_linear_constraint(out - stepped + residents >= 0)
        self.variables[Key(g, "parameter_out")] = out

    def _rate(self, row: Row) -> float:
        if row.name not in TRANSFER_CHANNELS:
            return 1.0
        return self.derate**2 if row.name.startswith("nvme") else self.derate

    def _expression(self, row: Row, unit: float) -> mathopt.LinearSum:
        terms = [
            (coefficient / unit) * self.variables[key]
            for key, coefficient in row.terms.items()
            if key in self.variables
        ]
        return mathopt.fast_sum([*terms, row.constant / unit])

    def _times(self) -> None:
        relaxation, model = self.relaxation, self.model
        scale = self._scale
        longest = max((block.parameter_bytes for block in relaxation.costs.blocks), default=0)
        lead = relaxation.instance.allowed.longest_lead
        rate = relaxation.costs.h2d.bytes_per_second
        names = ("first", "forward", "backward", "first_backward")
        first, forward, backward, first_backward = (model.add_variable(lb=0.0, name=name) for name in names)
        self.total = model.add_variable(lb=0.0, name="step")
        # Parameters for backward fetched, or held, before it begins: they save link time there and count at its start.
        early_bytes = lead * longest
        self.early = model.add_variable(lb=0.0, ub=early_bytes / self._unit, name="early_bytes")
        saved = self._unit / rate / scale + (lead * relaxation.costs.h2d.latency_seconds / scale) / max(
            1e-12, early_bytes / self._unit
        )
        read = relaxation.costs.nvme_read
        read_saved, read_latency = self._unit / read.bytes_per_second / scale, lead * read.latency_seconds / scale
        self.waits = [model.add_variable(lb=0.0, name=f"wait_{index}") for index in range(2)]
        # The last backward may be longer than the average one, the others shorter; each obeys the rows of its phase.
        shortest = {
            "forward": model.add_variable(lb=0.0, name="shortest_forward"),
            "backward": model.add_variable(lb=0.0, name="shortest_backward"),
        }
        phases: list[tuple[Phase, mathopt.LinearTypes]] = [
            ("first", first),
            ("forward", forward),
            ("backward", backward),
            ("backward", first_backward),
            ("forward", shortest["forward"]),
            ("backward", shortest["backward"]),
            ("micro", forward + backward),
            ("micro", first + first_backward),
            ("later", forward + backward),
        ]
        for phase, variable in phases:
            for row in relaxation.times[phase]:
                expression = self._expression(row, scale * self._rate(row))
                if self.derate < 1 and phase == "first" and row.name == "nvme_write":
                    # FIFO: the last states are written behind most of the first forward's activations. No bound.
                    expression = expression + self._expression(relaxation.written_seconds, scale)
                relief: mathopt.LinearTypes = 0.0
                if phase in ("backward", "micro") and row.name == "h2d":
                    relief = saved * self.early
                elif phase in ("backward", "micro") and row.name == "nvme_read":
                    relief = read_saved * self.early + read_latency
                waits = sum(self.waits) if phase == "backward" and row.name == "compute" else 0.0
                model.add_linear_constraint(variable + relief - expression - waits >= 0)
        rounds = relaxation.rounds
        steady = (rounds - 1) * (forward + backward)
        model.add_linear_constraint(self.total - first - first_backward - steady >= 0)
        passes = (rounds - 1) * (shortest["forward"] + shortest["backward"])
        model.add_linear_constraint(self.total - passes - self._expression(relaxation.drain, scale) >= 0)
        for row in relaxation.times["step"]:
            relief = rounds * saved * self.early if row.name == "h2d" else 0.0
            if row.name == "nvme_read":
                relief = rounds * (read_saved * self.early + read_latency)
            model.add_linear_constraint(self.total + relief - self._expression(row, scale * self._rate(row)) >= 0)
        self.forward = forward if rounds > 1 else first
        self.phase_seconds = {
            "first": first,
            "forward": forward,
            "backward": backward,
            "first_backward": first_backward,
        }

    def _memory(self) -> None:
        relaxation, model = self.relaxation, self.model
        costs, instance = relaxation.costs, relaxation.instance
        step = instance.phase("step")
        extra = {"device": step.device_bytes, "host": step.host_bytes, "nvme": step.nvme_bytes}
        for tier in TIERS:
            cap = (costs.useful[tier] - extra[tier]) / self._unit
            slack: mathopt.Variable | float = 0.0
            if tier in self.elastic:
                slack = self.short[tier] = model.add_variable(lb=0.0, name=f"short_{tier}")
            if tier != "device":
                used = self._expression(relaxation.memory[tier], self._unit)
                if tier == "host":
                    # What has not been written yet when backward starts is still in host memory.
                    unwritten = model.add_variable(lb=0.0, name="unwritten")
                    writing = costs.nvme_write.bytes_per_second * self._scale / self._unit
                    writes = self._expression(relaxation.written_seconds, self._scale)
                    model.add_linear_constraint(unwritten - writing * writes + writing * self.forward >= 0)
                    used = used + self._staging() + unwritten
                self._limit(tier, used - slack, cap)
                continue
            fixed = self._expression(relaxation.memory["device"], self._unit)
            self._slots(fixed - slack, cap)
            n = instance.block_count
            # What has not left yet when backward starts still counts. Elapsed time: the forward, waits, re-runs.
            rate = costs.d2h.bytes_per_second * self._scale / self._unit
            out = self._expression(relaxation.offloaded_seconds, self._scale)
            reruns = mathopt.fast_sum(
                max(costs.blocks[max(0, block - 1)].forward_seconds for block in group.blocks)
                / self._scale
                * self.variables[Key(g, "activation", option)]
                for g, group in enumerate(relaxation.groups)
                for option, activation in enumerate(group.activations)
                if activation.boundary == "dropped"
            )
            elapsed: list[mathopt.LinearTypes] = [self.forward + self.waits[0] + reruns]
            elapsed.append(elapsed[0] + self.waits[1] + self._last_backward(n))
            for index, (name, row) in enumerate((("turn", relaxation.turn), ("next", relaxation.next))):
                if index and n < 2:
                    continue
                tail = model.add_variable(lb=0.0, name=f"tail_{name}")
                model.add_linear_constraint(tail - rate * out + rate * elapsed[index] >= 0)
                used = fixed + self._expression(row, self._unit) + tail
                if index == 0:
                    used = used + self.early
                self._limit(name, used - slack, cap)
        budget = instance.nvme_write_budget_bytes_per_step
        if budget is not None:
            self._limit("nvme_written", self._expression(relaxation.written, self._unit), budget / self._unit)

    def _slots(self, fixed: mathopt.LinearTypes, cap: float) -> None:
        """While a block runs backward whose parameters are fetched, they are on the device as well."""
        relaxation = self.relaxation
        for g, group in enumerate(relaxation.groups):
            fetched = [
                self.variables[Key(g, "parameter", option)]
                for option, (tier, _) in enumerate(group.parameters)
                if tier != "device" and Key(g, "parameter", option) in self.variables
            ]
            if not fetched or not group.numbers.parameter_bytes:
                continue
            numbers = group.numbers
            occurs = self.model.add_variable(lb=0.0, ub=1.0, is_integer=not self.relaxed, name=f"fetched_{g}")
            self.model.add_linear_constraint(mathopt.fast_sum(fetched) - group.size * occurs <= 0)
            slot = (numbers.parameter_bytes / self._unit) * occurs
            slot = slot + (numbers.transient_backward_bytes + numbers.gradient_bytes) / self._unit
            self._limit(f"slot_{g}", fixed + slot, cap)

    def _staging(self) -> mathopt.LinearSum:
        """Staging buffers on the host: a kind costs its largest option that occurs."""
        model, groups = self.model, self.relaxation.groups
        kinds: list[mathopt.Variable] = []
        for name, options in self.relaxation.staging.items():
            largest = model.add_variable(lb=0.0, name=f"staging_{name}")
            for key, byte_count in options.items():
                occurs = model.add_variable(lb=0.0, ub=1.0, is_integer=not self.relaxed, name=f"occurs_{name}_{key}")
                model.add_linear_constraint(self.variables[key] - groups[key.group].size * occurs <= 0)
                model.add_linear_constraint(largest - (byte_count / self._unit) * occurs >= 0)
            kinds.append(largest)
        return mathopt.fast_sum(kinds)

    def _last_backward(self, n: int) -> mathopt.LinearTypes:
        """Longest time the last block's backward may take, by its choice."""
        relaxation = self.relaxation
        g = relaxation.group_of[n - 1]
        parts = [
            relaxation.costs.choices[n - 1][option.choice][2]
            / self._scale
            * self.variables[Key(g, "activation", index)]
            for index, option in enumerate(relaxation.groups[g].activations)
        ]
        return mathopt.fast_sum([*parts, relaxation.costs.blocks[n - 1].backward_seconds / self._scale])

    def _limit(self, name: str, used: mathopt.LinearTypes, cap: float) -> None:
        constraint = self.model.add_linear_constraint(used <= cap)
        self.capacity[name] = (constraint, constraint.upper_bound)

    # ---- solving

    def reserve(self, tier: TierName, byte_count: float) -> None:
        """Keep `byte_count` bytes of `tier` out of reach."""
        for name in self.capacity:
            if name == tier or (tier == "device" and name.startswith(("turn", "next", "slot"))):
                constraint, upper = self.capacity[name]
                constraint.upper_bound = upper - byte_count / self._unit

    def solve(
        self, *, solver: str = "auto", gap: float = 1e-3, node_limit: int = 5_000, hint: dict[Key, float] | None = None
    ) -> CountSolution:
        """Solve to `gap` or `node_limit`. Raises PlanError where the solver fails (infeasible is a status)."""
        parameters = mathopt.SolveParameters(relative_gap_tolerance=gap, node_limit=node_limit)
        model_parameters = mathopt.ModelSolveParameters()
        if hint is not None and solver != "highs":
            values = {self.variables[key]: value for key, value in hint.items() if key in self.variables}
            zero = {variable: 0.0 for key, variable in self.variables.items() if key not in hint}
            model_parameters.solution_hints.append(mathopt.SolutionHint(variable_values={**zero, **values}))
        result = self._run(solver, parameters, model_parameters)
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return CountSolution(None, float("inf"), float("inf"), "infeasible", {})
        bound = result.best_objective_bound() - _TIE if not self.elastic else 0.0
        if not result.has_primal_feasible_solution():
            return CountSolution(None, float("inf"), max(0.0, bound) * self._scale, reason.name.lower(), {})
        values = result.variable_values()
        counts = self._whole({key: values[variable] for key, variable in self.variables.items()})
        return CountSolution(
            counts={key: value for key, value in counts.items() if value},
            seconds=values[self.total] * self._scale,
            bound_seconds=max(0.0, bound) * self._scale,
            status=reason.name.lower(),
            short_bytes={tier: values[variable] * self._unit for tier, variable in self.short.items()},
        )

    def _whole(self, values: dict[Key, float]) -> dict[Key, float]:
        """Whole counts near `values`: in every group and kind as many blocks as there are, the largest rests first."""
        counts = {key: float(round(value)) for key, value in values.items()}
        decisions: dict[tuple[int, str], list[Key]] = {}
        for key in values:
            if key.kind in ("activation", "parameter", "optimizer"):
                decisions.setdefault((key.group, key.kind), []).append(key)
        for (group, _), keys in decisions.items():
            missing = self.relaxation.groups[group].size
            for key in keys:
                counts[key] = float(int(values[key] + 1e-6))
                missing -= int(counts[key])
            for key in sorted(keys, key=lambda key: counts[key] - values[key])[:missing]:
                counts[key] += 1.0
        return counts

    def _run(
        self, solver: str, parameters: mathopt.SolveParameters, model_parameters: mathopt.ModelSolveParameters
    ) -> mathopt.SolveResult:
        """MathOpt's answer; where a solver fails inside (HiGHS sometimes does on hardly feasible models), another's."""
        if solver == "auto":  # by benchmarks/planner_solvers.py
            continuous = self.relaxed and not self._whole_ends
            names: tuple[str, ...] = ("highs", "scip") if continuous else ("scip", "highs")
        else:
            names = (solver, "scip") if solver == "highs" else (solver,)
        failure: Exception | None = None
        for name in names:
            # HiGHS refuses these parameters.
            whole = not self.relaxed or self._whole_ends
            effort = mathopt.Emphasis.LOW if name == "scip" and whole else None
            parameters.cuts = parameters.heuristics = effort
            try:
                return mathopt.solve(self.model, solver_type(name), params=parameters, model_params=model_parameters)
            except (AttributeError, RuntimeError, ValueError) as error:
                # MathOpt hides a solver's own error behind a missing `canonical_code`; the cause has the words.
                failure = error
        reason = failure.__context__ or failure if failure is not None else "no reason given"
        raise PlanError(f"solver {solver!r} failed on the count model: {reason}; name another solver") from failure


def objective(relaxation: Relaxation, plan: Plan) -> float:
    """What the program says a plan's step takes: its rows at the plan's counts."""
    return relaxation.seconds(relaxation.counts(plan))
