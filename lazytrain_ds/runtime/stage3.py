"""ZeRO-3's optimizer, subclassed: sub-groups per block, our gradients, updates behind the next forward.

`step()` is upstream's. It calls, per sub-group, prepare / unscale / optimizer step / reassign / release; here these
only record what is to be done, and `_post_step` hands the records, in forward order, to the host worker (hidden step)
or runs them at once (serial). Whatever looks at states or masters in between drains the worker first (`OBSERVERS`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch.nn import Parameter

from lazytrain_ds.errors import LazyTrainError, UnsupportedError
from lazytrain_ds.runtime.checkpoint import (
    exposed_states,
    finish_load,
    load_rigid,
    load_universal_states,
    load_universal_weights,
)
from lazytrain_ds.runtime.coordinator import LazyCoordinator
from lazytrain_ds.runtime.device.base import Event
from lazytrain_ds.runtime.gradients import GradientStore
from lazytrain_ds.runtime.layout import BlockLayout, build_layout
from lazytrain_ds.runtime.observers import StateObservers, guard_state, guarded_attribute, unguard_state
from lazytrain_ds.runtime.optimizer_states import StateHomes
from lazytrain_ds.runtime.parameter_homes import GroupBuffers, ParameterHomes
from lazytrain_ds.runtime.parameters import ParameterStore
from lazytrain_ds.runtime.policy import Policy
from lazytrain_ds.runtime.relocation import Moves, move
from lazytrain_ds.runtime.setup import Setup
from lazytrain_ds.runtime.updates import Update, Updater, make_updater
from lazytrain_ds.runtime.worker import HostWorker

__all__ = ["LazyStage3"]

# Whole-optimizer methods that read or write states: they wait for updates under way (single values: observers.py).
OBSERVERS = (
    "state_dict",
    "load_state_dict",
    "checkpoint_event_prologue",
    "offload_states",
    "reload_states",
    "refresh_fp32_params",
)
_SWAP_LOCK = threading.RLock()


class LazyStage3(StateObservers, DeepSpeedZeroOptimizer_Stage3):
    """One rank: our fetch, gradients and updates. More ranks: our sub-groups and updates, DeepSpeed's gathers."""

    lazytrain: Setup  # set on the subclass that the engine makes for itself

    fp32_partitioned_groups_flat = guarded_attribute("_lt_fp32_flat")
    fp16_partitioned_groups_flat = guarded_attribute("_lt_fp16_flat")
    _lt_worker: HostWorker | None = None
    _lt_inside_step = False

    def __init__(self, module: torch.nn.Module, init_optimizer: Any, param_names: Any, *args: Any, **kwargs: Any):
        setup = self.lazytrain
        self._lt_one_rank = dist.get_world_size() == 1
        self._lt_worker = HostWorker("lazytrain-host")
        self._lt_block_of = {id(p): b for b, owned in enumerate(setup.parameters_of_block) for p in owned}
        self._lt_sub_groups_of_group: list[list[list[Parameter]]] = []
        self._lt_layout: BlockLayout | None = None
        self._lt_jobs: list[tuple[int, dict[str, Any], float]] = []
        self._lt_ready: dict[int, Event] = {}
        self._lt_norm: float | None = None
        self._lt_updater: Updater = make_updater(init_optimizer, setup.host_threads)
        if self._lt_one_rank:
            kwargs["contiguous_gradients"] = False  # its bucket would never be used
        super().__init__(module, init_optimizer, param_names, *args, **kwargs)
        if self.use_muon:
            raise UnsupportedError("Muon is not supported with a lazytrain block; use AdamW or remove the block")
        if self.torch_autocast_gradscaler is not None:
            raise UnsupportedError("fp16 torch_autocast is not supported with a lazytrain block; use bf16")
        self._lt_finish()

    # -- construction ------------------------------------------------------------------------------------------
    def initialize_ds_offload(self, *args: Any, **kwargs: Any) -> Any:
        if not self._lt_one_rank:
            return super().initialize_ds_offload(*args, **kwargs)
        module = kwargs["module"] if "module" in kwargs else args[0]
        scalars = [p for p in module.parameters() if p.dim() == 0 and not hasattr(p, "ds_id")]
        for parameter in scalars:  # upstream views each parameter as bytes, which a tensor without dimensions refuses
            parameter.data = parameter.data.view(1)
        with _SWAP_LOCK:  # upstream looks the class up in its module's globals
            upstream = parameter_offload.PartitionedParameterCoordinator
            parameter_offload.PartitionedParameterCoordinator = LazyCoordinator
            try:
                return super().initialize_ds_offload(*args, **kwargs)
            finally:
                parameter_offload.PartitionedParameterCoordinator = upstream
                for parameter in scalars:
                    parameter.ds_shape = torch.Size([])

    def _create_fp16_sub_groups(self, params_group: list[Parameter]) -> list[list[Parameter]]:
        by_block: dict[int, list[Parameter]] = {}
        for parameter in params_group:
            by_block.setdefault(self._lt_block_of[id(parameter)], []).append(parameter)
        sub_groups = [by_block[block] for block in sorted(by_block)]
        self._lt_sub_groups_of_group.append(sub_groups)
        return sub_groups

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        setup = self.lazytrain
        self._lt_layout = build_layout(
            setup.parameters_of_block,
            self._lt_sub_groups_of_group,
            lambda parameter: parameter.ds_tensor.ds_numel,
        )
        self._lt_homes = ParameterHomes(
            self._lt_layout,
            lambda block: setup.policy.parameter_tier(block) == "nvme",
            setup.device.empty_host,
            setup.nvme,
        )
        at = 0
        for sub_groups in self._lt_sub_groups_of_group:
            members = self._lt_layout.sub_groups[at : at + len(sub_groups)]
            self.param_groups_fp16_flat_cpu_memory.append(GroupBuffers(members, self._lt_homes))
            at += len(sub_groups)

    def _move_to_flat_buffer(self, param_list: Any, flat_buffer: torch.Tensor, avoid_copy: bool = False) -> None:
        if flat_buffer.numel():  # a block on NVMe is moved as a whole, in `ParameterHomes.settle`
            super()._move_to_flat_buffer(param_list, flat_buffer, avoid_copy)

    def _create_fp16_partitions_with_defragmentation(self, fp16_param_groups: Any) -> None:
        super()._create_fp16_partitions_with_defragmentation(fp16_param_groups)
        self.param_groups_fp16_flat_cpu_memory = []
        self._lt_homes.flats = self._lt_fp16_flat
        self._lt_homes.wait_for_update = self._lt_wait
        self._lt_homes.settle()

    def _setup_for_real_optimizer(self) -> None:
        """Masters, states and gradient buffers per sub-group, allocated now: memory does not grow at the first step."""
        setup = self.lazytrain
        self._lt_states = StateHomes(setup.device, self.optimizer, self._lt_updater, setup.nvme)
        self.subgroup_to_device = {}
        gradients: dict[int, torch.Tensor] = {}
        self._lt_group_gradients: list[torch.Tensor] = []
        for sub_group in self._lt_layout.sub_groups:
            tier = setup.policy.sub_group(sub_group.block).tier if self._lt_one_rank else "host"
            with self._lt_homes.at_hand(sub_group) as values:
                spans = setup.precision_spans(sub_group.parameters, setup.policy.sub_group(sub_group.block).precision)
                master = self._lt_states.add(values, tier, spans)
            master.ds_id = f"{sub_group.parameters[0].ds_id}_{sub_group.parameters[-1].ds_id}"
            self.fp32_partitioned_groups_flat.append(master)
            self.subgroup_to_device[sub_group.index] = "cpu"
            buffer = torch.zeros(sub_group.numel, dtype=self.gradient_accumulation_dtype)
            self._lt_group_gradients.append(buffer)
            at = 0
            for parameter in sub_group.parameters:
                gradients[parameter.ds_id] = buffer.narrow(0, at, parameter.partition_numel())
                at += parameter.partition_numel()
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = gradients
        self.grad_partitions_flat_buffer = None
        for param_group in self.optimizer.param_groups:
            param_group["params"] = []
        self._create_next_swappable_fp32_groups()
        dist.barrier()
        if self.contiguous_gradients:
            for dtype, bucket in self.ipg_buckets.items():
                bucket.buffer = torch.empty(
                    self.reduce_bucket_size, dtype=dtype, device=get_accelerator().current_device_name()
                )

    def create_reduce_and_remove_grad_hooks(self) -> None:
        """Upstream gathers every parameter once, for its shape alone; one rank can have the shape without the data."""
        if not self._lt_one_rank:
            super().create_reduce_and_remove_grad_hooks()
            return
        gathers = {}
        for parameter in (p for group in self.fp16_groups for p in group):
            gathers[parameter] = (parameter.all_gather, parameter.partition)

            def show(parameter: Parameter = parameter) -> None:
                shape = parameter.ds_shape
                one = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
                parameter.data = one.as_strided(shape, (0,) * len(shape))

            def hide(parameter: Parameter = parameter) -> None:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

            parameter.all_gather, parameter.partition = show, hide
        try:
            super().create_reduce_and_remove_grad_hooks()
        finally:
            for parameter, (gather, partition) in gathers.items():
                parameter.all_gather, parameter.partition = gather, partition

    def _lt_finish(self) -> None:
        setup = self.lazytrain
        buffers = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        self._lt_gradients = GradientStore(
            setup.device,
            self._lt_worker,
            buffers,
            {p.ds_id: block for block, owned in enumerate(setup.parameters_of_block) for p in owned},
            setup.host_threads,
        )
        self._lt_gradients.on_stall = setup.monitor.stall
        trainable = {p.ds_id for group in self.fp16_groups for p in group}
        self._lt_norm_order = [p for p in self.module.parameters() if p.ds_id in trainable]
        guard_state(self.optimizer, self.drain)
        if not self._lt_one_rank:
            return
        self._lt_store = ParameterStore(setup.device, self._lt_layout.blocks, setup.nvme)
        self._lt_store.before_issue = lambda block: self._lt_homes.check_in_idle()
        self._lt_store.ready = lambda block: [self._lt_ready[block]] if block in self._lt_ready else ()
        coordinator: LazyCoordinator = self.parameter_offload.param_coordinator
        setup.attach(self._lt_store, coordinator)
        coordinator.make_room = self._lt_gradients.make_room
        coordinator.bind(self.module, self._lt_store, setup.policy, setup.block_modules, setup.owner_of_module)
        self._lt_wrap_gathers()

    def _lt_wrap_gathers(self) -> None:
        """Whoever gathers by DeepSpeed's own calls waits for that block's update, and has it brought from NVMe."""

        def wrap(parameter: Parameter, name: str) -> None:
            original: Callable[..., Any] = getattr(parameter, name)

            def gather(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
                wanted = [parameter] if param_list is None else list(param_list)
                blocks = {self._lt_block_of[id(each)] for each in wanted if id(each) in self._lt_block_of}
                for block in blocks:
                    self._lt_wait(block)
                self._lt_homes.check_out(blocks)
                return original(param_list, *args, **kwargs)

            setattr(parameter, name, gather)

        def wrap_partition(parameter: Parameter) -> None:
            original: Callable[..., Any] = parameter.partition

            def partition(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
                wanted = [parameter] if param_list is None else list(param_list)
                if kwargs.get("has_been_updated") or (len(args) > 1 and args[1]):
                    for each in wanted:
                        self._lt_homes.changed(self._lt_block_of[id(each)])
                        self._lt_store.blocks[self._lt_block_of[id(each)]].stale = True
                return original(param_list, *args, **kwargs)

            parameter.partition = partition

        for parameter in self.module.parameters():
            for name in ("all_gather", "all_gather_coalesced"):
                wrap(parameter, name)
            wrap_partition(parameter)

    # -- waiting -----------------------------------------------------------------------------------------------
    def drain(self) -> None:
        """Wait until every recorded update is done; raise what went wrong in one."""
        worker = self._lt_worker
        if worker is not None and not self._lt_inside_step and not worker.is_current_thread():
            worker.drain()
            if self._lt_ready:
                self._lt_ready.clear()
                try:
                    self._lt_settle()
                except LazyTrainError as error:  # a write behind an update: it stays known, as a failed update does
                    worker.fail(error)
                    worker.check()

    def _lt_settle(self) -> float:
        """Wait for what updates still write to NVMe; when the last write ended (0: there was none)."""
        return max(self._lt_homes.settle_writes(), self._lt_states.settle())

    def _lt_wait(self, block: int | None) -> None:
        event = self._lt_ready.get(block) if block is not None else None
        if event is not None and not self._lt_worker.is_current_thread():
            event.wait()

    # -- gradients ---------------------------------------------------------------------------------------------
    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Parameter) -> None:
        if not self._lt_one_rank:
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
        elif param.grad is not None and getattr(param, "ds_grad_is_ready", True):
            self._lt_wait(self._lt_block_of[id(param)])  # a block that this forward skipped
            self._lt_gradients.take(param, param.grad)
            self._offload_boundary_param_ids.add(param.ds_id)
            param.grad = None

    def partition_grads(self, params_to_release: list[Parameter], grad_partitions: list[torch.Tensor]) -> Any:
        """More ranks: upstream reduced and scattered; the partition takes the same way as one rank's gradient."""
        for parameter, partition in zip(params_to_release, grad_partitions, strict=True):
            rank = self._get_param_partition_rank(parameter)
            if parameter.partition_numel() * rank < parameter.ds_numel:
                self._lt_gradients.take(parameter, partition)
                self._offload_boundary_param_ids.add(parameter.ds_id)
            parameter.grad = None
        return None

    def independent_gradient_partition_epilogue(self) -> None:
        if not self._lt_one_rank:
            super().independent_gradient_partition_epilogue()
            return
        for param_id in self.params_already_reduced:
            self.params_already_reduced[param_id] = False
        self._epilogue_ran_this_backward = True

    def _finalize_offload_gradient_accumulation(self) -> None:
        """Nothing to copy at the boundary: updates read the accumulation buffer itself."""

    def _lt_squared_norm(self) -> float:
        if self._lt_norm is None:
            self._lt_gradients.settle()
            total = torch.tensor([self._lt_gradients.squared_norm(self._lt_norm_order)], dtype=torch.float64)
            if not self._lt_one_rank:
                dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.dp_process_group)
            self._lt_norm = float(total[0])
        return self._lt_norm

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        return not math.isfinite(self._lt_squared_norm())

    def _get_norm_groups(self) -> list[torch.Tensor]:
        squared = self._lt_squared_norm()
        return [torch.tensor(math.sqrt(squared) if math.isfinite(squared) else -1.0, dtype=torch.float32)]

    # -- the step ----------------------------------------------------------------------------------------------
    def step(self, closure: Any = None) -> None:
        self.drain()
        self._lt_jobs = []
        self._lt_norm = None
        self._lt_gradient_scale = 1.0
        self._lt_inside_step = True
        try:
            super().step(closure)
        finally:
            self._lt_inside_step = False
            self._lt_gradients.step_done(self._lt_gradient_scale)
            self._offload_boundary_param_ids.clear()

    def _prepare_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        # Captured now: the scheduler moves the rate right after step(), while the update may still wait its turn.
        hyper = {key: value for key, value in group.items() if key != "params"}
        self._lt_jobs.append((sub_group_id, hyper, 1.0))

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        combined = torch.as_tensor(float(self.loss_scale))
        if self.clip_grad > 0.0:
            clip = torch.clamp(((total_norm / self.loss_scale) + 1e-6) / self.clip_grad, min=1.0)
            combined = clip * self.loss_scale
        self._lt_gradient_scale = float(1.0 / combined)
        index, hyper, _ = self._lt_jobs[-1]
        self._lt_jobs[-1] = (index, hyper, self._lt_gradient_scale)

    def _optimizer_step(self, sub_group_id: int) -> None:
        """Recorded in `_prepare_sub_group`; applied after `_post_step`."""

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """The update itself writes the low-precision copy in place."""

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        """Nothing was brought in."""

    def _post_step(self, timer_names: Any) -> None:
        self._lt_run_updates()
        super()._post_step(timer_names)

    def _lt_run_updates(self) -> None:
        """One job per block, in forward order: all its sub-groups, then the block's event."""
        layout = self._lt_layout
        by_block: dict[int, list[Update]] = {}
        for index, hyper, scale in self._lt_jobs:
            sub_group = layout.sub_groups[index]
            spans = self._lt_gradients.spans(sub_group.parameters)
            if spans != ():
                update = Update(index, self._lt_group_gradients[index], hyper, scale, spans)
                by_block.setdefault(sub_group.block, []).append(update)
        self._lt_jobs = []
        hidden = self._lt_one_rank and self.lazytrain.policy.optimizer_step() == "hidden"
        blocks = sorted(by_block)
        self._lt_homes.check_in_idle()
        self._lt_states.order([update.sub_group for block in blocks for update in by_block[block]])
        began = time.perf_counter()
        self.lazytrain.device.updates_begin()
        for block in blocks:
            if hidden:
                self._lt_ready[block] = self._lt_worker.submit(partial(self._lt_update_block, block, by_block[block]))
            else:
                self._lt_update_block(block, by_block[block])
            if self._lt_one_rank:
                self._lt_store.updated(block)
        if not hidden:
            written = self._lt_settle()
            self.lazytrain.monitor.stall("host", self.lazytrain.device.updates_end(began, written))

    def _lt_update_block(self, block: int, updates: Sequence[Update]) -> float | None:
        """Update one block; returns when that ended. What goes to NVMe is written behind, weights ahead of states."""
        ended: float | None = None
        sub_groups = tuple(self._lt_layout.sub_groups[update.sub_group] for update in updates)
        whole = all(update.spans is None for update in updates)
        total = sum(sub_group.numel for sub_group in sub_groups)
        with self._lt_homes.open_for_update(block, sub_groups, whole, behind=True) as place:
            self.lazytrain.device.update_possible(place.possible_at)
            for update, sub_group in zip(updates, sub_groups, strict=True):
                with self._lt_states.at_hand(update.sub_group) as states:
                    started = time.perf_counter()
                    self._lt_updater.apply(update, states, place(sub_group))
                    started, ended = self.lazytrain.device.update_ends(block, sub_group.numel / total, started)
                    self.lazytrain.monitor.task("optimizer", block, "host", started, ended)
                    place.written(sub_group)
        if self._lt_one_rank:
            self._lt_store.home_changed(block)
        return ended

    # -- checkpoints -------------------------------------------------------------------------------------------
    def _rigid_state_dict(self) -> dict[str, Any]:
        with exposed_states(self):
            return super()._rigid_state_dict()

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        self.loss_scaler = state_dict["loss_scaler"]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        load_rigid(self, state_dict, load_optimizer_states)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        load_universal_states(self, checkpoint_dir)

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(
        self, checkpoint_dir: str, load_from_fp32_weights: bool
    ) -> None:
        load_universal_weights(self, checkpoint_dir, load_from_fp32_weights)

    def _restore_from_bit16_weights(self) -> None:
        for sub_group in self._lt_layout.sub_groups:
            with self._lt_homes.at_hand(sub_group) as values, self._lt_states.at_hand(sub_group.index) as states:
                states.master.detach().copy_(values)
        finish_load(self)

    @property
    def lazytrain_homes(self) -> ParameterHomes:
        """Where the low-precision weights lie."""
        return self._lt_homes

    @property
    def lazytrain_gradients(self) -> GradientStore:
        """Where gradients accumulate."""
        return self._lt_gradients

    def lazytrain_weights_changed(self) -> None:
        """Weights were written where they lie: what is on the device is fetched anew."""
        if self._lt_one_rank:
            for block in self._lt_layout.blocks:
                self._lt_store.updated(block.index)

    def lazytrain_without_gradient(self) -> list[Parameter]:
        """Trainable parameters without a gradient in the step under way (with more ranks: none are named)."""
        return self._lt_gradients.missing(self._lt_norm_order) if self._lt_one_rank else []

    def lazytrain_move(self, policy: Policy) -> Moves:
        """Between steps: bring everything to where `policy` has it. See `relocation.move`."""
        self.drain()
        return move(self, policy)

    def destroy(self) -> None:
        """End the updates under way and free everything, also after a failure (which is raised at the end)."""
        endings: list[Callable[[], Any]] = [self.drain]
        if self._lt_one_rank and hasattr(self, "_lt_store"):
            endings.append(self._lt_store.close)
        endings += [self._lt_states.close, self._lt_worker.close]
        endings += [partial(unguard_state, self.optimizer), super().destroy]
        failure: BaseException | None = None
        for end in endings:
            try:
                end()
            except BaseException as error:
                failure = failure or error  # the later ones come of it, or say it again
        if failure is not None:
            raise failure


def _draining(name: str) -> Callable[..., Any]:
    upstream = getattr(DeepSpeedZeroOptimizer_Stage3, name)

    def observer(self: LazyStage3, *args: Any, **kwargs: Any) -> Any:
        self.drain()
        return upstream(self, *args, **kwargs)

    observer.__name__ = name
    observer.__doc__ = upstream.__doc__
    return observer


for _name in OBSERVERS:
    setattr(LazyStage3, _name, _draining(_name))
