"""The planner's output: one decision record per block, plus what was predicted for it. Pure data, JSON both ways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import ConfigDict

from lazytrain_ds.errors import PlanError
from lazytrain_ds.planning.instance import Instance, StepDevice, StepMode
from lazytrain_ds.planning.schema import (
    SCHEMA_VERSION,
    STRICT,
    ChannelName,
    Phase,
    Precision,
    TierName,
    from_json,
    require,
    require_count,
    require_finite,
    to_json,
)

BoundaryHome = Literal["device", "host", "nvme", "dropped"]


@dataclass(frozen=True)
class SubGroupPlan:
    """Where a block's optimizer states (fp32 master and moments) live, how they are stored, where the update runs.

    Valid pairs: tier `device` steps on the device; tiers `host` and `nvme` step on the host.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    tier: TierName = "host"
    precision: Precision = "fp32"
    step_device: StepDevice = "host"

    def __post_init__(self) -> None:
        expected = "device" if self.tier == "device" else "host"
        require(self.step_device == expected, "step_device", f"must be {expected!r} for states in tier {self.tier!r}")


@dataclass(frozen=True)
class BlockPlan:
    """All decisions for one block.

    `choice`: name of a menu entry. `boundary`: home of the block's input from forward to backward; `dropped` means it
    is re-made in backward by re-running from the last kept boundary before it (the *segment*). `saved_tier`: home of
    the choice's offloadable saved tensors. `parameter_tier` `device` means resident. `keep_parameters`: stay on the
    device from this block's forward to its backward. `parameter_lead`: the fetch is issued when the block that many
    positions earlier starts. `activation_lead`: the same for what comes back in backward.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    choice: str
    boundary: BoundaryHome = "device"
    saved_tier: TierName = "device"
    parameter_tier: TierName = "host"
    keep_parameters: bool = False
    parameter_lead: int = 1
    activation_lead: int = 1
    optimizer: SubGroupPlan = SubGroupPlan()

    def __post_init__(self) -> None:
        require(bool(self.choice), "choice", "must not be empty")
        require_count(self.parameter_lead, "parameter_lead")
        require_count(self.activation_lead, "activation_lead")

    @property
    def resident(self) -> bool:
        """Whether the parameters stay on the device for the whole run."""
        return self.parameter_tier == "device"


@dataclass(frozen=True)
class PhasePeak:
    """Predicted peak bytes of one tier in one phase."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    phase: Phase
    tier: TierName
    peak_bytes: int


