"""What happened, or is predicted to happen, in one optimizer step. Filled by the simulator and by the monitor alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from lazytrain_ds.planning.schema import (
    SCHEMA_VERSION,
    STRICT,
    ChannelName,
    TierName,
    from_json,
    require,
    require_finite,
    to_json,
)

TaskKind = Literal[
    "forward",
    "backward",
    "recompute",
    "parameter_fetch",
    "parameter_write",
    "gradient",
    "activation_offload",
    "activation_prefetch",
    "state_read",
    "state_write",
    "optimizer",
    "accumulate",
]


@dataclass(frozen=True)
class Task:
    """One occupation of a channel. Times are seconds from the start of the step; `block` is -1 for none."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    kind: TaskKind
    block: int
    channel: ChannelName
    start_seconds: float
    end_seconds: float
    byte_count: int = 0
    micro_step: int = 0

    def __post_init__(self) -> None:
        require_finite(self.start_seconds, "start_seconds", minimum=float("-1e18"))
        require_finite(self.end_seconds, "end_seconds", minimum=float("-1e18"))
        require(self.end_seconds >= self.start_seconds, "end_seconds", "must not be before start_seconds")

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class MemorySample:
    """Bytes in use in a tier from `at_seconds` on, until the tier's next sample."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    tier: TierName
    at_seconds: float
    byte_count: int


@dataclass(frozen=True)
class Stall:
    """Seconds that compute waited for a channel."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    channel: ChannelName
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """One optimizer step of one rank (`step` counts from 1; predicted timelines have step 0)."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    tasks: tuple[Task, ...]
    memory: tuple[MemorySample, ...]
    stalls: tuple[Stall, ...]
    step_seconds: float
    rank: int = 0
    step: int = 0
    source: Literal["simulated", "measured"] = "simulated"
    schema_version: int = SCHEMA_VERSION

    def peak_bytes(self, tier: TierName) -> int:
        """Largest number of bytes in `tier` over the step."""
        return max((sample.byte_count for sample in self.memory if sample.tier == tier), default=0)

    def channel_bytes(self, channel: ChannelName) -> int:
        """Bytes that crossed `channel`."""
        return sum(task.byte_count for task in self.tasks if task.channel == channel)

    def busy_seconds(self, channel: ChannelName) -> float:
        """Seconds during which `channel` was occupied."""
        return sum(task.seconds for task in self.tasks if task.channel == channel)

    def stall_seconds(self, channel: ChannelName | None = None) -> float:
        """Seconds compute waited for `channel` (None: for any)."""
        return sum(stall.seconds for stall in self.stalls if channel in (None, stall.channel))

    def to_json(self) -> str:
        """JSON text; `Timeline.from_json` reads it back equal."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Timeline:
        """Read and validate; SchemaError names field and reason."""
        return from_json(cls, text)
