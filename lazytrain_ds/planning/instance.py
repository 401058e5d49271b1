"""The planner's whole input: what the machine can do and what the model needs. Pure data, JSON both ways.

Bytes are bytes, times are seconds, rates are bytes per second. All per-block figures are for ONE micro-batch on one
rank. A block's *boundary* is its input; its *saved tensors* are what autograd keeps inside it, its input excluded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import ConfigDict

from lazytrain_ds.errors import SchemaError
from lazytrain_ds.planning.schema import (
    CHANNELS,
    SCHEMA_VERSION,
    STRICT,
    TIERS,
    TRANSFER_CHANNELS,
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

ChoiceKind = Literal["keep", "selective", "boundary"]
StepMode = Literal["hidden", "serial"]
StepDevice = Literal["device", "host"]


@dataclass(frozen=True)
class Tier:
    """A place for bytes. The planner may use `capacity_bytes - margin_bytes`; an absent tier has capacity 0."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: TierName
    capacity_bytes: int
    margin_bytes: int = 0

    def __post_init__(self) -> None:
        require(self.name in TIERS, "name", f"must be one of {TIERS}, is {self.name!r}")
        require_count(self.capacity_bytes, "capacity_bytes")
        require_count(self.margin_bytes, "margin_bytes")

    @property
    def usable_bytes(self) -> int:
        """What a plan may occupy at its peak."""
        return max(0, self.capacity_bytes - self.margin_bytes)


@dataclass(frozen=True)
class Channel:
    """A queue with a sustained rate (both directions busy) and a fixed cost per transfer."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: ChannelName
    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        require(self.name in CHANNELS, "name", f"must be one of {CHANNELS}, is {self.name!r}")
        require_finite(self.bytes_per_second, "bytes_per_second", exclusive=True)
        require_finite(self.latency_seconds, "latency_seconds")

    def seconds(self, byte_count: float) -> float:
        """Time the channel is busy with one transfer of `byte_count` bytes (0 bytes cost nothing)."""
        return self.latency_seconds + byte_count / self.bytes_per_second if byte_count > 0 else 0.0


@dataclass(frozen=True)
class ActivationChoice:
    """One way to treat the inside of a block: what stays from forward to backward and what that costs.

    `kept_bytes`: unique storages held from forward to backward, the block's input excluded.
    `offloadable_bytes`: the part of `kept_bytes` that may live in host memory or on NVMe instead.
    `recompute_seconds`: compute added to the block's backward. `ops`: for `selective`, the operators whose outputs are
    kept (torch names such as `aten.mm.default`). `needs_input`: whether the block's input must be there in backward.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    kind: ChoiceKind
    kept_bytes: int
    offloadable_bytes: int
    recompute_seconds: float
    recompute_flops: int = 0
    needs_input: bool = True
    ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.name), "name", "must not be empty")
        require_count(self.kept_bytes, "kept_bytes")
        require_count(self.offloadable_bytes, "offloadable_bytes")
        require(
            self.offloadable_bytes <= self.kept_bytes,
            "offloadable_bytes",
            f"{self.offloadable_bytes} exceeds kept_bytes {self.kept_bytes}",
        )
        require_finite(self.recompute_seconds, "recompute_seconds")
        require_count(self.recompute_flops, "recompute_flops")
        if self.kind == "keep":
            require(self.recompute_seconds == 0, "recompute_seconds", "must be 0 for a choice of kind 'keep'")
        if self.kind == "boundary":
            require(self.needs_input, "needs_input", "must be true for a choice of kind 'boundary'")
            require(self.kept_bytes == 0, "kept_bytes", "must be 0 for a choice of kind 'boundary'")


