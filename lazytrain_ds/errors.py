"""One error tree. Every message says what is wrong, what is needed and what is there, and what to do about it."""

from __future__ import annotations

import math

__all__ = [
    "ConfigError",
    "DeviceMemoryError",
    "HostMemoryError",
    "InfeasibleError",
    "LazyTrainError",
    "OptimizerError",
    "PlanError",
    "SchemaError",
    "SwapError",
    "UnsupportedError",
    "WorkerError",
    "format_bytes",
    "format_bytes_up",
]


def format_bytes(count: float) -> str:
    """`count` bytes as people read it: decimal units, three significant figures (`"1.5 GB"`)."""
    sign = "-" if count < 0 else ""
    value = abs(float(count))
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{sign}{value:.0f} {unit}" if unit == "B" else f"{sign}{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def format_bytes_up(count: float) -> str:
    """As `format_bytes`, rounded up: for advice that has to be enough when it is typed in (`"226 MB"` for 225.1 MB)."""
    unit = 1
    while count / unit >= 1000 and unit < 10**12:
        unit *= 1000
    step = unit / 100 if count < 10 * unit else unit / 10 if count < 100 * unit else unit
    return format_bytes(math.ceil(count / step) * step if unit > 1 else math.ceil(count))


class LazyTrainError(Exception):
    """Base of everything LazyTrain raises on purpose."""


class ConfigError(LazyTrainError, ValueError):
    """A value in the user's config is wrong. The message names the key, the value and a valid one."""


class UnsupportedError(LazyTrainError):
    """The combination cannot work (DeepSpeed version, excluded feature, model); says which and what to change."""


class SchemaError(LazyTrainError, ValueError):
    """An Instance, Plan or Timeline is malformed. `field` is the dotted path of the offending field."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: {reason}")


class PlanError(LazyTrainError):
    """A plan does not belong to this run (other model, other instance) or breaks a rule of the plan space."""


class InfeasibleError(LazyTrainError):
    """No plan fits. `shortages` has one entry per tier that is short: (tier, need_bytes, have_bytes)."""

    def __init__(self, message: str, shortages: tuple[tuple[str, int, int], ...] = ()) -> None:
        self.shortages = shortages
        super().__init__(message)


class DeviceMemoryError(LazyTrainError, RuntimeError):
    """The device cap was reached; need and have are in the message."""


class HostMemoryError(LazyTrainError, RuntimeError):
    """Host memory would exceed its cap; need and have are in the message."""


class SwapError(LazyTrainError, OSError):
    """The NVMe store failed: path, errno, bytes wanted and done, and free space are in the message."""


class OptimizerError(LazyTrainError, RuntimeError):
    """The optimizer refuses to go on (for instance three non-finite gradients in a row)."""


class WorkerError(LazyTrainError, RuntimeError):
    """A background thread failed; the original exception is the `__cause__`."""
