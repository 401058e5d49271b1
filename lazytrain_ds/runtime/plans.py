"""From a model, a config and a machine to the plan in force, in two phases.

*Placement* (parameters, optimizer states) is planned before ZeRO-3 partitions, from the sequence length the config or
the model names. *Activations* are planned at the first training forward from the real shapes, with placement fixed, and
again when a larger batch comes.
"""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from torch.utils._pytree import tree_leaves

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import ConfigError, InfeasibleError, PlanError, UnsupportedError
from lazytrain_ds.hardware.spec import HardwareSpec
from lazytrain_ds.optim.fused_adamw import FusedAdamW
from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit
from lazytrain_ds.planning.instance import Allowed, Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.rules import RULES
from lazytrain_ds.planning.schema import TIERS, Precision, digest
from lazytrain_ds.planning.simulator import predict
from lazytrain_ds.planning.solve import solve
from lazytrain_ds.runtime.activations.replay import RandomState
from lazytrain_ds.runtime.device import make_device
from lazytrain_ds.runtime.device.emulated import EmulatedDevice
from lazytrain_ds.runtime.machine import host_threads, local_hardware
from lazytrain_ds.runtime.monitor import Monitor
from lazytrain_ds.runtime.policy import ActivationAction, PlanPolicy, Policy
from lazytrain_ds.runtime.setup import BlockModules, Setup
from lazytrain_ds.runtime.swap import NvmeStore, aligned_empty
from lazytrain_ds.workload.blocks import find_blocks
from lazytrain_ds.workload.build import Training, build_instance
from lazytrain_ds.workload.profile import Profile, profile_call, profile_model
from lazytrain_ds.workload.trace import TraceError

__all__ = ["PlanBook"]

DEFAULT_SEQUENCE_LENGTH = 2048
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")

INERT_SECTION = (
    'the section "activation_checkpointing" does nothing by itself in DeepSpeed, and here the plan decides what is '
    'recomputed and where boundaries are; set "lazytrain.activations" to decide it yourself'
)


def model_length(model: torch.nn.Module) -> int | None:
    """The sequence length that a model's own config names, None where it has none."""
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        for name in LENGTH_NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def batch_shape(inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, tokens per row) of a call: of its largest tensor with two or more dimensions; (1, 1) if it has none."""
    tensors = [leaf for leaf in tree_leaves((inputs, dict(kwargs))) if torch.is_tensor(leaf) and leaf.dim() >= 1]
    if not tensors:
        return (1, 1)
    largest = max(tensors, key=lambda tensor: tensor.shape[:2].numel())
    return (largest.shape[0], largest.shape[1] if largest.dim() > 1 else 1)


def allowed_by(config: LazyTrainConfig, world_size: int, own_optimizer: bool = True, on_cpu: bool = True) -> Allowed:
    """What the block's keys and this version's runtime leave open.

    `own_optimizer`: the optimizer is one of ours, whose states the runtime knows how to move.
    """

    def forced(value: str, possible: tuple[str, ...], key: str) -> tuple[str, ...]:
        if value in TIERS:
            if value not in possible:
                raise ConfigError(f'"lazytrain.{key}": "{value}" cannot be carried out here, only {possible}')
            return (value,)
        return possible

    nvme = ("nvme",) if config.nvme_path != "auto" else ()
    activation_tiers = ("device", "host", *nvme)
    one_rank = world_size == 1
    # On a CPU the device's arithmetic is the host's, so that states may live in either; on a GPU it is not.
    state_tiers: tuple[str, ...] = ("host",)
    if one_rank and own_optimizer:
        state_tiers = (*(("device",) if on_cpu else ()), "host", *nvme)
    return Allowed(
        boundary_tiers=forced(config.activations, activation_tiers, "activations"),
        saved_tiers=forced(config.activations, activation_tiers, "activations"),
        parameter_tiers=forced(config.parameters, ("device", "host", *(nvme if one_rank else ())), "parameters"),
        optimizer_tiers=forced(config.optimizer_states, state_tiers, "optimizer_states"),
        step_modes=("hidden", "serial") if world_size == 1 else ("serial",),
    )


@contextmanager
def generators_untouched(device: torch.device) -> Iterator[None]:
    """Tracing runs the model's code: whatever random numbers that draws, the training sees its own."""
    python, tensors = random.getstate(), RandomState.capture(device)
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        tensors.set()
        if numpy is not None:
            numpy.random.set_state(arrays)


