"""Analytic instances for planner tests and benchmarks: shapes and machines in, Instance out. No torch, no weights.

Bytes and FLOPs of a decoder block are counted from its shapes (bf16, flash attention, gated MLP); the assumed rates of
each machine are in MACHINES. Real runs use profiled numbers instead: these serve comparisons, not predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lazytrain_ds.planning.instance import (
    ActivationChoice,
    Allowed,
    BlockClass,
    BlockCosts,
    Channel,
    Instance,
    OptimizerMode,
    PhaseBytes,
    Tier,
)

GB = 10**9
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A decoder: `experts` 0 is dense; `active` experts per token of `intermediate` each."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: int = 0
    active: int = 1
    head_size: int = 0

    @property
    def attention_parameters(self) -> int:
        size = self.head_size or self.hidden // self.heads
        return self.hidden * size * (2 * self.heads + 2 * self.kv_heads)

    @property
    def block_parameters(self) -> int:
        experts = max(1, self.experts)
        return self.attention_parameters + 3 * self.hidden * self.intermediate * experts + 2 * self.hidden

    @property
    def active_parameters(self) -> int:
        used = self.active if self.experts else 1
        return self.attention_parameters + 3 * self.hidden * self.intermediate * used


@dataclass(frozen=True)
class Machine:
    """Assumed sustained rates: FLOP/s, memory and link bytes/s, SSD, host optimizer seconds per parameter.

    The H800's FLOP/s are set so that the published MegaTrain executor's costs reproduce its published 1,075.8 tokens/s.
    """

    name: str
    flops: float
    device_memory_rate: float
    device_bytes: int
    link: float
    host_bytes: int
    nvme_bytes: int = 2000 * GB
    nvme_read: float = 6.0e9
    nvme_write: float = 4.0e9
    host_seconds_fp32: float = 2.0e-10
    host_seconds_8bit: float = 1.0e-10
    device_step: bool = True


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.5B", 24, 896, 4864, 14, 2, 151936),
        Shape("1.5B", 28, 1536, 8960, 12, 2, 151936),
        Shape("3B", 36, 2048, 11008, 16, 2, 151936),
        Shape("7B", 28, 3584, 18944, 28, 4, 152064),
        Shape("8B", 32, 4096, 14336, 32, 8, 128256),
        Shape("14B", 48, 5120, 13824, 40, 8, 152064),
        Shape("27B", 64, 5120, 17408, 24, 4, 151936, head_size=256),
        Shape("32B", 64, 5120, 27648, 40, 8, 152064),
        Shape("70B", 80, 8192, 28672, 64, 8, 128256),
        Shape("120B", 128, 8192, 28672, 64, 8, 128256),
        Shape("moe-30B", 48, 2048, 768, 32, 4, 151936, 128, 8, 128),
        Shape("moe-47B", 32, 4096, 14336, 32, 8, 32000, 8, 2),
        Shape("moe-120B", 36, 2880, 2880, 64, 8, 201088, 128, 4, 64),
    )
}

MACHINES = {
    machine.name: machine
    for machine in (
        Machine("rtx3090", 60e12, 0.8e12, 24 * GIB, 24e9, 256 * GB),
        Machine("rtx4090", 140e12, 0.9e12, 24 * GIB, 24e9, 256 * GB),
        Machine("a100", 220e12, 1.8e12, 80 * GIB, 24e9, 1000 * GB),
        Machine("h100", 450e12, 2.8e12, 80 * GIB, 50e9, 1000 * GB),
        Machine("h800", 270e12, 2.8e12, 70 * GB, 12e9, 2000 * GB, nvme_read=2.83e9, nvme_write=3.35e9),
        Machine("h200", 600e12, 4.0e12, 141 * GB, 50e9, 2000 * GB),
        Machine("cpu", 1.5e12, 0.1e12, 64 * GB, 20e9, 128 * GB, device_step=False),
    )
}


def block_class(shape: Shape, machine: Machine, micro_batches: tuple[int, ...], sequence: int) -> BlockClass:
    """The decoder block of `shape`."""
    parameters = shape.block_parameters
    costs = []
    for micro_batch in micro_batches:
        tokens = micro_batch * sequence
        size = shape.head_size or shape.hidden // shape.heads
        width, kv_width = shape.heads * size, shape.kv_heads * size
        used = shape.active if shape.experts else 1
        inner = shape.intermediate * used
        flops = 2 * shape.active_parameters * tokens + 2 * tokens * sequence * width
        attention = 2 * (2 * width + 2 * kv_width) * tokens
        keep = attention + 2 * (3 * shape.hidden + 4 * inner) * tokens
        selective = attention + 2 * (2 * inner + shape.hidden) * tokens
        forward = flops / machine.flops
        cheap = 2.0 * (keep - selective) / machine.device_memory_rate
        costs.append(
            BlockCosts(
                micro_batch=micro_batch,
                boundary_bytes=2 * shape.hidden * tokens,
                forward_seconds=forward,
                backward_seconds=2 * forward,
                forward_flops=flops,
                transient_forward_bytes=2 * (2 * inner + 2 * shape.hidden) * tokens,
                transient_backward_bytes=2 * (2 * inner + 3 * shape.hidden) * tokens,
                menu=(
                    ActivationChoice("keep", "keep", keep, keep, 0.0),
                    ActivationChoice(
                        "matmul", "selective", selective, selective, min(cheap, forward), 0, True, ("aten.mm.default",)
                    ),
                    ActivationChoice("boundary", "boundary", 0, 0, forward, flops),
                ),
            )
        )
    return BlockClass(
        "block",
        parameters,
        parameters,
        parameters - 2 * shape.hidden,
        2 * parameters,
        2 * parameters,
        "bf16",
        tuple(costs),
    )


def end_class(
    name: str, shape: Shape, machine: Machine, micro_batches: tuple[int, ...], sequence: int, chunk: int = 4096
) -> BlockClass:
    """The embedding (a lookup) or the head (norm, logits in chunks of `chunk` tokens, loss)."""
    parameters = shape.vocabulary * shape.hidden
    costs = []
    for micro_batch in micro_batches:
        tokens = micro_batch * sequence
        if name == "embedding":
            seconds = 4.0 * shape.hidden * tokens / machine.device_memory_rate
            costs.append(
                BlockCosts(
                    micro_batch, 8 * tokens, seconds, seconds, 0, 0, 0, (ActivationChoice("keep", "keep", 0, 0, 0.0),)
                )
            )
            continue
        flops = 2 * parameters * tokens
        logits = min(tokens, chunk) * shape.vocabulary * 6
        kept = 2 * shape.hidden * tokens
        costs.append(
            BlockCosts(
                micro_batch,
                2 * shape.hidden * tokens,
                flops / machine.flops,
                2 * flops / machine.flops,
                flops,
                logits,
                logits,
                (ActivationChoice("keep", "keep", kept, 0, 0.0),),
            )
        )
    return BlockClass(name, parameters, parameters, 0, 2 * parameters, 2 * parameters, "bf16", tuple(costs))


def instance(
    shape: Shape | str,
    machine: Machine | str,
    *,
    sequence: int = 2048,
    micro_batches: tuple[int, ...] = (4,),
    rounds_of_first: int = 8,
    global_batch: int | None = None,
    precisions: tuple[str, ...] = ("fp32",),
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    nvme_bytes: int | None = None,
    link: float | None = None,
    device_step: bool | None = None,
    allowed: Allowed | None = None,
    accumulation_bytes: float = 2.0,
    name: str = "",
) -> Instance:
    """An Instance: by default a global batch of `rounds_of_first` times the first micro-batch."""
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    machine = MACHINES[machine] if isinstance(machine, str) else machine
    batch = global_batch or rounds_of_first * micro_batches[0]
    rate = link or machine.link
    modes = [
        OptimizerMode("host", "fp32", machine.host_seconds_fp32, 12.0),
        OptimizerMode("host", "8bit", machine.host_seconds_8bit, 6.03),
    ]
    if machine.device_step if device_step is None else device_step:
        modes += [
            OptimizerMode("device", "fp32", 30.0 / machine.device_memory_rate, 12.0),
            OptimizerMode("device", "8bit", 16.0 / machine.device_memory_rate, 6.03),
        ]
    return Instance(
        name=name or f"{shape.name}-{machine.name}",
        tiers=(
            Tier("device", machine.device_bytes if device_bytes is None else device_bytes, GIB // 2),
            Tier("host", machine.host_bytes if host_bytes is None else host_bytes, GIB),
            Tier("nvme", machine.nvme_bytes if nvme_bytes is None else nvme_bytes),
        ),
        channels=(
            Channel("h2d", rate, 2e-5),
            Channel("d2h", rate, 2e-5),
            Channel("nvme_read", machine.nvme_read, 1e-4),
            Channel("nvme_write", machine.nvme_write, 1e-4),
        ),
        classes=(
            end_class("embedding", shape, machine, micro_batches, sequence),
            block_class(shape, machine, micro_batches, sequence),
            end_class("head", shape, machine, micro_batches, sequence),
        ),
        order=("embedding", *["block"] * shape.layers, "head"),
        optimizer_modes=tuple(mode for mode in modes if mode.precision in precisions),
        micro_batches=micro_batches,
        global_batch=batch,
        sequence_length=sequence,
        accumulation_bytes_per_parameter=accumulation_bytes,
        host_accumulate_seconds_per_parameter=machine.host_seconds_fp32 / 5,
        fixed_device_bytes=GIB,
        fixed_host_bytes=4 * GIB,
        phases=(PhaseBytes("save", 0, 2 * GIB, 0),),
        allowed=allowed or Allowed(),
    )


def with_caps(value: Instance, device: int | None = None, host: int | None = None, nvme: int | None = None) -> Instance:
    """`value` with other capacities."""
    wanted = {"device": device, "host": host, "nvme": nvme}
    tiers = tuple(
        tier if wanted[tier.name] is None else replace(tier, capacity_bytes=wanted[tier.name]) for tier in value.tiers
    )
    return replace(value, tiers=tiers)
