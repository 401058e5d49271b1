"""Two plans or runs beside each other: time, memory, bytes, and where their decisions differ."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from rich.table import Table

from lazytrain_ds.errors import format_bytes
from lazytrain_ds.planning.schema import CHANNELS, TIERS
from lazytrain_ds.report.explanation import seconds_words
from lazytrain_ds.report.run_directory import Source
from lazytrain_ds.report.screen import table
from lazytrain_ds.report.tables import block_ranges, describe, format_number

__all__ = [
    "Difference",
    "Figure",
    "difference_table",
    "differences",
    "figure_table",
    "figures",
    "numerics_line",
]


@dataclass(frozen=True)
class Figure:
    """One comparable number; `unit` is "s", "bytes", "tokens/s", "samples/s" or "%". None: not known for that side."""

    name: str
    unit: str
    first: float | None
    second: float | None


@dataclass(frozen=True)
class Difference:
    """Blocks of one class that are decided differently in the same way, each side in words."""

    blocks: tuple[int, ...]
    class_name: str
    first: str
    second: str


def _side(source: Source) -> dict[tuple[str, str], float | None]:
    prediction = source.plan.prediction
    assert prediction is not None
    instance = source.instance
    samples = instance.global_batch
    tokens = samples * instance.sequence_length / instance.world_size
    found: dict[tuple[str, str], float | None] = {
        ("predicted step", "s"): prediction.step_seconds,
        ("predicted tokens per second", "tokens/s"): tokens / prediction.step_seconds,
        ("predicted samples per second", "samples/s"): samples / prediction.step_seconds,
        ("predicted recomputation", "s"): prediction.recompute_seconds,
        ("lower bound", "s"): prediction.lower_bound_seconds,
        ("percent of bound", "%"): prediction.percent_of_bound,
    }
    for tier in TIERS:
        found[f"predicted {tier} peak", "bytes"] = prediction.peak_bytes(tier)
    for channel in CHANNELS[1:]:
        carried = next((c for c in prediction.channels if c.channel == channel), None)
        if channel != "host":
            found[f"predicted bytes, {channel}", "bytes"] = carried.byte_count if carried else 0
        found[f"predicted wait for {channel}", "s"] = carried.exposed_seconds if carried else 0.0
    records = source.records
    steps = [record.step_seconds for record in records] or [timeline.step_seconds for timeline in source.timelines]
    found["measured step", "s"] = median(steps) if steps else None
    rates = [record.samples_per_second for record in records]
    found["measured samples per second", "samples/s"] = median(rates) if rates else None
    found["measured device peak", "bytes"] = max((r.device_bytes for r in records), default=None)
    found["measured process memory", "bytes"] = max((r.host_bytes for r in records), default=None)
    for channel in CHANNELS[1:]:
        waits = [r.stall_seconds.get(channel, 0.0) for r in records]
        found[f"measured wait for {channel}", "s"] = median(waits) if waits else None
    return found


def figures(first: Source, second: Source) -> list[Figure]:
    """Every figure that is known for a side and not 0 for both."""
    one, other = _side(first), _side(second)
    return [
        Figure(name, unit, one[name, unit], other[name, unit])
        for name, unit in one
        if one[name, unit] or other[name, unit]
    ]


def _words(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "s":
        return seconds_words(value)
    return f"{value:.3g} {unit}" if unit == "%" else format_number(value)


def figure_table(first: Source, second: Source) -> Table:
    """All figures, with the second side as a share of the first."""
    made = table("A and B", "", "A", "B", "B / A")
    for item in figures(first, second):
        share = item.second / item.first if item.first and item.second is not None else None
        made.add_row(
            item.name, _words(item.first, item.unit), _words(item.second, item.unit), f"{share:.3g}" if share else "-"
        )
    return made


def numerics_line(first: Source, second: Source) -> str:
    """Whether both compute the same numbers: plans never change results, these settings do."""
    one, other = first.plan, second.plan
    unlike = []
    if (one.micro_batch, one.rounds) != (other.micro_batch, other.rounds):
        unlike.append(
            f"micro-batch and rounds ({one.micro_batch} x {one.rounds}, {other.micro_batch} x {other.rounds})"
        )
    if one.block_count == other.block_count:
        pairs = list(zip(one.blocks, other.blocks, strict=True))
        for what in ("precision", "step_device"):
            count = sum(getattr(a.optimizer, what) != getattr(b.optimizer, what) for a, b in pairs)
            if count:
                words = {"precision": "state precision", "step_device": "device of the optimizer step"}[what]
                unlike.append(f"{words} of {count} blocks")
    else:
        unlike.append(f"the model ({one.block_count} blocks, {other.block_count} blocks)")
    if first.instance.sequence_length != second.instance.sequence_length:
        unlike.append(f"sequence length ({first.instance.sequence_length}, {second.instance.sequence_length})")
    if not unlike:
        return "same numerics: both train bit-identically"
    return f"not the same numbers: they differ in {', '.join(unlike)}"


def differences(first: Source, second: Source) -> list[Difference]:
    """What is decided differently, by class and pair of decisions; empty where the models differ in block count."""
    one, other = first.plan, second.plan
    if one.block_count != other.block_count:
        return []
    found: dict[tuple[str, str, str], list[int]] = {}
    for index in range(one.block_count):
        key = (first.instance.order[index], _decision(first, index), _decision(second, index))
        if key[1] != key[2]:
            found.setdefault(key, []).append(index)
    return [Difference(tuple(blocks), *key) for key, blocks in found.items()]


def _decision(source: Source, index: int) -> str:
    activations, boundary, parameters, states = describe(source.instance, source.plan, index)
    block = source.plan.blocks[index]
    parts = [f"activations {activations}"]
    if boundary != "-":
        parts.append(f"boundary {boundary}")
    if block.saved_tier != "device" or boundary in ("host", "nvme"):
        parts[-1] += f", back {block.activation_lead} ahead"
    lead = "" if block.resident else f", lead {block.parameter_lead}"
    parts.append(f"parameters {parameters}{lead}")
    if states != "-":
        parts.append(f"states {states}")
    return "; ".join(parts)


def difference_table(found: list[Difference]) -> Table:
    """Where the plans differ, side by side."""
    made = table("Where they differ", "blocks", "class", "A", "B", left=4)
    for item in found:
        made.add_row(block_ranges(item.blocks), item.class_name, item.first, item.second)
    return made
