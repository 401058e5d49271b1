"""The `"device": {"emulate": {...}}` section: a device that a CPU plays, as a machine's figures.

Three ways to say how fast it computes (`compute`):

* `"real"` (the default): as fast as this CPU does;
* a rate such as `"3GFLOPS"`, or a number of seconds that the forward of the largest block takes: blocks take the time
  that the plan expects of them, on a clock; what they compute is still real, so every value is exact;
* a `preset` and a `scale`: a machine from a data sheet with memory, compute, links, SSD and host memory all times
  `scale`, so that they keep their proportions. Every other key of the section replaces the preset's.

`host` is host memory's bandwidth: what optimizer updates and gradient additions take follows from it. Without it they
take what they take here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lazytrain_ds.config import parse_size
from lazytrain_ds.errors import ConfigError
from lazytrain_ds.hardware.presets import preset
from lazytrain_ds.hardware.spec import HardwareSpec
from lazytrain_ds.planning.instance import Channel

__all__ = ["Emulation"]

SECTION = "lazytrain.device.emulate"
LINKS = ("h2d", "d2h")
DISKS = ("nvme_read", "nvme_write")
KEYS = ("memory", *LINKS, *DISKS, "latency", "compute", "host", "preset", "scale", "debug", "seed")
FLOP_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
INSTANT = 1e18  # a rate at which nothing takes time


@dataclass(frozen=True)
class Emulation:
    """The section, read. Bytes, bytes or FLOPs per second, seconds.

    `nvme_read`, `nvme_write`, `host`: None is "as this machine does". `flops_*`: both None is real compute, unless
    `block_seconds` (the forward of the largest block) is given, from which a rate follows once the model is known.
    """

    memory_bytes: int
    h2d: float
    d2h: float
    nvme_read: float | None = None
    nvme_write: float | None = None
    latency_seconds: float = 0.0
    debug: bool = False
    seed: int = 0
    host: float | None = None
    flops_bf16: float | None = None
    flops_fp32: float | None = None
    block_seconds: float | None = None
    device_bytes_per_second: float = INSTANT
    launch_seconds: float = 0.0
    context_bytes: int = 0

    @property
    def timed(self) -> bool:
        """Whether compute takes planned time instead of its own."""
        return self.flops_fp32 is not None or self.block_seconds is not None

    @classmethod
    def parse(cls, section: Mapping[str, Any]) -> Emulation:
        """Read and check the section; ConfigError names the key."""
        for key in section:
            if key not in KEYS:
                raise ConfigError(f'"{SECTION}.{key}" is not a key; there are {", ".join(KEYS)}')
        base = _preset(section)
        for key in ("memory", *LINKS):
            if key not in section and base is None:
                raise ConfigError(f'"{SECTION}" needs {key!r}, for instance "memory": "96MB", or a "preset"')
        values: dict[str, Any] = {} if base is None else dict(vars(base))
        if "memory" in section:
            values["memory_bytes"] = _size(section["memory"], "memory")
        for key in (*LINKS, *DISKS, "host"):
            if key in section:
                values[key] = _rate(section[key], key)
        if "latency" in section:
            values["latency_seconds"] = _number(section["latency"], "latency", "a number of seconds", least=0.0)
        for key, kind in (("debug", bool), ("seed", int)):
            if key in section:
                if type(section[key]) is not kind:
                    raise ConfigError(f'"{SECTION}.{key}": {section[key]!r} is not {_KINDS[kind]}')
                values[key] = section[key]
        if "compute" in section:
            values.update(_compute(section["compute"]))
        return cls(**values)

    def with_block_flops(self, flops: int) -> Emulation:
        """The same with `block_seconds` turned into a rate: the largest block's forward takes `flops` FLOPs."""
        if self.block_seconds is None:
            return self
        rate = max(1, flops) / self.block_seconds
        return replace(self, flops_bf16=rate, flops_fp32=rate, block_seconds=None)

    def apply(self, spec: HardwareSpec) -> HardwareSpec:
        """`spec`, a CPU's, as the machine it plays."""
        latency = self.latency_seconds
        changes: dict[str, Any] = {name: Channel(name, getattr(self, name), latency) for name in LINKS}  # type: ignore[arg-type]
        for name in DISKS:
            if getattr(self, name) is not None:
                changes[name] = Channel(name, getattr(self, name))  # type: ignore[arg-type]
        if self.flops_fp32 is not None and self.flops_bf16 is not None:
            changes.update(
                flops_bf16=self.flops_bf16,
                flops_fp32=self.flops_fp32,
                device_bytes_per_second=self.device_bytes_per_second,
                launch_seconds=self.launch_seconds,
                context_bytes=self.context_bytes,
            )
        if self.host is not None:
            changes.update(host_bytes_per_second=self.host, optimizer=())
        return replace(spec, device_memory_bytes=self.memory_bytes, **changes)


