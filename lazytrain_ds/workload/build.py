"""Put hardware, blocks and profile together into the planner's Instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.hardware.spec import STATE_BYTES_PER_PARAMETER, HardwareSpec
from lazytrain_ds.planning.instance import (
    ActivationChoice,
    Allowed,
    BlockClass,
    BlockCosts,
    Instance,
    OptimizerMode,
    PhaseBytes,
    StepDevice,
    Tier,
)
from lazytrain_ds.planning.schema import Precision
from lazytrain_ds.workload.blocks import Block, BlockTable
from lazytrain_ds.workload.menu import activation_menu
from lazytrain_ds.workload.operators import Operator
from lazytrain_ds.workload.phases import phase_bytes
from lazytrain_ds.workload.profile import Profile
from lazytrain_ds.workload.signature import parameter_numel
from lazytrain_ds.workload.trace import BlockTrace

# Flat buffers start sub-groups at this many bytes (runtime/layout.py).
ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Training:
    """How the model is trained, as far as memory and time depend on it.

    `accumulation_dtype`: gradients in host memory. `precisions`: state precisions the user allows; `step_devices`:
    where the optimizer may run (numerics: more than one only where the results are equal or the user wrote "auto").
    `quantizable`: whether a parameter (name, parameter) may have 8-bit states. `margins`: bytes per tier a plan
    leaves free. `choices`: names that blocks' activation menus must have where the blocks have the operators: those of
    a plan that was made with other times.
    """

    global_batch: int
    sequence_length: int
    world_size: int = 1
    accumulation_dtype: torch.dtype = torch.float32
    precisions: tuple[Precision, ...] = ("fp32",)
    step_devices: tuple[StepDevice, ...] = ("host",)
    quantizable: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False
    margins: Mapping[str, int] = field(default_factory=dict)
    allowed: Allowed = field(default_factory=Allowed)
    nvme_write_budget_bytes_per_step: int | None = None
    fixed_device_bytes: int = 0
    fixed_host_bytes: int = 0
    phases: tuple[PhaseBytes, ...] | None = None
    gathers_on_save: bool = False
    choices: tuple[str, ...] = ()


def build_instance(
    model: nn.Module,
    table: BlockTable,
    profile: Profile,
    hardware: HardwareSpec,
    training: Training,
    *,
    dtype: torch.dtype | None = None,
    name: str = "",
) -> Instance:
    """The Instance of training `model` so on `hardware`.

    `dtype`: compute dtype of the parameters (None: theirs). Micro-batches are the profile's that divide the global
    batch. Blocks of one
    class whose traces differ become classes of their own (`"Layer~1"`).
    """
    sizes = tuple(size for size in profile.micro_batches if training.global_batch % (size * training.world_size) == 0)
    if not sizes:
        raise ConfigError(
            f"micro_batch: none of {profile.micro_batches} times {training.world_size} rank(s) "
            f"divides the global batch of {training.global_batch}"
        )
    builder = _Builder(model, table, profile, hardware, training, dtype)
    order, classes = builder.classes(sizes)
    trace = profile.traces[max(sizes)]
    phases = training.phases
    if phases is None:
        phases = phase_bytes(model, classes, order, compute_dtype=dtype, gathers_on_save=training.gathers_on_save)
    fixed = trace.shared_bytes + trace.loose_bytes + trace.input_bytes
    return Instance(
        name=name or type(model).__name__,
        tiers=tuple(
            Tier(tier, capacity, min(capacity, training.margins.get(tier, 0)))
            for tier, capacity in (
                ("device", hardware.device_memory_bytes),
                ("host", hardware.host_memory_bytes),
                ("nvme", hardware.nvme_bytes),
            )
        ),
        channels=hardware.channels(),
        classes=classes,
        order=order,
        optimizer_modes=tuple(
            OptimizerMode(
                step_device,
                precision,
                hardware.optimizer_seconds(step_device, precision),
                STATE_BYTES_PER_PARAMETER[precision],
            )
            for step_device in training.step_devices
            for precision in training.precisions
        ),
        micro_batches=sizes,
        global_batch=training.global_batch,
        sequence_length=training.sequence_length,
        accumulation_bytes_per_parameter=float(training.accumulation_dtype.itemsize),
        host_accumulate_seconds_per_parameter=hardware.host_accumulate_seconds,
        fixed_device_bytes=hardware.context_bytes + fixed + training.fixed_device_bytes,
        fixed_host_bytes=training.fixed_host_bytes,
        phases=phases,
        borrows=table.borrows,
        allowed=training.allowed,
        nvme_write_budget_bytes_per_step=training.nvme_write_budget_bytes_per_step,
        world_size=training.world_size,
    )


def operator_seconds(operators: Sequence[Operator], hardware: HardwareSpec, dtype: str) -> float:
    """Roofline time: each operator takes the longer of its arithmetic and its memory traffic, plus a launch."""
    rate, bandwidth = hardware.flops(dtype), hardware.device_bytes_per_second
    return sum(
        max(operator.flops / rate, operator.bytes_moved / bandwidth) + hardware.launch_seconds
        for operator in operators
        if operator.flops or operator.bytes_moved
    )


class _Builder:
    def __init__(
        self,
        model: nn.Module,
        table: BlockTable,
        profile: Profile,
        hardware: HardwareSpec,
        training: Training,
        dtype: torch.dtype | None,
    ) -> None:
        self.table, self.profile, self.hardware, self.training, self.dtype = table, profile, hardware, training, dtype
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.embeddings = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
        }

    def classes(self, sizes: Sequence[int]) -> tuple[tuple[str, ...], tuple[BlockClass, ...]]:
        """(class name of each block, the classes)."""
        names: dict[tuple[object, ...], str] = {}
        variants: dict[str, int] = {}
        found: dict[str, BlockClass] = {}
        order = []
        for block in self.table:
            traces = [self._trace(block, size) for size in sizes]
            chained = self._follows_its_predecessor(block, traces)
            key = (block.class_name, chained, *(trace.fingerprint for trace in traces))
            if key not in names:
                number = variants.get(block.class_name, 0)
                variants[block.class_name] = number + 1
                names[key] = f"{block.class_name}~{number}" if number else block.class_name
                found[names[key]] = self._class(names[key], block, dict(zip(sizes, traces, strict=True)), chained)
            order.append(names[key])
        return tuple(order), tuple(found.values())

    def _trace(self, block: Block, size: int) -> BlockTrace:
        """The block's trace; for one that the traced forward skipped, that of a block of its class that ran."""
        traces = self.profile.traces[size].blocks
        if traces[block.index].calls:
            return traces[block.index]
        for other in self.table:
            if other.class_name == block.class_name and traces[other.index].calls:
                return traces[other.index]
        return traces[block.index]

    def _follows_its_predecessor(self, block: Block, traces: Sequence[BlockTrace]) -> bool:
        """Whether dropping the block's input is sound: re-running the block before it makes it (see
        BlockTrace.chained).

        True as well where the plan space excludes dropping: behind a block that is not one module.
        """
        before = self.table[block.index - 1] if block.index else None
        if before is None or before.kind != "block":
            return True
        return before.family == block.family and all(trace.chained for trace in traces)

    def _class(self, name: str, block: Block, traces: Mapping[int, BlockTrace], chained: bool) -> BlockClass:
        owned = [(parameter_name, self.parameters[parameter_name]) for parameter_name in block.parameters]
        trainable = [entry for entry in owned if entry[1].requires_grad]
        counts = {id(parameter): parameter_numel(parameter) for _, parameter in owned}
        trainable_count = sum(counts[id(parameter)] for _, parameter in trainable)
        dtype = self._dtype_name(owned)
        return BlockClass(
            name=name,
            parameter_count=sum(counts.values()),
            trainable_count=trainable_count,
            quantizable_count=sum(
                counts[id(parameter)]
                for parameter_name, parameter in trainable
                if self.training.quantizable(parameter_name, parameter)
            ),
            parameter_bytes=self._buffer_bytes(owned),
            gradient_bytes=trainable_count * self.training.accumulation_dtype.itemsize,
            dtype=dtype,
            costs=tuple(self._costs(size, block, trace, chained, dtype) for size, trace in traces.items()),
        )

    def _compute_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.dtype if self.dtype is not None and parameter.dtype.is_floating_point else parameter.dtype

    def _buffer_bytes(self, owned: Sequence[tuple[str, nn.Parameter]]) -> int:
        """Bytes of the block's flat buffers: per dtype one of trainable parameters and one of frozen ones, aligned.

        One optimizer parameter group is assumed; each further one adds less than `ALIGNMENT_BYTES` per block.
        """
        ends: dict[tuple[torch.dtype, bool], int] = {}
        for trainable in (True, False):
            for _, parameter in owned:
                if parameter.requires_grad is not trainable:
                    continue
                dtype = self._compute_dtype(parameter)
                end = ends.get((dtype, trainable), 0)
                if not trainable:
                    end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                ends[dtype, trainable] = end + parameter_numel(parameter) * dtype.itemsize
        return sum(ends.values())

    def _dtype_name(self, owned: Sequence[tuple[str, nn.Parameter]]) -> str:
        counts: dict[str, int] = {}
        for _, parameter in owned:
            name = str(self._compute_dtype(parameter)).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + parameter_numel(parameter)
        fallback = str(self.dtype or torch.float32).removeprefix("torch.")
        return max(counts, key=lambda name: counts[name], default=fallback)

    def _costs(self, size: int, block: Block, trace: BlockTrace, chained: bool, dtype: str) -> BlockCosts:
        def seconds(operators: Sequence[Operator]) -> float:
            return operator_seconds(operators, self.hardware, dtype)

        menu: tuple[ActivationChoice, ...]
        boundary_bytes = trace.boundary_bytes
        if block.kind == "block":
            menu = activation_menu(trace, seconds, droppable=chained, also=self.training.choices)
        else:  # no single forward that could be run again, or whose inputs and saved tensors could be moved
            (keep, *_) = activation_menu(trace, seconds, droppable=False)
            if keep.needs_input:
                keep = replace(keep, kept_bytes=keep.kept_bytes + boundary_bytes, needs_input=False)
                boundary_bytes = 0
            menu = (replace(keep, offloadable_bytes=0),)
        return BlockCosts(
            micro_batch=size,
            boundary_bytes=boundary_bytes,
            forward_seconds=seconds(trace.forward),
            backward_seconds=seconds(trace.backward),
            forward_flops=trace.forward_flops,
            transient_forward_bytes=trace.transient_forward_bytes,
            transient_backward_bytes=trace.transient_backward_bytes,
            menu=menu,
        )
