"""Machines by name, from data sheets: presets.json gives every figure with its source."""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib import resources
from typing import Any

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.hardware.spec import HardwareSpec
from lazytrain_ds.planning.instance import Channel

# Of the peak memory bandwidth on a data sheet, what streaming kernels reach.
REACHABLE_BANDWIDTH = 0.85


@cache
def _table() -> dict[str, Any]:
    text = resources.files("lazytrain_ds.hardware").joinpath("presets.json").read_text()
    table: dict[str, Any] = json.loads(text)
    return table


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows."""
    return tuple(_table()["devices"])


def preset_sources(name: str) -> dict[str, tuple[Any, str]]:
    """(value, where it is from) of every figure of a preset, host and SSD defaults included."""
    entry = {**_table()["devices"][_known(name)], **_table()["host"]}
    return {key: (value["value"], value["source"]) for key, value in entry.items() if isinstance(value, dict)}


def preset(name: str, *, host_memory_bytes: int, nvme_bytes: int = 0, cores: int = 1) -> HardwareSpec:
    """A data-sheet machine with this much host memory and SSD space. ConfigError names the nearest preset for a
    typo.
    """
    known = _known(name)
    value = {key: entry[0] for key, entry in preset_sources(known).items()}
    latency, nvme_latency = value["transfer_latency_seconds"], value["nvme_latency_seconds"]
    return HardwareSpec(
        name=_table()["devices"][known]["name"],
        kind="cuda",
        device_memory_bytes=value["device_memory_bytes"],
        flops_bf16=value["dense_bf16_flops"] * value["sustained_share"],
        flops_fp32=value["dense_fp32_flops"] * value["sustained_share"],
        device_bytes_per_second=value["device_bytes_per_second"] * REACHABLE_BANDWIDTH,
        h2d=Channel("h2d", value["link_bytes_per_second"], latency),
        d2h=Channel("d2h", value["link_bytes_per_second"], latency),
        nvme_read=Channel("nvme_read", value["nvme_read_bytes_per_second"], nvme_latency),
        nvme_write=Channel("nvme_write", value["nvme_write_bytes_per_second"], nvme_latency),
        host_memory_bytes=host_memory_bytes,
        host_bytes_per_second=value["host_bytes_per_second"],
        nvme_bytes=nvme_bytes,
        context_bytes=value["context_bytes"],
        cores=cores,
    )


def _known(name: str) -> str:
    names = preset_names()
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in names:
        return wanted
    near = [known for known in names if known.startswith(wanted) or known.endswith(wanted)]
    near += difflib.get_close_matches(wanted, names, n=1, cutoff=0.3)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    raise ConfigError(f'hardware: no preset "{name}"{hint} (known: {", ".join(names)})')
