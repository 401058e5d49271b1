"""Plans as tables for people: need and have per tier and phase, decisions by class of blocks, speed and what
limits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from lazytrain_ds.errors import format_bytes
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import BlockPlan, Plan
from lazytrain_ds.planning.schema import PHASES


@dataclass(frozen=True)
class Speed:
    """What a plan's prediction means to a user.

    `model_flops`: FLOP/s by the 6N rule (N: all parameters); `executed_flops`: what the blocks' matmuls do,
    recomputation included. `bottleneck`: the channel that is busy for the largest share of the step.
    """

    step_seconds: float
    tokens_per_second: float
    model_flops: float
    executed_flops: float
    percent_of_bound: float
    bottleneck: str
    bottleneck_share: float


def format_count(count: int) -> str:
    """`count` things as people say it: "23.4 B", "847 k"."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return str(count)


def format_number(value: float) -> str:
    """Three significant figures and never an exponent: "0.123", "12.3", "2,170"."""
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def speed_of(instance: Instance, plan: Plan) -> Speed:
    """Speed figures of a plan that carries its prediction (ValueError without one)."""
    prediction = plan.prediction
    if prediction is None:
        raise ValueError("the plan has no prediction")
    seconds = prediction.step_seconds
    tokens = instance.global_batch * instance.sequence_length / instance.world_size
    executed = 0
    for index, block in enumerate(plan.blocks):
        costs = instance.costs(index, plan.micro_batch)
        executed += 3 * costs.forward_flops + costs.choice(block.choice).recompute_flops
    rounds = plan.rounds
    busiest = max(prediction.channels, key=lambda channel: channel.busy_seconds, default=None)
    return Speed(
        step_seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        model_flops=6 * instance.parameter_count * tokens / seconds if seconds else 0.0,
        executed_flops=executed * rounds / seconds if seconds else 0.0,
        percent_of_bound=prediction.percent_of_bound,
        bottleneck=busiest.channel if busiest else "",
        bottleneck_share=busiest.busy_seconds / seconds if busiest and seconds else 0.0,
    )


def memory_table(instance: Instance, plan: Plan) -> Table:
    """Predicted peak of every tier in every phase, beside what may be used."""
    table = Table(title="Memory: need by phase, and have", title_justify="left")
    table.add_column("tier")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    table.add_column("have", justify="right")
    for tier in instance.tiers:
        if not tier.capacity_bytes:
            continue
        row = [tier.name]
        for phase in PHASES:
            need = plan.prediction.peak_bytes(tier.name, phase) if plan.prediction else 0
            text = format_bytes(need)
            row.append(f"[red]{text}[/red]" if need > tier.usable_bytes else text)
        table.add_row(*row, format_bytes(tier.usable_bytes))
    return table


def describe(instance: Instance, plan: Plan, index: int) -> tuple[str, str, str, str]:
    """(activations, boundary, parameters, optimizer states) of one block in words."""
    block: BlockPlan = plan.blocks[index]
    choice = instance.costs(index, plan.micro_batch).choice(block.choice)
    activations = choice.name
    if choice.offloadable_bytes and block.saved_tier != "device":
        activations += f" on {block.saved_tier}"
    boundary = block.boundary if choice.needs_input or block.boundary == "dropped" else "-"
    parameters = "resident" if block.resident else block.parameter_tier
    if block.keep_parameters and not block.resident:
        parameters += ", kept for backward"
    states = "-"
    if instance.block_class(index).trainable_count:
        states = f"{block.optimizer.tier} {block.optimizer.precision}"
    return activations, boundary, parameters, states


def plan_table(instance: Instance, plan: Plan) -> Table:
    """Decisions by class of blocks: one row per class and distinct decision, with how many blocks take it."""
    title = f"Plan: micro-batch {plan.micro_batch} x {plan.rounds}, optimizer {plan.optimizer_step}, by {plan.origin}"
    table = Table(title=title, title_justify="left")
    for name in ("class", "blocks", "activations", "boundary", "parameters", "states"):
        table.add_column(
            name,
            justify="right" if name == "blocks" else "left",
            no_wrap=name == "class",
            min_width=11 if name == "activations" else None,
            overflow="fold",
        )
    counts: dict[tuple[str, tuple[str, str, str, str]], int] = {}
    for index, name in enumerate(instance.order):
        key = (name, describe(instance, plan, index))
        counts[key] = counts.get(key, 0) + 1
    for (name, row), count in counts.items():
        table.add_row(name, str(count), *row)
    return table


def block_ranges(blocks: Sequence[int]) -> str:
    """Ascending block numbers as people write them: "1, 3-5, 9"."""
    parts: list[list[int]] = []
    for block in blocks:
        if parts and parts[-1][1] == block - 1:
            parts[-1][1] = block
        else:
            parts.append([block, block])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def decision_table(instance: Instance, plan: Plan) -> Table:
    """Which blocks are decided how: one row per class and distinct decision, in order of the first such block."""
    table = Table(title="Decisions", title_justify="left", title_style="bold")
    for name in ("blocks", "class", "activations", "boundary", "parameters", "states"):
        table.add_column(name, overflow="fold", max_width=30 if name == "blocks" else None)
    found: dict[tuple[str, tuple[str, str, str, str]], list[int]] = {}
    for index, name in enumerate(instance.order):
        found.setdefault((name, describe(instance, plan, index)), []).append(index)
    for (name, row), blocks in found.items():
        table.add_row(block_ranges(blocks), name, *row)
    return table


def speed_lines(instance: Instance, plan: Plan) -> list[str]:
    """Step, tokens, FLOP/s, bound, bottleneck and the best rule, one line each."""
    speed = speed_of(instance, plan)
    prediction = plan.prediction
    assert prediction is not None
    lines = [
        f"step {speed.step_seconds:.3g} s, {format_number(speed.tokens_per_second)} tokens/s, "
        f"{speed.model_flops / 1e12:.3g} TFLOPS (6N), {speed.executed_flops / 1e12:.3g} executed",
        f"{speed.percent_of_bound:.0f} % of the lower bound {prediction.lower_bound_seconds:.3g} s; "
        f"recomputation {prediction.recompute_seconds:.3g} s, optimizer exposed "
        f"{prediction.optimizer_exposed_seconds:.3g} s",
        f"bottleneck: {speed.bottleneck}, busy {100 * speed.bottleneck_share:.0f} % of the step",
    ]
    if prediction.best_rule and prediction.best_rule_seconds:
        gain = prediction.best_rule_seconds / speed.step_seconds if speed.step_seconds else 1.0
        lines.append(
            f"best fixed rule: {prediction.best_rule}, {prediction.best_rule_seconds:.3g} s ({gain:.2f}x this plan)"
        )
    written = next((channel.byte_count for channel in prediction.channels if channel.channel == "nvme_write"), 0)
    if written:
        per_day = written / speed.step_seconds * 86400
        lines.append(f"NVMe writes: {format_bytes(written)} per step, {format_bytes(per_day)} per day")
    return lines


def plan_tables(instance: Instance, plan: Plan) -> tuple[Table, Table]:
    """Memory, then decisions, ready to print with rich."""
    return memory_table(instance, plan), plan_table(instance, plan)
