"""What the engine knows before ZeRO-3 exists: the blocks as real modules and parameters, the device, the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.runtime.device.base import Device
from lazytrain_ds.runtime.monitor import Monitor
from lazytrain_ds.runtime.policy import Policy
from lazytrain_ds.workload.blocks import BlockTable

if TYPE_CHECKING:
    from lazytrain_ds.runtime.coordinator import LazyCoordinator
    from lazytrain_ds.runtime.parameters import ParameterStore, SlotView

__all__ = ["BlockModules", "Setup", "StoreAccess"]


@dataclass(frozen=True)
class BlockModules:
    """The block table resolved against one model.

    `parameters[b]`: parameters owned by block b, each once. `modules`: block -> the module whose forward is the block
    (groups have none). `owner_of_module`: id(module) -> block, for every module inside a block's modules.
    """

    table: BlockTable
    parameters: tuple[tuple[Parameter, ...], ...]
    modules: dict[int, Module]
    owner_of_module: dict[int, int]

    @classmethod
    def resolve(cls, model: Module, table: BlockTable) -> BlockModules:
        """Look up names in `model`; every parameter must be owned exactly once."""
        by_name = dict(model.named_parameters(remove_duplicate=False))
        named_modules = dict(model.named_modules())
        parameters = tuple(tuple(by_name[name] for name in block.parameters) for block in table)
        modules: dict[int, Module] = {}
        owner: dict[int, int] = {}
        for block in table:
            for name in block.modules:
                for module in named_modules[name].modules():
                    owner.setdefault(id(module), block.index)
            if block.kind in ("block", "whole"):
                modules[block.index] = named_modules[block.modules[0]]
        for module in named_modules.values():  # containers whose own parameters belong to the first block
            for parameter in module.parameters(recurse=False):
                owned_by = next(index for index, owned in enumerate(parameters) if any(parameter is p for p in owned))
                owner.setdefault(id(module), owned_by)
        return cls(table, parameters, modules, owner)


@dataclass
class Setup:
    """Everything `LazyStage3` needs; made by the engine before ZeRO-3 partitions anything."""

    config: LazyTrainConfig
    resolved: BlockModules
    device: Device
    instance: Instance
    plan: Plan
    policy: Policy
    quantizable: Callable[[Parameter], bool] = lambda parameter: False
    host_threads: int = 1
    nvme: Any = None
    monitor: Monitor = field(default_factory=Monitor)
    store: ParameterStore | None = field(default=None, init=False)
    coordinator: LazyCoordinator | None = field(default=None, init=False)

    @property
    def parameters_of_block(self) -> tuple[tuple[Parameter, ...], ...]:
        """Parameters owned by each block."""
        return self.resolved.parameters

    @property
    def block_modules(self) -> dict[int, Module]:
        """Blocks that are one module."""
        return self.resolved.modules

    @property
    def owner_of_module(self) -> dict[int, int]:
        """id(module) -> block."""
        return self.resolved.owner_of_module

    def attach(self, store: ParameterStore, coordinator: LazyCoordinator) -> None:
        """ZeRO-3 has laid out the parameters: give the store what the plan says about residents."""
        self.store, self.coordinator = store, coordinator
        monitor = self.monitor
        self.device.on_copy = monitor.task

        def visited(phase: str, block: int, start: float, end: float) -> None:
            monitor.visit(phase, block, start, end)
            monitor.memory("device", self.device.ledger.live_bytes)

        coordinator.device = self.device
        coordinator.on_visit = self.device.on_visit = visited
        coordinator.on_memory = lambda byte_count: monitor.memory("device", byte_count)
        store.on_stall = monitor.stall
        self.device.use_plan(self.instance, self.plan)
        for block in store.blocks:
            block.resident = self.policy.parameter_tier(block.index) == "device"
            block.pooled = block.index in self.block_modules

    def precision_spans(self, parameters: Sequence[Parameter], precision: str) -> list[tuple[int, int, str]]:
        """(offset, numel, precision) of each parameter of a sub-group; neighbours with fp32 states are joined.

        `precision` is the sub-group's; parameters that may not have 8-bit states have fp32 ones all the same.
        """
        spans: list[tuple[int, int, str]] = []
        at = 0
        for parameter in parameters:
            numel = parameter.partition_numel()
            own = "8bit" if precision == "8bit" and self.quantizable(parameter) else "fp32"
            if spans and spans[-1][2] == own == "fp32":
                spans[-1] = (spans[-1][0], spans[-1][1] + numel, own)
            else:
                spans.append((at, numel, own))
            at += numel
        return spans


class StoreAccess:
    """What activations need of parameters (`ParameterAccess`), answered by the store and the coordinator."""

    def __init__(self, store: ParameterStore, coordinator: LazyCoordinator) -> None:
        self._store = store
        self._coordinator = coordinator

    def hold(self, block: int) -> AbstractContextManager[None]:
        """The block's parameters are present and stay for the duration."""
        return self._coordinator.hold(block)

    def backward_begins(self, block: int) -> None:
        """The block's segment has been re-run: its parameters are fetched now."""
        self._coordinator.backward_begins(block)

    def view_of(self, tensor: torch.Tensor) -> SlotView | Any | None:
        """The place of a tensor inside a parameter slot, if it lies in one."""
        return self._store.view_of(tensor)