@dataclass(frozen=True)
class ChannelBytes:
    """Bytes that cross a channel per optimizer step, and how long it is busy and stalls compute."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    channel: ChannelName
    byte_count: int
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What the simulator and the bounds say about a plan. Times are seconds per optimizer step."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step_seconds: float
    compute_seconds: float
    recompute_seconds: float
    optimizer_exposed_seconds: float
    peaks: tuple[PhasePeak, ...]
    channels: tuple[ChannelBytes, ...]
    lower_bound_seconds: float
    solver_status: str = ""
    best_rule: str = ""
    best_rule_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("step_seconds", "compute_seconds", "recompute_seconds", "optimizer_exposed_seconds"):
            require_finite(getattr(self, name), name)
        require_finite(self.lower_bound_seconds, "lower_bound_seconds")

    @property
    def gap(self) -> float:
        """(step - bound) / bound; 0 when the bound is met (or is 0)."""
        bound = self.lower_bound_seconds
        return max(0.0, self.step_seconds / bound - 1.0) if bound > 0 else 0.0

    @property
    def percent_of_bound(self) -> float:
        """100 * bound / step: 100 means provably optimal."""
        return 100.0 * self.lower_bound_seconds / self.step_seconds if self.step_seconds > 0 else 100.0

    def peak_bytes(self, tier: TierName, phase: Phase = "step") -> int:
        """Predicted peak of a tier in a phase (0 where none was predicted)."""
        return max((peak.peak_bytes for peak in self.peaks if peak.tier == tier and peak.phase == phase), default=0)


@dataclass(frozen=True)
class Plan:
    """A complete schedule. `instance` is the digest of the Instance it was made for (empty: not bound to one)."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    blocks: tuple[BlockPlan, ...]
    micro_batch: int
    rounds: int
    optimizer_step: StepMode = "serial"
    origin: str = ""
    instance: str = ""
    prediction: Prediction | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        require(
            self.schema_version == SCHEMA_VERSION,
            "schema_version",
            f"this version reads schema {SCHEMA_VERSION}, the file has {self.schema_version}",
        )
        require(len(self.blocks) >= 1, "blocks", "needs at least one block")
        require_count(self.micro_batch, "micro_batch", 1)
        require_count(self.rounds, "rounds", 1)
        require(self.blocks[0].boundary != "dropped", "blocks.0.boundary", "the first block has nothing before it")

    @property
    def block_count(self) -> int:
        """Number of blocks, embedding and head included."""
        return len(self.blocks)

    def segment_start(self, block: int) -> int:
        """First block of the segment that `block` belongs to: the last one at or before it with a kept boundary."""
        start = block
        while self.blocks[start].boundary == "dropped":
            start -= 1
        return start

    def segments(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every segment, single blocks included; stop is exclusive."""
        starts = [index for index, block in enumerate(self.blocks) if block.boundary != "dropped"]
        return tuple(zip(starts, [*starts[1:], self.block_count], strict=True))

    def with_prediction(self, prediction: Prediction) -> Plan:
        """The same plan carrying `prediction`."""
        return replace(self, prediction=prediction)

    def check(self, instance: Instance) -> None:
        """Raise PlanError, naming block and reason, unless this plan is in the plan space of `instance`.

        Memory is not checked here (the simulator does that): only that every decision exists and is allowed.
        """
        allowed = instance.allowed

        def fail(block: int | None, reason: str) -> None:
            where = "plan" if block is None else f"block {block} ({instance.order[block]})"
            raise PlanError(f"{where}: {reason}")

        if self.block_count != instance.block_count:
            fail(None, f"has {self.block_count} blocks, the model has {instance.block_count}")
        if self.micro_batch not in instance.micro_batches:
            fail(None, f"micro-batch {self.micro_batch} is not one of {instance.micro_batches}")
        if self.rounds != instance.rounds(self.micro_batch):
            fail(
                None,
                f"has {self.rounds} rounds, micro-batch {self.micro_batch} needs {instance.rounds(self.micro_batch)}",
            )
        if self.optimizer_step not in allowed.step_modes:
            fail(None, f"optimizer step {self.optimizer_step!r} is not allowed here, only {allowed.step_modes}")
        for index, block in enumerate(self.blocks):
            costs = instance.costs(index, self.micro_batch)
            names = [choice.name for choice in costs.menu]
            if block.choice not in names:
                fail(index, f"choice {block.choice!r} is not on its menu ({', '.join(names)})")
            choice = costs.choice(block.choice)
            if choice.kind not in allowed.choice_kinds and len(costs.menu) > 1:
                fail(index, f"choice {block.choice!r} is of kind {choice.kind!r}, allowed are {allowed.choice_kinds}")
            if block.boundary == "dropped":
                if not allowed.drop_boundaries:
                    fail(index, "its boundary is dropped, which is not allowed here")
                before = instance.costs(index - 1, self.micro_batch).choice(self.blocks[index - 1].choice)
                if choice.kind != "boundary" or before.kind != "boundary":
                    fail(index, "a boundary may be dropped only between blocks that keep their boundary alone")
                if index - self.segment_start(index) + 1 > allowed.longest_segment:
                    fail(index, f"its segment is longer than {allowed.longest_segment}")
            elif choice.needs_input and block.boundary not in allowed.boundary_tiers:
                fail(index, f"boundary in {block.boundary!r}, allowed are {allowed.boundary_tiers}")
            if choice.offloadable_bytes and block.saved_tier not in allowed.saved_tiers:
                fail(index, f"saved tensors in {block.saved_tier!r}, allowed are {allowed.saved_tiers}")
            if not choice.offloadable_bytes and block.saved_tier != "device":
                fail(index, f"choice {block.choice!r} has nothing to offload, but saved_tier is {block.saved_tier!r}")
            if block.parameter_tier not in allowed.parameter_tiers:
                fail(index, f"parameters in {block.parameter_tier!r}, allowed are {allowed.parameter_tiers}")
            if block.parameter_lead > allowed.longest_lead or block.activation_lead > allowed.longest_lead:
                fail(index, f"a lead is longer than {allowed.longest_lead}")
            group = block.optimizer
            if instance.block_class(index).trainable_count:
                if group.tier not in allowed.optimizer_tiers:
                    fail(index, f"optimizer states in {group.tier!r}, allowed are {allowed.optimizer_tiers}")
                if instance.optimizer_mode(group.step_device, group.precision) is None:
                    fail(index, f"no {group.precision} step on the {group.step_device} in these numerics")

    def to_json(self) -> str:
        """JSON text; `Plan.from_json` reads it back equal."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read and validate; SchemaError names field and reason."""
        return from_json(cls, text)