@dataclass(frozen=True)
class BlockCosts:
    """One block class at one micro-batch size.

    `transient_*_bytes`: device bytes in use while the block runs beyond what is kept or saved and beyond its
    parameters. When a choice recomputes, its backward also holds `menu[0].kept_bytes - choice.kept_bytes`.
    The menu starts with the choice of kind `keep`; a block that may be recomputed ends with kind `boundary`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    micro_batch: int
    boundary_bytes: int
    forward_seconds: float
    backward_seconds: float
    forward_flops: int
    transient_forward_bytes: int
    transient_backward_bytes: int
    menu: tuple[ActivationChoice, ...]

    def __post_init__(self) -> None:
        require_count(self.micro_batch, "micro_batch", 1)
        for name in ("boundary_bytes", "forward_flops", "transient_forward_bytes", "transient_backward_bytes"):
            require_count(getattr(self, name), name)
        require_finite(self.forward_seconds, "forward_seconds")
        require_finite(self.backward_seconds, "backward_seconds")
        require(len(self.menu) >= 1, "menu", "needs at least the choice that keeps everything")
        require(self.menu[0].kind == "keep", "menu.0.kind", f"must be 'keep', is {self.menu[0].kind!r}")
        names = [choice.name for choice in self.menu]
        require(len(set(names)) == len(names), "menu", f"choice names repeat: {names}")
        for position, choice in enumerate(self.menu[1:], start=1):
            require(choice.kind != "keep", f"menu.{position}.kind", "only the first choice may be of kind 'keep'")
            if choice.kind == "boundary":
                require(position == len(self.menu) - 1, f"menu.{position}.kind", "'boundary' must come last")

    def choice(self, name: str) -> ActivationChoice:
        """The menu entry called `name`; SchemaError if there is none."""
        for choice in self.menu:
            if choice.name == name:
                return choice
        names = ", ".join(choice.name for choice in self.menu)
        raise SchemaError("choice", f"{name!r} is not on the menu ({names})")

    @property
    def recomputable(self) -> bool:
        """Whether the menu ends with the boundary-only choice."""
        return self.menu[-1].kind == "boundary"


@dataclass(frozen=True)
class BlockClass:
    """Blocks that are alike: same parameters, shapes and costs.

    `parameter_count` counts parameters owned by one block (a tied weight belongs to the first block that has it);
    `parameter_bytes` is one copy of them in the compute dtype, padded as its flat buffer is; `trainable_count` get a
    gradient and a state; `quantizable_count` of those may have 8-bit states. `gradient_bytes` leave the device per
    micro-step (accumulation dtype).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    parameter_count: int
    trainable_count: int
    quantizable_count: int
    parameter_bytes: int
    gradient_bytes: int
    dtype: str
    costs: tuple[BlockCosts, ...]

    def __post_init__(self) -> None:
        require(bool(self.name), "name", "must not be empty")
        for name in ("parameter_count", "trainable_count", "quantizable_count", "parameter_bytes", "gradient_bytes"):
            require_count(getattr(self, name), name)
        require(
            self.quantizable_count <= self.trainable_count <= self.parameter_count,
            "trainable_count",
            "needs quantizable_count <= trainable_count <= parameter_count, has "
            f"{self.quantizable_count}, {self.trainable_count}, {self.parameter_count}",
        )
        require(len(self.costs) >= 1, "costs", "needs at least one micro-batch size")

    def at(self, micro_batch: int) -> BlockCosts:
        """The costs at `micro_batch`; SchemaError if that size was not profiled."""
        for costs in self.costs:
            if costs.micro_batch == micro_batch:
                return costs
        sizes = [costs.micro_batch for costs in self.costs]
        raise SchemaError("costs", f"class {self.name!r} has no costs for micro-batch {micro_batch}, only {sizes}")


