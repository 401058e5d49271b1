"""A plan explained: where the step goes, what binds, why each block is where it is, what one more GB would buy."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.table import Table

from lazytrain_ds.errors import format_bytes
from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.explain import BlockReason, Explanation, WhatIf
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import BlockPlan, Plan
from lazytrain_ds.planning.simulator import Simulator
from lazytrain_ds.planning.timeline import Timeline
from lazytrain_ds.report.run_directory import Source
from lazytrain_ds.report.screen import table

__all__ = [
    "binding_lines",
    "block_lines",
    "block_table",
    "channel_words",
    "headline",
    "measured_line",
    "reason_lines",
    "seconds_words",
    "step_table",
    "what_if_lines",
]

CHANNEL_WORDS = {
    "compute": "compute",
    "h2d": "copies to the device",
    "d2h": "copies from the device",
    "nvme_read": "reads from NVMe",
    "nvme_write": "writes to NVMe",
    "host": "the optimizer on the host",
}
# The planner's wishes as the end of a question "Why not ...?".
_WISH_WORDS = {
    "saved tensors on the device": "keep its saved tensors on the device",
    "boundary on the device": "keep its input on the device",
    "parameters resident": "keep its parameters on the device",
    "states on the device": "keep its optimizer states on the device",
}
_NEARLY_FULL = 0.97
_BUSY = 0.85


def channel_words(channel: str) -> str:
    """A channel as people say it."""
    return CHANNEL_WORDS.get(channel, channel)


def seconds_words(seconds: float) -> str:
    """A duration in three figures with a fitting unit ("1.25 s", "340 ms")."""
    for limit, factor, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs")):
        if abs(seconds) >= limit:
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError("unreachable")


def headline(source: Source) -> str:
    """Model, batch and who made the plan, in one line."""
    from lazytrain_ds.report.tables import format_count

    plan, instance = source.plan, source.instance
    return (
        f"{instance.name}: {format_count(instance.parameter_count)} parameters, {plan.block_count} blocks, micro-batch "
        f"{plan.micro_batch} x {plan.rounds}, {instance.sequence_length} tokens, plan by {plan.origin or 'file'}"
    )


def measured_line(source: Source) -> str:
    """The measured step beside the predicted one, for a run; otherwise that nothing was measured."""
    predicted = source.plan.prediction
    assert predicted is not None
    seconds = [record.step_seconds for record in source.records] or [t.step_seconds for t in source.timelines]
    if not seconds:
        return f"predicted step {seconds_words(predicted.step_seconds)}; nothing measured (this is a plan, not a run)"
    measured = median(seconds)
    off = measured / predicted.step_seconds - 1 if predicted.step_seconds else 0.0
    direction = "longer" if off >= 0 else "shorter"
    return (
        f"predicted step {seconds_words(predicted.step_seconds)}, measured {seconds_words(measured)} "
        f"({abs(100 * off):.0f} % {direction} than predicted)"
    )


def step_table(explanation: Explanation) -> Table:
    """Where the predicted step goes; the parts add up to it."""
    parts = explanation.objective
    made = table("Where the predicted step goes", "part", "seconds", "share")
    rows = [("compute", parts.compute_seconds), ("recomputation", parts.recompute_seconds)]
    if parts.device_step_seconds:
        rows.append(("optimizer on the device", parts.device_step_seconds))
    rows += [(f"waiting for {channel_words(name)}", seconds) for name, seconds in parts.exposed_seconds if seconds > 0]
    for name, seconds in rows:
        share = 100 * seconds / parts.step_seconds if parts.step_seconds else 0.0
        made.add_row(name, f"{seconds:.4g}", f"{share:.1f} %")
    made.add_section()
    made.add_row("step", f"{parts.step_seconds:.4g}", "100.0 %")
    return made


def binding_lines(source: Source) -> list[str]:
    """What keeps the step from being shorter, in sentences: full tiers, busy channels, waits by block."""
    plan, instance, prediction = source.plan, source.instance, source.plan.prediction
    assert prediction is not None
    lines: list[str] = []
    for tier in instance.tiers:
        peak, have = prediction.peak_bytes(tier.name), tier.usable_bytes
        if have and peak >= _NEARLY_FULL * have:
            lines.append(
                f"{tier.name} memory is full: {format_bytes(peak)} of {format_bytes(have)} at its peak, so that more "
                "there would change the plan"
            )
    for channel in prediction.channels:
        share = channel.busy_seconds / prediction.step_seconds if prediction.step_seconds else 0.0
        if share >= _BUSY:
            what = "compute itself" if channel.channel == "compute" else channel_words(channel.channel)
            lines.append(f"{what} binds: busy {100 * share:.0f} % of the step")
    waits = Simulator(instance).waits(plan)
    for seconds, block in waits[:3]:
        if seconds >= 0.01 * prediction.step_seconds:
            lines.append(f"block {block} ({instance.order[block]}) makes compute wait {seconds_words(seconds)} a step")
    if source.records:
        last = source.records[-1]
        waits_for = sorted(last.stall_seconds.items(), key=lambda item: -item[1])
        parts = [f"{channel_words(name)} {seconds_words(seconds)}" for name, seconds in waits_for if seconds > 0]
        lines.append(
            f"measured up to step {last.step}: compute waits {100 * last.stall_share:.0f} % of the step"
            + (f" ({', '.join(parts)})" if parts else "")
        )
    lines.append(
        f"no plan can be shorter than {seconds_words(prediction.lower_bound_seconds)}: "
        f"this one is at {prediction.percent_of_bound:.0f} % of that bound"
    )
    return lines


def _memory(tier: str) -> str:
    return "NVMe" if tier == "nvme" else f"{tier} memory"


def _places(instance: Instance, plan: Plan, block: BlockPlan, index: int) -> Iterator[str]:
    """One clause per decision about a block."""
    choice = instance.costs(index, plan.micro_batch).choice(block.choice)
    where = f" in {_memory(block.saved_tier)}" if choice.offloadable_bytes else ""
    if choice.kind == "keep":
        yield f"keeps all its activations{where if block.saved_tier != 'device' else ''}"
    elif choice.kind == "selective":
        yield f"keeps {choice.name}{where} and recomputes the rest"
    else:
        yield "is recomputed in backward"
    if block.boundary == "dropped":
        start = plan.segment_start(index)
        yield f"its input is dropped and re-made from block {start}"
    elif choice.needs_input:
        yield f"its input waits in {_memory(block.boundary)}"
    if block.resident:
        yield "its parameters stay on the device"
    else:
        kept = " and stay until its backward" if block.keep_parameters else ""
        noun = "block" if block.parameter_lead == 1 else "blocks"
        home = _memory(block.parameter_tier)
        yield f"its parameters come from {home}{kept}, fetched {block.parameter_lead} {noun} ahead"
    if instance.block_class(index).trainable_count:
        group = block.optimizer
        yield f"its {group.precision} optimizer states are in {_memory(group.tier)}, updated on the {group.step_device}"


def reason_lines(instance: Instance, plan: Plan, reason: BlockReason) -> list[str]:
    """A run of equal blocks in sentences: what was decided, then per cheaper alternative what stands against it."""
    one = reason.first == reason.last
    name = instance.order[reason.first]
    who = f"Block {reason.first} ({name})" if one else f"Blocks {reason.first} to {reason.last} ({name})"
    clauses = list(_places(instance, plan, plan.blocks[reason.first], reason.first))
    first = clauses[0] if one else "each " + clauses[0]
    lines = [f"{who}: {'; '.join([first, *clauses[1:]])}."]
    lines += [f"  Why not {_WISH_WORDS.get(wish, wish)}? {why[0].upper()}{why[1:]}." for wish, why in reason.hindrances]
    return lines


def what_if_lines(instance: Instance, plan: Plan, answers: tuple[WhatIf, ...]) -> list[str]:
    """What one more GB per tier and a faster link would buy, in sentences."""
    lines = []
    assert plan.prediction is not None
    now = plan.prediction.step_seconds
    for answer in answers:
        if answer.saved_seconds > 0.001 * now:
            share = 100 * answer.saved_seconds / now
            lines.append(
                f"{answer.change} would shorten the step by {seconds_words(answer.saved_seconds)} ({share:.1f} %), "
                f"to {seconds_words(answer.step_seconds)}"
            )
        else:
            lines.append(f"{answer.change} would buy nothing")
    return lines


def block_table(source: Source, block: int) -> Table:
    """Bytes and seconds of one block, and where each thing lives."""
    plan, instance = source.plan, source.instance
    decided, numbers = plan.blocks[block], Costs(instance, plan.micro_batch)
    block_class, costs = instance.block_class(block), instance.costs(block, plan.micro_batch)
    choice = costs.choice(decided.choice)
    states = numbers.group(block, decided.optimizer)[1]
    made = table(f"Block {block} ({block_class.name})", "what", "where", "bytes", left=2)
    made.add_row("parameters", "device" if decided.resident else decided.parameter_tier,
                 format_bytes(block_class.parameter_bytes))  # fmt: skip
    if block_class.trainable_count:
        made.add_row("gradient, per micro-step", "device, then host", format_bytes(block_class.gradient_bytes))
        made.add_row(f"optimizer states ({decided.optimizer.precision})", decided.optimizer.tier, format_bytes(states))
    if choice.needs_input or decided.boundary == "dropped":
        made.add_row("input (boundary)", decided.boundary, format_bytes(costs.boundary_bytes))
    kept = choice.kept_bytes - choice.offloadable_bytes
    if kept or not choice.kept_bytes:
        made.add_row(f"saved tensors ({choice.name})", "device", format_bytes(kept))
    if choice.offloadable_bytes:
        made.add_row(f"saved tensors ({choice.name})", decided.saved_tier, format_bytes(choice.offloadable_bytes))
    made.add_row("while its forward runs", "device", format_bytes(costs.transient_forward_bytes))
    made.add_row("while its backward runs", "device", format_bytes(costs.transient_backward_bytes))
    return made


def block_lines(source: Source, block: int, timeline: Timeline) -> list[str]:
    """When one block is used in the first micro-step of `timeline`, when its parameters come, and how long it waits."""
    lines = []
    tasks = [task for task in timeline.tasks if task.block == block and task.micro_step == 0]
    for kind, words in (("forward", "its forward runs"), ("backward", "its backward runs")):
        uses = [task for task in tasks if task.kind == kind and task.channel == "compute"]
        if not uses:
            continue
        lines.append(f"{words} from {_span(uses[0].start_seconds, uses[-1].end_seconds)}")
        fetches = [
            task
            for task in tasks
            if task.kind in ("parameter_fetch", "parameter_write")
            and task.channel == "h2d"
            and task.end_seconds <= uses[0].start_seconds + 1e-9
        ]
        if fetches:
            last = fetches[-1]
            early = uses[0].start_seconds - last.end_seconds
            lines.append(
                f"  its parameters arrive from {_span(last.start_seconds, last.end_seconds)}, "
                f"{seconds_words(early)} before they are needed"
            )
    waits = dict((index, seconds) for seconds, index in Simulator(source.instance).waits(source.plan))
    waited = waits.get(block, 0.0)
    lines.append(f"compute waits {seconds_words(waited)} a step for it" if waited else "compute never waits for it")
    return lines


def _span(start: float, end: float) -> str:
    return f"{start:.4g} s to {end:.4g} s"
