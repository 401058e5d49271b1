"""`lazytrain timeline`: predicted over measured, as table, picture and trace. Needs neither torch nor DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.schema import CHANNELS
from lazytrain_ds.report.explanation import headline, measured_line
from lazytrain_ds.report.run_directory import read_source
from lazytrain_ds.report.screen import STDOUT, screen, write_json
from lazytrain_ds.report.timelines import Lane, channel_table, chrome_trace, lanes_of


def run(arguments: Namespace) -> int:
    """Write picture and trace, print the table; 0. ConfigError for a source or step that is not there (status 2)."""
    source = read_source(arguments.source)
    measured = source.timeline(arguments.step)
    lanes = lanes_of(source.instance, source.plan, measured)
    picture, trace = arguments.png, arguments.trace
    written = []
    if picture is None and trace is None and arguments.json != STDOUT:
        trace = "timeline.trace.json"
        if importlib.util.find_spec("matplotlib") is not None:
            picture = "timeline.png"
        else:
            written.append('no picture: that needs pip install "lazytrain-ds[viz]"')
    if trace is not None:
        target = Path(trace).expanduser()
        try:
            target.write_text(json.dumps(chrome_trace(lanes, source.instance)))
        except OSError as error:
            raise ConfigError(f"--trace: cannot write {target}: {error.strerror}") from error
        written.append(f"wrote {target} (open it at ui.perfetto.dev or chrome://tracing)")
    if picture is not None:
        from lazytrain_ds.report.figure import draw

        target = Path(picture).expanduser()
        draw(lanes, source.instance, headline(source), target)
        written.append(f"wrote {target}")
    if write_json(arguments.json, {"source": source.name, "lanes": [summary(lane) for lane in lanes]}):
        return 0
    console = screen()
    console.print(headline(source), style="bold", markup=False)
    console.print(measured_line(source), markup=False)
    console.print(channel_table(lanes))
    for line in written:
        console.print(line, markup=False)
    return 0


def summary(lane: Lane) -> dict[str, Any]:
    """Figures of one lane by channel, with the timeline itself."""
    timeline = lane.timeline
    channels = {
        channel: {
            "bytes": timeline.channel_bytes(channel),
            "busy_seconds": timeline.busy_seconds(channel),
            "stall_seconds": timeline.stall_seconds(channel),
        }
        for channel in CHANNELS
    }
    return {
        "name": lane.name,
        "step_seconds": timeline.step_seconds,
        "device_peak_bytes": timeline.peak_bytes("device"),
        "channels": channels,
        "timeline": asdict(timeline),
    }