def best_of_rules(solved: Callable[[str], Plan]) -> Plan:
    """The rule plan with the shortest predicted step; what `solved` raises where none of them fits."""
    plans: list[Plan] = []
    failure: Exception | None = None
    for name in RULES:
        try:
            plans.append(solved(name))
        except (InfeasibleError, PlanError) as error:
            failure = error
    if not plans:
        assert failure is not None
        raise failure
    return min(plans, key=lambda plan: plan.prediction.step_seconds)


_names_in_use: set[str] = set()


def take_store_name(rank: int) -> str:
    """A name for one more store of this process: the same in each run, so that it takes over what a killed one left."""
    names = (f"rank{rank}" if number == 1 else f"rank{rank}-{number}" for number in itertools.count(1))
    name = next(name for name in names if name not in _names_in_use)
    _names_in_use.add(name)
    return name


class PlanBook:
    """Makes and keeps the Instance, the Plan and the Policy of one engine."""

    def __init__(self, engine: Any, config: LazyTrainConfig) -> None:
        self.engine = engine
        self.config = config
        self.world_size = dist.get_world_size()
        self.hardware: HardwareSpec = local_hardware(config)
        offload = engine.zero_offload_param()
        self.device = make_device(config, self.hardware, offload is None or bool(offload.pin_memory))
        self.monitor = Monitor(dist.get_rank())
        self.nvme_store: NvmeStore | None = None
        self.instance: Instance | None = None
        self.plan: Plan | None = None
        self.policy: Policy | None = None
        self.placement: Plan | None = None
        self.notes: list[str] = []
        self._store_name = ""
        self._seen = (0, 0)
        self._setup: Setup | None = None
        self._training: Training | None = None

    # -- placement ---------------------------------------------------------------------------------------------
    def place(self, optimizer: torch.optim.Optimizer) -> Setup:
        """Plan parameters and states. Raises InfeasibleError before anything of ours is allocated."""
        model = self.engine.module
        pattern = None if self.config.blocks == "auto" else self.config.blocks
        table = find_blocks(model, pattern)
        length = self._sequence_length(model)
        rows = self.engine.train_micro_batch_size_per_gpu()
        dtype, accumulation = self.engine.get_data_types()
        self.dtype = dtype
        # An emulated device is apart from its host, as a real one is, though both are this CPU.
        own, on_cpu = isinstance(optimizer, FusedAdamW), self.device.name == "cpu"
        if isinstance(optimizer, HybridAdamW8bit) and not optimizer.knows_model:
            optimizer.observe_model(model)
        self._training = Training(
            global_batch=rows * self.engine.gradient_accumulation_steps() * self.world_size,
            sequence_length=length,
            world_size=self.world_size,
            accumulation_dtype=accumulation,
            margins={"device": self.hardware.device_memory_bytes // 50, "host": self.hardware.host_memory_bytes // 50},
            allowed=allowed_by(self.config, self.world_size, own, on_cpu),
            precisions=self._precisions(optimizer),
            step_devices=("host", "device") if own and on_cpu and self.world_size == 1 else ("host",),
            quantizable=self._quantizable(optimizer),
        )
        with generators_untouched(self.device.torch_device):
            profile = profile_model(model, table, [rows], length, dtype=dtype, device=self.device.torch_device.type)
        self._settle_emulation(profile)
        self._note(profile.notes)
        if dict(self.engine.config).get("activation_checkpointing"):
            self._note((INERT_SECTION,))
        self.table = table
        instance = build_instance(model, table, profile, self.hardware, self._training, dtype=dtype)
        plan = self._choose(instance, None)
        self._accept(instance, plan)
        self.placement = plan
        quantizable = self._quantizable(optimizer)
        self._setup = Setup(
            self.config,
            BlockModules.resolve(model, table),
            self.device,
            instance,
            plan,
            self.policy,
            quantizable=lambda parameter: quantizable("", parameter),
            host_threads=host_threads(self.device.torch_device.type),
            nvme=self.nvme_store,
            monitor=self.monitor,
        )
        return self._setup

    def _settle_emulation(self, profile: Profile) -> None:
        """Emulated compute given as the seconds of a block becomes a rate now that the blocks are known."""
        if not isinstance(self.device, EmulatedDevice):
            return
        if self.device.emulation.timed and self.world_size > 1:
            raise UnsupportedError('"lazytrain.device.emulate.compute": only "real" works with more than one process')
        largest = max(block.forward_flops for trace in profile.traces.values() for block in trace.blocks)
        emulation = self.device.emulation.with_block_flops(largest)
        self.hardware = emulation.apply(self.hardware).with_memory(device=self.hardware.device_memory_bytes)

    def _precisions(self, optimizer: torch.optim.Optimizer) -> tuple[Precision, ...]:
        """State precisions the user's optimizer and `state_precision` leave open."""
        wanted = self.config.state_precision
        if not isinstance(optimizer, HybridAdamW8bit):
            if wanted != "fp32":
                raise ConfigError(
                    f'"lazytrain.state_precision": {wanted!r} needs "optimizer": {{"type": "HybridAdamW8bit"}}, '
                    f"this run has {type(optimizer).__name__}"
                )
            return ("fp32",)
        if "state_precision" not in self.config.model_fields_set or wanted == "8bit":
            return ("8bit", "fp32") if wanted == "auto" else ("8bit",)
        return ("fp32",) if wanted == "fp32" else ("fp32", "8bit")

    @staticmethod
    def _quantizable(optimizer: torch.optim.Optimizer) -> Callable[[str, torch.nn.Parameter], bool]:
        if isinstance(optimizer, HybridAdamW8bit):
            return lambda name, parameter: optimizer.precision_of(parameter) == "8bit"
        return lambda name, parameter: False

    def _sequence_length(self, model: torch.nn.Module) -> int:
        if self.config.sequence_length != "auto":
            return int(self.config.sequence_length)
        length = model_length(model)
        if length is None:
            length = DEFAULT_SEQUENCE_LENGTH
            self.notes.append(
                f"no sequence length given or found in the model: placement is planned for {length} "
                'tokens per sample; set "lazytrain.sequence_length"'
            )
        return length

    def _note(self, notes: tuple[str, ...]) -> None:
        self.notes += [note for note in notes if note not in self.notes]

    def _choose(self, instance: Instance, placement: Plan | None) -> Plan:
        """The plan file's, or the planner's; the same on every rank (rank 0 decides)."""
        if dist.get_world_size() == 1:
            return self._choose_here(instance, placement)
        message: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                message = [self._choose_here(instance, placement).to_json()]
            except Exception as error:
                message = [error]
        dist.broadcast_object_list(message, src=0)
        if isinstance(message[0], Exception):
            raise message[0]
        return Plan.from_json(message[0])

    def _choose_here(self, instance: Instance, placement: Plan | None) -> Plan:
        if self.config.plan_file != "auto":
            path = Path(self.config.plan_file).expanduser()
            if not path.is_file():
                raise ConfigError(f'"lazytrain.plan_file": there is no file {str(path)!r}')
            plan = Plan.from_json(path.read_bytes())
            if plan.micro_batch != instance.micro_batches[0]:
                rounds = instance.rounds(instance.micro_batches[0])
                plan = replace(plan, micro_batch=instance.micro_batches[0], rounds=rounds)
            plan.check(instance)
            return replace(plan.with_prediction(predict(instance, plan)), instance=digest(instance))
        planner = self.config.planner
        kind = planner.kind
        for value in (self.config.activations, self.config.parameters, self.config.optimizer_states):
            if value in RULES:
                kind = value

        def solved(kind: str) -> Plan:
            return solve(
                instance,
                placement=placement,
                kind=kind,
                time_limit_seconds=None if planner.time_limit == "auto" else planner.time_limit,
                gap=0.01 if planner.gap == "auto" else planner.gap,
                solver=planner.solver,
            )

        return best_of_rules(solved) if kind == "rules" else solved("auto" if kind == "milp" else kind)

    def _accept(self, instance: Instance, plan: Plan) -> None:
        """Make `plan` the one in force. Nothing is changed where it, or the policy for it, is refused."""
        plan.check(instance)
        policy = self._make_policy(instance, plan)
        self.instance, self.plan, self.policy = instance, plan, policy
        self._open_store()
        self._write_report()

    def _make_policy(self, instance: Instance, plan: Plan) -> Policy:
        if self.config.policy == "auto":
            return PlanPolicy(plan, instance, self.table)
        module, _, name = self.config.policy.partition(":")
        try:
            made = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f'"lazytrain.policy": cannot import {self.config.policy!r}: {error}') from error
        policy = made(plan, instance, self.table)
        if not isinstance(policy, Policy):
            raise ConfigError(f'"lazytrain.policy": {name} is not a lazytrain_ds.runtime.policy.Policy')
        return policy

    def _open_store(self) -> None:
        """Open the NVMe store once the policy in force sends anything there: a directory of its own per rank."""
        if self.nvme_store is not None or not self._uses_nvme():
            return
        if self.config.nvme_path == "auto":
            raise ConfigError('the plan sends data to NVMe; set "lazytrain.nvme_path" to a directory on a local disk')
        self._store_name = take_store_name(dist.get_rank())
        self.nvme_store = NvmeStore(
            self.config.nvme_path,
            name=self._store_name,
            # DeepSpeed fills in a block where the user wrote none; its one thread a direction is slower than ours.
            aio=self.engine.aio_config() if "aio" in dict(self.engine.config) else None,
            on_transfer=self.monitor.transfer,
            throttle=self.device.throttle,
            space_limit_bytes=None if self.config.nvme_space == "auto" else int(self.config.nvme_space),
            write_budget_bytes_per_day=(
                None if self.config.nvme_write_budget == "auto" else int(self.config.nvme_write_budget)
            ),
        )

    def _uses_nvme(self) -> bool:
        policy = self.policy
        for block in range(self.plan.block_count):
            action = policy.activations(block)
            homes = (action.boundary, action.saved_tier, policy.parameter_tier(block), policy.sub_group(block).tier)
            if "nvme" in homes:
                return True
        return False

    def empty_staging(self, byte_count: int) -> torch.Tensor:
        """Host bytes on their way to or from NVMe, aligned so that the store moves them without a copy."""
        if self.device.pin_memory:
            return self.device.empty_host(byte_count, torch.uint8)  # page-locked memory starts on a page
        return aligned_empty(byte_count, torch.uint8)

    def _write_report(self) -> None:
        """Leave the plan in force and its instance in the user's report directory (rank 0)."""
        if self.config.report_dir == "auto" or dist.get_rank() != 0:
            return
        directory = Path(self.config.report_dir).expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, value in (("plan.json", self.plan), ("instance.json", self.instance)):
            (directory / name).write_text(value.to_json())

    # -- activations -------------------------------------------------------------------------------------------
    def replan_for(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Plan activations for this call if it is larger than any before; True if the plan in force changed."""
        rows, length = batch_shape(inputs, kwargs)
        if rows * length <= self._seen[0] * self._seen[1] and self._seen != (0, 0):
            return False
        model = self.engine.module
        with generators_untouched(self.device.torch_device):
            profile = self._profile(rows, length, inputs, kwargs)
        self._note(profile.notes)
        rounds = self.placement.rounds
        training = replace(self._training, global_batch=rows * rounds * self.world_size, sequence_length=length)
        instance = build_instance(model, self.table, profile, self.hardware, training, dtype=self.dtype)
        placement = replace(self.placement, micro_batch=rows, rounds=rounds, prediction=None)
        placement = self._with_legal_activations(placement, instance)
        self._accept(instance, self._choose(instance, placement))
        self._setup.instance, self._setup.plan, self._setup.policy = self.instance, self.plan, self.policy
        if self._setup.coordinator is not None:
            self._setup.coordinator.policy = self.policy
        self.device.use_plan(self.instance, self.plan)
        self._seen = (rows, length)  # only now: a shape that was refused is refused again
        return True

    def _profile(self, rows: int, length: int, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Profile:
        """What this very call needs; where it cannot be traced, what its shape needs."""
        model, dtype, device = self.engine.module, self.dtype, self.device.torch_device.type
        try:
            return profile_call(model, self.table, inputs, kwargs, micro_batch=rows, dtype=dtype, device=device)
        except TraceError:
            return profile_model(model, self.table, [rows], length, dtype=dtype, device=device)

    @staticmethod
    def _with_legal_activations(placement: Plan, instance: Instance) -> Plan:
        """The placement with keep-everything activations: its own choices may not be on the new menus."""
        allowed = instance.allowed
        boundary = "device" if "device" in allowed.boundary_tiers else allowed.boundary_tiers[0]
        saved = "device" if "device" in allowed.saved_tiers else allowed.saved_tiers[0]
        blocks = []
        for index, block in enumerate(placement.blocks):
            keep = instance.costs(index, placement.micro_batch).menu[0]
            saved_tier = saved if keep.offloadable_bytes else "device"
            blocks.append(replace(block, choice=keep.name, boundary=boundary, saved_tier=saved_tier))
        return replace(placement, blocks=tuple(blocks))

    def actions(self) -> list[ActivationAction]:
        """What to do with each block's activations under the plan in force."""
        return [self.policy.activations(index) for index in range(self.plan.block_count)]

    # -- more ranks --------------------------------------------------------------------------------------------
    def hook_access(self, optimizer: Any) -> Any:
        """`ParameterAccess` where DeepSpeed's own coordinator gathers (more than one rank)."""
        return _HookAccess(optimizer, self._setup)

    def close(self) -> None:
        """Stop threads and remove swap files."""
        if self.nvme_store is not None:
            self.nvme_store.close()
            self.nvme_store = None
            _names_in_use.discard(self._store_name)
        self.device.close()


class _HookAccess:
    """Parameters through DeepSpeed's fetch and release of modules."""

    def __init__(self, optimizer: Any, setup: Setup) -> None:
        self._offload = optimizer.parameter_offload
        self._modules = setup.block_modules

    @contextmanager
    def hold(self, block: int) -> Any:
        from deepspeed.runtime.zero import parameter_offload

        module = self._modules.get(block)
        if module is None:
            raise PlanError(f"block {block} is a group of modules and cannot be re-run")
        self._offload.pre_sub_module_forward_function(module)
        try:
            yield
        finally:
            self._offload.post_sub_module_forward_function(module)
            parameter_offload.FWD_MODULE_STACK.pop()  # the pre function pushed; only the real hook pops

    def backward_begins(self, block: int) -> None:
        return None  # DeepSpeed's own pre-backward hooks gather

    def view_of(self, tensor: torch.Tensor) -> None:
        return None
