"""What Instance, Plan and Timeline share: the schema version, names of tiers and channels, checks, JSON both ways."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lazytrain_ds.errors import SchemaError

SCHEMA_VERSION: Final = 1

TierName = Literal["device", "host", "nvme"]
ChannelName = Literal["compute", "h2d", "d2h", "nvme_read", "nvme_write", "host"]
Precision = Literal["fp32", "8bit"]
Phase = Literal["load", "initialize", "step", "save", "resume"]

TIERS: Final[tuple[TierName, ...]] = ("device", "host", "nvme")
CHANNELS: Final[tuple[ChannelName, ...]] = ("compute", "h2d", "d2h", "nvme_read", "nvme_write", "host")
TRANSFER_CHANNELS: Final[tuple[ChannelName, ...]] = ("h2d", "d2h", "nvme_read", "nvme_write")
PHASES: Final[tuple[Phase, ...]] = ("load", "initialize", "step", "save", "resume")

# Every schema dataclass carries this as `__pydantic_config__`: an unknown key in a file is an error, never ignored.
STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

T = TypeVar("T")


def require(condition: bool, field: str, reason: str) -> None:
    """Raise `SchemaError(field, reason)` unless `condition` holds."""
    if not condition:
        raise SchemaError(field, reason)


def require_count(value: int, field: str, minimum: int = 0) -> None:
    """`value` must be an integer of at least `minimum`."""
    require(isinstance(value, int) and not isinstance(value, bool), field, f"must be an integer, is {value!r}")
    require(value >= minimum, field, f"must be at least {minimum}, is {value}")


def require_finite(value: float, field: str, minimum: float = 0.0, *, exclusive: bool = False) -> None:
    """`value` must be finite and at least (with `exclusive`: above) `minimum`."""
    require(isinstance(value, (int, float)) and math.isfinite(value), field, f"must be a finite number, is {value!r}")
    ok = value > minimum if exclusive else value >= minimum
    require(ok, field, f"must be {'above' if exclusive else 'at least'} {minimum}, is {value}")


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(cls: Any) -> TypeAdapter[Any]:
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def to_json(value: object, *, indent: int | None = 2) -> str:
    """JSON text of a schema object; `from_json(type(value), to_json(value)) == value`."""
    return _adapter(type(value)).dump_json(value, indent=indent).decode()


def from_json(cls: type[T], text: str | bytes) -> T:
    """Read a schema object; `SchemaError` names the offending field by its dotted path and says why."""
    try:
        result: T = _adapter(cls).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        where = ".".join(str(part) for part in first["loc"]) or cls.__name__
        if isinstance(cause, SchemaError):
            raise SchemaError(f"{where}.{cause.field}" if first["loc"] else cause.field, cause.reason) from error
        raise SchemaError(where, first["msg"]) from error
    return result


def digest(value: object) -> str:
    """Stable short fingerprint of a schema object (first 16 hex digits of the SHA-256 of its JSON)."""
    return hashlib.sha256(to_json(value, indent=None).encode()).hexdigest()[:16]