def _preset(section: Mapping[str, Any]) -> Emulation | None:
    if "preset" not in section:
        if "scale" in section:
            raise ConfigError(f'"{SECTION}.scale" needs a "preset" that it scales')
        return None
    if not isinstance(section["preset"], str):
        raise ConfigError(f'"{SECTION}.preset": {section["preset"]!r} is not the name of a machine')
    machine = preset(section["preset"], host_memory_bytes=1)
    scale = _number(section.get("scale", 1.0), "scale", "a number above 0")
    return Emulation(
        memory_bytes=max(1, int(machine.device_memory_bytes * scale)),
        h2d=machine.h2d.bytes_per_second * scale,
        d2h=machine.d2h.bytes_per_second * scale,
        nvme_read=machine.nvme_read.bytes_per_second * scale,
        nvme_write=machine.nvme_write.bytes_per_second * scale,
        latency_seconds=machine.h2d.latency_seconds,
        host=machine.host_bytes_per_second * scale,
        flops_bf16=machine.flops_bf16 * scale,
        flops_fp32=machine.flops_fp32 * scale,
        device_bytes_per_second=machine.device_bytes_per_second * scale,
        launch_seconds=machine.launch_seconds,
        context_bytes=int(machine.context_bytes * scale),
    )


_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number"}


def _size(value: object, key: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f'"{SECTION}.{key}": {value!r} {error}') from None


def _rate(value: object, key: str) -> float:
    """Bytes per second from a number or `"400MB/s"`."""
    text = value[:-2] if isinstance(value, str) and value.endswith("/s") else value
    try:
        return float(parse_size(text))
    except ValueError:
        raise ConfigError(f'"{SECTION}.{key}": {value!r} is not a rate such as "400MB/s"') from None


def _number(value: object, key: str, what: str, least: float | None = None) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not (value > 0 if least is None else value >= least):  # type: ignore[operator]
        raise ConfigError(f'"{SECTION}.{key}": {value!r} is not {what}')
    return float(value)  # type: ignore[arg-type]


def _compute(value: object) -> dict[str, Any]:
    """What replaces the compute figures: nothing timed, a rate, or the seconds of a block."""
    real: dict[str, Any] = {"flops_bf16": None, "flops_fp32": None, "block_seconds": None}
    plain = {"device_bytes_per_second": INSTANT, "launch_seconds": 0.0}
    if value == "real":
        return real
    if not isinstance(value, str):
        what = 'a number of seconds above 0 (of a block\'s forward), "real", or a rate such as "3GFLOPS"'
        return {**real, **plain, "block_seconds": _number(value, "compute", what)}
    text = value.strip().lower().removesuffix("flop/s").removesuffix("flops").strip()
    number = text.rstrip("kmgt")
    try:
        rate = float(number) * FLOP_UNITS[text[len(number) :]]
    except (ValueError, KeyError):
        rate = math.nan
    if text == value.strip().lower() or not (math.isfinite(rate) and rate > 0):
        raise ConfigError(
            f'"{SECTION}.compute": {value!r} is neither "real", a rate such as "3GFLOPS", nor a number: '
            "the seconds that the forward of the largest block takes"
        )
    return {**real, **plain, "flops_bf16": rate, "flops_fp32": rate}
