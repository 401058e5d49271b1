"""The timeline as a picture: channels of the predicted step over the measured one, memory with its cap under them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.schema import CHANNELS, TIERS, TierName
from lazytrain_ds.report.timelines import Lane

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

# Okabe and Ito's palette: tells apart for every kind of colour vision.
COLOURS = {
    "forward": "#0072B2",
    "backward": "#D55E00",
    "recompute": "#F0E442",
    "parameter_fetch": "#009E73",
    "parameter_write": "#7FCDBB",
    "gradient": "#CC79A7",
    "activation_offload": "#56B4E9",
    "activation_prefetch": "#88CCEE",
    "state_read": "#999933",
    "state_write": "#DDCC77",
    "optimizer": "#E69F00",
    "accumulate": "#777777",
}
WIDTH_INCHES = 14.0
LANE_INCHES = 0.42
MEMORY_INCHES = 1.9
LABELLED = 60  # at most so many block numbers per channel: more would not be read


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError('the picture needs matplotlib: pip install "lazytrain-ds[viz]", or use --trace') from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "lazytrain", "svg.fonttype": "none"})  # equal pictures, equal files
    from matplotlib import pyplot

    return pyplot


def draw(lanes: Sequence[Lane], instance: Instance, title: str, target: Path) -> None:
    """Write the picture, as SVG where the name says so, else PNG.

    ConfigError without matplotlib, or where the file cannot be written."""
    pyplot = _matplotlib()
    used = [[c for c in CHANNELS if any(t.channel == c for t in lane.timeline.tasks)] for lane in lanes]
    tiers = _tiers(lanes, instance)
    heights = [max(1.2, LANE_INCHES * len(channels) + 0.3) for channels in used] + [MEMORY_INCHES] * len(tiers)
    figure, axes = pyplot.subplots(
        len(heights), 1, sharex=True, squeeze=False, figsize=(WIDTH_INCHES, sum(heights) + 1.6),
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    end = max(lane.timeline.step_seconds for lane in lanes)
    unit, factor = ("s", 1.0) if end >= 2 else ("ms", 1e3)
    for axis, lane, channels in zip(axes[:, 0], lanes, used, strict=False):
        _channels(axis, lane, channels, factor, end)
    for axis, tier in zip(axes[len(lanes) :, 0], tiers, strict=True):
        _memory(axis, lanes, instance, tier, factor)
    axes[0, 0].set_xlim(0, end * factor * 1.005)
    axes[-1, 0].set_xlabel(f"{unit} from the end of the last backward of the step before")
    kinds = [kind for kind in COLOURS if any(t.kind == kind for lane in lanes for t in lane.timeline.tasks)]
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in kinds]
    names = [kind.replace("_", " ") for kind in kinds]
    figure.legend(patches, names, loc="outside lower center", ncols=min(6, len(kinds)), frameon=False, fontsize=11)
    figure.suptitle(title, fontsize=12)
    try:
        if target.suffix == ".svg":
            figure.savefig(target, format="svg", metadata={"Date": None})
        else:
            figure.savefig(target, dpi=110, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _tiers(lanes: Sequence[Lane], instance: Instance) -> list[TierName]:
    """Tiers whose bytes change over the step in some lane; the device always."""
    shown: list[TierName] = []
    for tier in TIERS:
        levels = {s.byte_count for lane in lanes for s in lane.timeline.memory if s.tier == tier}
        if instance.tier(tier).capacity_bytes and (tier == "device" or len(levels) > 2):
            shown.append(tier)
    return shown


def _channels(axis: Axes, lane: Lane, channels: list[str], factor: float, end: float) -> None:
    axis.set_title(f"{lane.name}: {lane.timeline.step_seconds * factor:.4g} {'s' if factor == 1 else 'ms'} a step",
                   loc="left", fontsize=12)  # fmt: skip
    axis.set_yticks(range(len(channels)), channels, fontsize=11)
    axis.set_ylim(len(channels) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    for row, channel in enumerate(channels):
        tasks = sorted((t for t in lane.timeline.tasks if t.channel == channel), key=lambda t: t.start_seconds)
        for kind in COLOURS:
            bars = [(t.start_seconds * factor, t.seconds * factor) for t in tasks if t.kind == kind]
            if bars:
                axis.broken_barh(bars, (row - 0.36, 0.72), facecolors=COLOURS[kind], edgecolor="white", linewidth=0.3)
        wide = [t for t in tasks if t.block >= 0 and t.seconds > 0.014 * end]
        for task in wide if len(wide) <= LABELLED else []:
            middle = (task.start_seconds + task.seconds / 2) * factor
            if middle < end * factor:
                axis.text(middle, row, str(task.block), ha="center", va="center", fontsize=9)


def _memory(axis: Axes, lanes: Sequence[Lane], instance: Instance, tier: TierName, factor: float) -> None:
    cap = instance.tier(tier).usable_bytes
    top = max([cap, *(s.byte_count for lane in lanes for s in lane.timeline.memory if s.tier == tier)])
    scale, unit = next(((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if top >= s), (1.0, "B"))
    for lane, colour, style in zip(lanes, ("#0072B2", "#D55E00"), ("-", "-"), strict=False):
        samples = [s for s in lane.timeline.memory if s.tier == tier]
        if not samples:
            continue
        times = [max(0.0, s.at_seconds) * factor for s in samples]
        levels = [s.byte_count / scale for s in samples]
        axis.step([*times, lane.timeline.step_seconds * factor], [*levels, levels[-1]], where="post", color=colour,
                  linestyle=style, linewidth=1.4, label=lane.name)  # fmt: skip
    axis.axhline(cap / scale, color="black", linestyle="--", linewidth=1.2, label=f"cap {cap / scale:.3g} {unit}")
    axis.set_ylim(0, top / scale * 1.12)
    axis.set_ylabel(f"{tier} {unit}", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize=10, framealpha=0.9)