@dataclass(frozen=True)
class OptimizerMode:
    """A way to update a sub-group: where the arithmetic runs and how the moments are stored.

    `state_bytes_per_parameter`: fp32 master and moments (12 for fp32, about 6.03 for 8-bit). Parameters of a class
    beyond `quantizable_count` always use the fp32 mode of the same step device.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step_device: StepDevice
    precision: Precision
    seconds_per_parameter: float
    state_bytes_per_parameter: float

    def __post_init__(self) -> None:
        require_finite(self.seconds_per_parameter, "seconds_per_parameter")
        require_finite(self.state_bytes_per_parameter, "state_bytes_per_parameter")


@dataclass(frozen=True)
class PhaseBytes:
    """Extra bytes per tier that a phase needs on top of the steady state's fixed bytes and placement."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    phase: Phase
    device_bytes: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes", "nvme_bytes"):
            require_count(getattr(self, name), name)


@dataclass(frozen=True)
class Allowed:
    """What the user's keys leave open; the defaults allow the whole plan space."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    boundary_tiers: tuple[TierName, ...] = TIERS
    saved_tiers: tuple[TierName, ...] = TIERS
    parameter_tiers: tuple[TierName, ...] = TIERS
    optimizer_tiers: tuple[TierName, ...] = TIERS
    choice_kinds: tuple[ChoiceKind, ...] = ("keep", "selective", "boundary")
    drop_boundaries: bool = True
    longest_segment: int = 8
    longest_lead: int = 4
    step_modes: tuple[StepMode, ...] = ("hidden", "serial")

    def __post_init__(self) -> None:
        for name in (
            "boundary_tiers",
            "saved_tiers",
            "parameter_tiers",
            "optimizer_tiers",
            "choice_kinds",
            "step_modes",
        ):
            require(len(getattr(self, name)) >= 1, name, "must allow at least one value")
        require_count(self.longest_segment, "longest_segment", 1)
        require_count(self.longest_lead, "longest_lead")


@dataclass(frozen=True)
class Instance:
    """Everything a planner may know. `order` lists the class of each block in forward order.

    `borrows` has (block, owner) for a block that also needs the parameters owned by another one (tied weights).
    `accumulation_bytes_per_parameter`: gradient buffer in host memory. `host_accumulate_seconds_per_parameter`: adding
    a micro-step's gradient there. `nvme_write_budget_bytes_per_step`: None is unlimited.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    tiers: tuple[Tier, ...]
    channels: tuple[Channel, ...]
    classes: tuple[BlockClass, ...]
    order: tuple[str, ...]
    optimizer_modes: tuple[OptimizerMode, ...]
    micro_batches: tuple[int, ...]
    global_batch: int
    sequence_length: int
    accumulation_bytes_per_parameter: float
    host_accumulate_seconds_per_parameter: float = 0.0
    fixed_device_bytes: int = 0
    fixed_host_bytes: int = 0
    phases: tuple[PhaseBytes, ...] = ()
    borrows: tuple[tuple[int, int], ...] = ()
    allowed: Allowed = field(default_factory=Allowed)
    nvme_write_budget_bytes_per_step: int | None = None
    world_size: int = 1
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        require(
            self.schema_version == SCHEMA_VERSION,
            "schema_version",
            f"this version reads schema {SCHEMA_VERSION}, the file has {self.schema_version}",
        )
        tier_names = [tier.name for tier in self.tiers]
        require(sorted(tier_names) == sorted(TIERS), "tiers", f"needs exactly {TIERS}, has {tuple(tier_names)}")
        channel_names = [channel.name for channel in self.channels]
        require(len(set(channel_names)) == len(channel_names), "channels", f"names repeat: {channel_names}")
        for transfer in TRANSFER_CHANNELS:
            require(transfer in channel_names, "channels", f"lacks {transfer!r}")
        class_names = [block_class.name for block_class in self.classes]
        require(len(set(class_names)) == len(class_names), "classes", f"names repeat: {class_names}")
        require(len(self.order) >= 1, "order", "needs at least one block")
        for position, name in enumerate(self.order):
            require(name in class_names, f"order.{position}", f"unknown class {name!r}")
        require_count(self.global_batch, "global_batch", 1)
        require_count(self.sequence_length, "sequence_length", 1)
        require_count(self.world_size, "world_size", 1)
        require(len(self.micro_batches) >= 1, "micro_batches", "needs at least one size")
        for position, size in enumerate(self.micro_batches):
            where = f"micro_batches.{position}"
            require_count(size, where, 1)
            share = size * self.world_size
            require(self.global_batch % share == 0, where, f"{share} does not divide global_batch {self.global_batch}")
            for block_class in self.classes:
                sizes = [costs.micro_batch for costs in block_class.costs]
                require(size in sizes, where, f"class {block_class.name!r} has no costs for {size}, only {sizes}")
        modes = [(mode.step_device, mode.precision) for mode in self.optimizer_modes]
        require(len(modes) >= 1, "optimizer_modes", "needs at least one mode")
        require(len(set(modes)) == len(modes), "optimizer_modes", f"modes repeat: {modes}")
        for position, (block, owner) in enumerate(self.borrows):
            for index in (block, owner):
                require(0 <= index < len(self.order), f"borrows.{position}", f"no block {index}")
        require_finite(self.accumulation_bytes_per_parameter, "accumulation_bytes_per_parameter")
        require_finite(self.host_accumulate_seconds_per_parameter, "host_accumulate_seconds_per_parameter")
        require_count(self.fixed_device_bytes, "fixed_device_bytes")
        require_count(self.fixed_host_bytes, "fixed_host_bytes")

    @cached_property
    def _classes_by_name(self) -> dict[str, BlockClass]:
        return {block_class.name: block_class for block_class in self.classes}

    @property
    def block_count(self) -> int:
        """Number of blocks, embedding and head included."""
        return len(self.order)

    def block_class(self, block: int) -> BlockClass:
        """Class of block `block` (position in forward order)."""
        return self._classes_by_name[self.order[block]]

    def costs(self, block: int, micro_batch: int) -> BlockCosts:
        """Costs of block `block` at `micro_batch`."""
        return self.block_class(block).at(micro_batch)

    def tier(self, name: TierName) -> Tier:
        """The tier called `name`."""
        return next(tier for tier in self.tiers if tier.name == name)

    def channel(self, name: ChannelName) -> Channel:
        """The channel called `name`; SchemaError if the instance has none (only compute and host may lack)."""
        for channel in self.channels:
            if channel.name == name:
                return channel
        raise SchemaError("channels", f"lacks {name!r}")

    def optimizer_mode(self, step_device: StepDevice, precision: Precision) -> OptimizerMode | None:
        """The mode for this device and precision, or None where the chosen numerics exclude it."""
        for mode in self.optimizer_modes:
            if mode.step_device == step_device and mode.precision == precision:
                return mode
        return None

    def rounds(self, micro_batch: int) -> int:
        """Micro-batches accumulated per optimizer step on each rank."""
        return self.global_batch // (micro_batch * self.world_size)

    def phase(self, name: Phase) -> PhaseBytes:
        """Extra bytes of a phase (zero where none were given)."""
        return next((phase for phase in self.phases if phase.phase == name), PhaseBytes(name))

    @property
    def parameter_count(self) -> int:
        """All parameters of the model."""
        return sum(self.block_class(block).parameter_count for block in range(self.block_count))

    def to_json(self) -> str:
        """JSON text; `Instance.from_json` reads it back equal."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Instance:
        """Read and validate; SchemaError names field and reason."""
        return from_json(cls, text)


def divisors(count: int, limit: int = 12) -> list[int]:
    """Divisors of `count`, ascending: the micro-batches that keep a global batch. More than `limit`: thinned out."""
    found = [size for size in range(1, count + 1) if count % size == 0]
    if len(found) <= limit:
        return found
    step = (len(found) - 1) / (limit - 1)
    return sorted({found[round(index * step)] for index in range(limit)})
