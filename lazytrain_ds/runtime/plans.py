"""From a model, a config and a machine to the plan in force, in two phases.

*Placement* (parameters, optimizer states) is planned before ZeRO-3 partitions, from the sequence length the config or
the model names. *Activations* are planned at the first training forward from the real shapes, with placement fixed, and
again when a larger batch comes.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from deepspeed import comm as dist

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import ConfigError, LazyTrainError, PlanError, UnsupportedError
from lazytrain_ds.hardware.probe import cache_directory, machine_key
from lazytrain_ds.hardware.spec import HardwareSpec
from lazytrain_ds.optim.fused_adamw import FusedAdamW
from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit
from lazytrain_ds.planning.instance import Instance, divisors
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.rules import RULES
from lazytrain_ds.planning.schema import Precision, digest
from lazytrain_ds.planning.simulator import Simulator, predict
from lazytrain_ds.planning.solve import solve
from lazytrain_ds.report.run_directory import RunDirectory
from lazytrain_ds.runtime.corrections import Corrections
from lazytrain_ds.runtime.device import make_device
from lazytrain_ds.runtime.device.emulated import EmulatedDevice
from lazytrain_ds.runtime.hook_access import HookAccess
from lazytrain_ds.runtime.machine import about_this_run, host_threads, local_hardware
from lazytrain_ds.runtime.monitor import Monitor
from lazytrain_ds.runtime.policy import ActivationAction, PlanPolicy, Policy
from lazytrain_ds.runtime.progress import in_phase
from lazytrain_ds.runtime.questions import (
    DEFAULT_SEQUENCE_LENGTH,
    allowed_by,
    batch_shape,
    batch_sides,
    best_of_rules,
    generators_untouched,
    give_store_name,
    model_length,
    plan_from_file,
    take_store_name,
)
from lazytrain_ds.runtime.relocation import Moves
from lazytrain_ds.runtime.setup import BlockModules, Setup
from lazytrain_ds.runtime.swap import NvmeStore, aligned_empty
from lazytrain_ds.workload.blocks import find_blocks
from lazytrain_ds.workload.build import Training, build_instance
from lazytrain_ds.workload.measure import MeasuredCache, workload_key
from lazytrain_ds.workload.profile import Profile, profile_call, profile_model
from lazytrain_ds.workload.trace import TraceError

__all__ = ["PlanBook"]

INERT_SECTION = (
    'the section "activation_checkpointing" does nothing by itself in DeepSpeed, and here the plan decides what is '
    'recomputed and where boundaries are; set "lazytrain.activations" to decide it yourself'
)


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
        self.report: RunDirectory | None = None
        self.instance: Instance | None = None
        self.estimated: Instance | None = None  # the same before anything measured in real steps entered it
        self.corrections: Corrections | None = None
        self.plan: Plan | None = None
        self.policy: Policy | None = None
        self.placement: Plan | None = None
        self.notes: list[str] = []
        self._store_name = ""
        self._seen = (0, 0)
        self._refused_bytes: int | None = None
        self._setup: Setup | None = None
        self._training: Training | None = None

    # -- placement ---------------------------------------------------------------------------------------------
    @in_phase("planning where parameters and states live")
    def place(self, optimizer: torch.optim.Optimizer) -> Setup:
        """Plan parameters and states. Raises InfeasibleError before anything of ours is allocated."""
        model = self.engine.module
        pattern = None if self.config.blocks == "auto" else self.config.blocks
        table = find_blocks(model, pattern)
        length = self._sequence_length(model)
        given, per_rank = self.engine.train_micro_batch_size_per_gpu(), self._samples_per_rank()
        sizes = divisors(per_rank) if self.config.micro_batch == "auto" else [given]
        dtype, accumulation = self.engine.get_data_types()
        self.dtype = dtype
        # An emulated device is apart from its host, as a real one is, though both are this CPU.
        own, on_cpu = isinstance(optimizer, FusedAdamW), self.device.name == "cpu"
        if isinstance(optimizer, HybridAdamW8bit) and not optimizer.knows_model:
            optimizer.observe_model(model)
        self._training = Training(
            global_batch=per_rank * self.world_size,
            sequence_length=length,
            world_size=self.world_size,
            accumulation_dtype=accumulation,
            margins={"device": self.hardware.device_memory_bytes // 50, "host": self.hardware.host_memory_bytes // 50},
            allowed=allowed_by(self.config, self.world_size, own, on_cpu),
            precisions=self._precisions(optimizer),
            step_devices=("host", "device") if own and on_cpu and self.world_size == 1 else ("host",),
            quantizable=self._quantizable(optimizer),
            choices=self._choices_of_plan_file(),
        )
        with generators_untouched(self.device.torch_device):
            profile = profile_model(model, table, sizes, length, dtype=dtype, device=self.device.torch_device.type)
        self._settle_emulation(profile)
        self._note(profile.notes)
        if dict(self.engine.config).get("activation_checkpointing"):
            self._note((INERT_SECTION,))
        self.table = table
        estimated = build_instance(model, table, profile, self.hardware, self._training, dtype=dtype)
        instance = self._corrected(estimated, sizes[-1])
        plan = self._choose(instance, None)
        if self.config.micro_batch == "auto":
            self._use_micro_batch(plan, given)
            only = (plan.micro_batch,)
            estimated, instance = replace(estimated, micro_batches=only), replace(instance, micro_batches=only)
            plan = replace(plan, instance=digest(instance))
        self._accept(instance, plan)
        self.placement, self.estimated = plan, estimated
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

    def _samples_per_rank(self) -> int:
        return self.engine.train_micro_batch_size_per_gpu() * self.engine.gradient_accumulation_steps()

    def _use_micro_batch(self, plan: Plan, given: int) -> None:
        """The engine and its config go by the plan's micro-batch from now on; the global batch stays."""
        total = self._samples_per_rank()
        values = {"train_micro_batch_size_per_gpu": plan.micro_batch, "gradient_accumulation_steps": plan.rounds}
        for key, value in values.items():
            setattr(self.engine._config, key, value)
            if isinstance(self.engine.config, dict):
                self.engine.config[key] = value
        assert self._samples_per_rank() == total
        change = "as given" if plan.micro_batch == given else f"instead of {given} x {total // given}"
        self._note(
            (
                f'"micro_batch": "auto": {plan.micro_batch} samples x {plan.rounds} accumulation steps, {change} '
                f"(global batch {total * self.world_size} kept); results are those of this micro-batch",
            )
        )

    def _check_rows(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A loader that does not read the engine's micro-batch would change the global batch: refused by name."""
        wanted = self.placement.micro_batch
        if self.config.micro_batch == "auto" and wanted not in batch_sides(inputs, kwargs):
            raise ConfigError(
                f'"lazytrain.micro_batch": "auto" chose {wanted} samples per micro-batch, but the first batch has '
                f"{batch_shape(inputs, kwargs)[0]}: a loader of your own is never resized. Pass training_data= to "
                "deepspeed.initialize, build the loader with engine.train_micro_batch_size_per_gpu(), or set "
                '"micro_batch": "keep"'
            )

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

    @in_phase("planning")
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

    def _choices_of_plan_file(self) -> tuple[str, ...]:
        """Activation choices of the user's plan: what is measured today may leave others on the menus."""
        if self.config.plan_file == "auto":
            return ()
        return tuple(sorted({block.choice for block in plan_from_file(self.config.plan_file).blocks}))

    def _choose_here(self, instance: Instance, placement: Plan | None) -> Plan:
        if self.config.plan_file != "auto":
            plan = plan_from_file(self.config.plan_file)
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
        try:
            if self.report is None:
                self.report = RunDirectory(self.config.report_dir)
                self.report.begin(about_this_run(self.engine.module, self.hardware))
            self.report.write_plan(self.plan, self.instance)
        except OSError as error:
            raise ConfigError(f'"lazytrain.report_dir": cannot write {error.filename}: {error.strerror}') from error

    # -- activations -------------------------------------------------------------------------------------------
    def replan_for(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Plan activations for this call if it is larger than any before; True if the plan in force changed."""
        rows, length = batch_shape(inputs, kwargs)
        if rows * length <= self._seen[0] * self._seen[1] and self._seen != (0, 0):
            return False
        if self._seen == (0, 0):
            self._check_rows(inputs, kwargs)
        model = self.engine.module
        with generators_untouched(self.device.torch_device):
            profile = self._profile(rows, length, inputs, kwargs)
        self._note(profile.notes)
        rounds = self.placement.rounds
        training = replace(self._training, global_batch=rows * rounds * self.world_size, sequence_length=length)
        estimated = build_instance(model, self.table, profile, self.hardware, training, dtype=self.dtype)
        instance = self._corrected(estimated, rows)
        placement = replace(self.placement, micro_batch=rows, rounds=rounds, prediction=None)
        placement = self._with_legal_activations(placement, instance)
        plan = self._choose(instance, placement)
        self._check_homes(plan)
        self._accept(instance, plan)
        self.estimated = estimated
        self._put_in_force()
        self._seen = (rows, length)  # only now: a shape that was refused is refused again
        return True

    def _check_homes(self, plan: Plan) -> None:
        """What blocks own is in its place since the start, and stays there."""
        for index, (block, placed) in enumerate(zip(plan.blocks, self.placement.blocks, strict=True)):
            if (block.parameter_tier, block.optimizer) != (placed.parameter_tier, placed.optimizer):
                raise PlanError(f"block {index}: the plan for this batch wants its parameters or states elsewhere")

    def _put_in_force(self) -> None:
        """The executing parts ask the present policy from here on."""
        self._setup.instance, self._setup.plan, self._setup.policy = self.instance, self.plan, self.policy
        if self._setup.coordinator is not None:
            self._setup.coordinator.policy = self.policy
        # The estimates, or emulated compute would follow its own measurements.
        self.device.use_plan(self.estimated, self.plan)

    @property
    def times_blocks(self) -> bool:
        """Whether measured visits are compute: on CUDA they are the time that issuing it took."""
        return self.device.name != "cuda"

    # -- what real steps said ----------------------------------------------------------------------------------
    @property
    def _cache(self) -> MeasuredCache:
        configured = self.config.profile.cache_dir
        return MeasuredCache(cache_directory(None if configured == "auto" else configured))

    def _cache_key(self, estimated: Instance, micro_batch: int) -> str:
        played = json.dumps(self.config.device, sort_keys=True) if self.device.name == "emulated" else ""
        return workload_key(estimated, micro_batch, machine_key(device_kind=self.device.name, played=played))

    def _corrected(self, estimated: Instance, micro_batch: int) -> Instance:
        """The instance with what earlier steps, of this run or of one like it, measured."""
        seconds = None
        if self.config.profile.refresh is not True:
            seconds = self._cache.load(self._cache_key(estimated, micro_batch))
        if seconds is not None:
            cached = Corrections.from_seconds(estimated, micro_batch, seconds)
            self.corrections = replace(self.corrections or cached, compute=cached.compute)
        return estimated if self.corrections is None else self.corrections.applied(estimated, micro_batch)

    def keep_measured(self, corrections: Corrections) -> None:
        """Leave the blocks' measured seconds for later runs of the same workload on this machine (rank 0)."""
        seconds = corrections.seconds(self.estimated, self.plan.micro_batch)
        if dist.get_rank() == 0 and seconds:
            self._cache.store(self._cache_key(self.estimated, self.plan.micro_batch), seconds)

    def solve_again(self, instance: Instance) -> Plan:
        """The plan for `instance`, which is the one in force but for times: of equal numerics, in any other way free.

        Raises InfeasibleError where the user's planner finds none that fits.
        """
        precisions = {mode.precision for mode in instance.optimizer_modes}
        return self._choose(self._limited(instance), self.plan if len(precisions) > 1 else None)

    def ran_out_under(self, plan: Plan) -> None:
        """The device ran out of memory under `plan`: no plan that is found again may need as much."""
        peak = Simulator(self.instance).run(plan).peaks["device"]
        self._refused_bytes = peak if self._refused_bytes is None else min(self._refused_bytes, peak)

    def _limited(self, instance: Instance) -> Instance:
        if self._refused_bytes is None:
            return instance
        device = instance.tier("device")
        capacity = min(device.capacity_bytes, self._refused_bytes - 1 + device.margin_bytes)
        tiers = tuple(replace(t, capacity_bytes=capacity) if t.name == "device" else t for t in instance.tiers)
        return replace(instance, tiers=tiers)

    def adopt(self, instance: Instance, plan: Plan, optimizer: Any) -> Moves:
        """Between optimizer steps: carry out `plan` from here on, moving what has another home in it.

        Where a home has no room, everything goes back and the error is raised: the plan in force stays in force.
        """
        before = self.instance, self.plan, self.policy
        self._accept(instance, plan)
        self._setup.nvme = self.nvme_store
        try:
            moves = optimizer.lazytrain_move(self.policy)
        except LazyTrainError:
            self.instance, self.plan, self.policy = before
            self._write_report()
            optimizer.lazytrain_move(self.policy)
            raise
        self.placement = plan
        self._put_in_force()
        return moves

    @in_phase("tracing what this batch needs")
    def _profile(self, rows: int, length: int, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Profile:
        """What this very call needs; where it cannot be traced, what its shape needs."""
        model, dtype, device = self.engine.module, self.dtype, self.device.torch_device.type
        try:
            return profile_call(model, self.table, inputs, kwargs, micro_batch=rows, dtype=dtype, device=device)
        except TraceError:
            return profile_model(model, self.table, [rows], length, dtype=dtype, device=device)

    @staticmethod
    def _with_legal_activations(placement: Plan, instance: Instance) -> Plan:
        """The placement; with keep-everything activations where its own are not on the new menus."""
        with suppress(PlanError):
            placement.check(instance)
            return placement
        allowed = instance.allowed
        boundary = "device" if "device" in allowed.boundary_tiers else allowed.boundary_tiers[0]
        saved = "device" if "device" in allowed.saved_tiers else allowed.saved_tiers[0]
        blocks = []
        for index, block in enumerate(placement.blocks):
            keep = instance.costs(index, placement.micro_batch).menu[0]
            saved_tier = saved if keep.offloadable_bytes else "device"
            home = boundary if keep.needs_input else "device"
            blocks.append(replace(block, choice=keep.name, boundary=home, saved_tier=saved_tier))
        return replace(placement, blocks=tuple(blocks))

    def actions(self) -> list[ActivationAction]:
        """What to do with each block's activations under the plan in force."""
        return [self.policy.activations(index) for index in range(self.plan.block_count)]

    # -- more ranks --------------------------------------------------------------------------------------------
    def hook_access(self, optimizer: Any) -> Any:
        """`ParameterAccess` where DeepSpeed's own coordinator gathers (more than one rank)."""
        return HookAccess(optimizer, self._setup)

    def close(self) -> None:
        """Stop threads and remove swap files."""
        if self.nvme_store is not None:
            self.nvme_store.close()
            self.nvme_store = None
            give_store_name(self._store_name)
        self.device.close()
