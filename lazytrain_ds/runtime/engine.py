"""The engine that a config with a "lazytrain" block gets: stock DeepSpeed's, planned before ZeRO-3 partitions.

`initialize` swaps the engine class in for one call of `deepspeed.initialize`; nothing stays patched afterwards.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero import stage3 as upstream_stage3
from deepspeed.utils import logger

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import LazyTrainError
from lazytrain_ds.runtime.activations import ActivationRuntime
from lazytrain_ds.runtime.activations.replay import Buffers
from lazytrain_ds.runtime.again import OUT_OF_MEMORY, Generators, MicroBatch, forget_attempt, without_frames
from lazytrain_ds.runtime.checkpoint import MappedCheckpointEngine, committed, recover, write_latest
from lazytrain_ds.runtime.console import Console
from lazytrain_ds.runtime.ladder import Ladder
from lazytrain_ds.runtime.optimizers import describe_optimizer, make_basic_optimizer
from lazytrain_ds.runtime.plans import PlanBook
from lazytrain_ds.runtime.progress import in_first_step, in_phase
from lazytrain_ds.runtime.relocation import can_move
from lazytrain_ds.runtime.replan import Replanner, make_replanner
from lazytrain_ds.runtime.setup import Setup, StoreAccess
from lazytrain_ds.runtime.stage3 import LazyStage3

__all__ = ["LazyTrainEngine", "initialize"]

_SWAP_LOCK = threading.RLock()
_PENDING = threading.local()


def initialize(
    block: LazyTrainConfig,
    original_initialize: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rewritten: dict[str, Any],
) -> Any:
    """`deepspeed.initialize` for a config with the block; `kwargs` already carries the `rewritten` config."""
    with _SWAP_LOCK:
        _PENDING.block = block
        upstream = deepspeed.DeepSpeedEngine
        deepspeed.DeepSpeedEngine = LazyTrainEngine
        try:
            return original_initialize(*args, **kwargs)
        finally:
            deepspeed.DeepSpeedEngine = upstream
            _PENDING.block = None


def _finish_at_exit(reference: weakref.ref[LazyTrainEngine]) -> None:
    """A script that ends without `engine.destroy()`: updates under way end before the interpreter and swap files go.

    A thread that comes back from the kernel into an interpreter that is gone aborts the process.
    """
    engine = reference()
    optimizer = engine.optimizer if engine is not None else None
    if isinstance(optimizer, LazyStage3):
        optimizer.drain()


class LazyTrainEngine(DeepSpeedEngine):
    """DeepSpeed's engine under a plan. `lazytrain_plan` and `lazytrain_instance` say what is executed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lt_config: LazyTrainConfig = _PENDING.block
        self._lt_book: PlanBook | None = None
        self._lt_setup: Setup | None = None
        self._lt_activations: ActivationRuntime | None = None
        self._lt_console: Console | None = None
        self._lt_replanner: Replanner | None = None
        self._lt_waiting_plan: Any = None
        self._lt_ladder: Ladder | None = None
        self._lt_buffers: Buffers | None = None
        self._lt_call: MicroBatch | None = None
        self._lt_micro_step_open = False
        data = None
        if self._lt_config.micro_batch == "auto":  # the loader is made with the micro-batch that the plan will have
            data, kwargs["training_data"] = kwargs.get("training_data"), None
        super().__init__(*args, **kwargs)
        if data:
            self.training_data = data
            self.training_dataloader = self.deepspeed_io(data)
        self._lt_console = Console(self)
        if self._lt_setup is not None:
            self._lt_console.plan(self._lt_setup.instance, self._lt_setup.plan, "placement")
            self._lt_console.notes(self._lt_book.notes)
            self._lt_replanner = make_replanner(self._lt_book, self._lt_config, self._lt_console.say)
            self._lt_console.say(describe_optimizer(self.basic_optimizer, self.client_optimizer is not None))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_lt_"):  # set before Module.__init__ has run, and never a submodule
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # -- what is executed --------------------------------------------------------------------------------------
    @property
    def lazytrain_plan(self) -> Any:
        """The Plan in force (None where this engine has no optimizer and so nothing to plan)."""
        return self._lt_book.plan if self._lt_book is not None else None

    @property
    def lazytrain_instance(self) -> Any:
        """The Instance that the plan in force was made for."""
        return self._lt_book.instance if self._lt_book is not None else None

    @property
    def lazytrain_timeline(self) -> Any:
        """The measured Timeline of the last optimizer step (None before the first)."""
        timelines = self._lt_book.monitor.timelines if self._lt_book is not None else ()
        return timelines[-1] if timelines else None

    # -- construction ------------------------------------------------------------------------------------------
    def zero_force_ds_cpu_optimizer(self) -> bool:
        return False  # any torch optimizer can be stepped sub-group by sub-group; which one runs is said below

    def zero_allow_untested_optimizer(self) -> bool:
        return True

    def _broadcast_model(self) -> None:
        if self.dp_world_size > 1:  # with one rank it does nothing, and fails on parameters without dimensions
            super()._broadcast_model()

    def _configure_basic_optimizer(self, model_parameters: Any) -> Any:
        chosen = make_basic_optimizer(self.optimizer_name(), self.optimizer_params(), model_parameters)
        return chosen if chosen is not None else super()._configure_basic_optimizer(model_parameters)

    @in_phase("moving parameters and states to where they live")
    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        if optimizer is None or isinstance(optimizer, DummyOptim):
            logger.info("lazytrain: no optimizer, so nothing is planned; this engine only runs forward passes")
            return super()._configure_zero_optimizer(optimizer)
        self._lt_book = PlanBook(self, self._lt_config)
        self._lt_ladder = Ladder(self._lt_book)
        self._lt_setup = self._lt_book.place(optimizer)
        stage3 = type("LazyStage3", (LazyStage3,), {"lazytrain": self._lt_setup})
        with _SWAP_LOCK:  # upstream imports the class from its module inside this method
            original = upstream_stage3.DeepSpeedZeroOptimizer_Stage3
            upstream_stage3.DeepSpeedZeroOptimizer_Stage3 = stage3
            try:
                wrapped = super()._configure_zero_optimizer(optimizer)
            finally:
                upstream_stage3.DeepSpeedZeroOptimizer_Stage3 = original
        self._lt_install_activations(wrapped)
        return wrapped

    def _lt_install_activations(self, optimizer: LazyStage3) -> None:
        setup = self._lt_setup
        access = (
            StoreAccess(setup.store, setup.coordinator)
            if setup.store is not None
            else self._lt_book.hook_access(optimizer)
        )
        modules = [setup.block_modules.get(block.index) for block in setup.resolved.table]
        self._lt_activations = ActivationRuntime(
            modules,
            device=setup.device,
            parameters=access,
            pin_memory=setup.device.pin_memory,
            root=self.module,
            allocate_staging=self._lt_book.empty_staging,
            on_task=self._lt_book.monitor.transfer_task,
            on_stall=self._lt_book.monitor.stall,
        )
        self._lt_activations.install()
        self._lt_finish_at_exit()
        if setup.coordinator is not None:
            setup.coordinator.on_backward = self._lt_activations.reached
        self._lt_use_plan()

    def _lt_use_plan(self) -> None:
        """Carry out the activation side of the plan in force from the next forward on."""
        store = self._lt_book.nvme_store  # opened when the first plan needs it
        if store is not self._lt_activations.mover.store:
            self._lt_activations.mover.store = store
            self._lt_finish_at_exit()  # exit handlers run last in, first out: ours has to come before the store's own
        self._lt_activations.set_actions(self._lt_book.actions())

    def _lt_adopt(self, instance: Any, plan: Any) -> Any:
        """Between optimizer steps: carry out another plan of the same numerics from here on; returns its `Moves`."""
        moves = self._lt_book.adopt(instance, plan, self.optimizer)
        self._lt_use_plan()
        return moves

    def _lt_finish_at_exit(self) -> None:
        atexit.register(_finish_at_exit, weakref.ref(self))

    # -- forward and backward ----------------------------------------------------------------------------------
    @in_first_step("the first forward")
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._lt_activations is None or not torch.is_grad_enabled():  # in eval mode a backward may come as well
            return super().forward(*inputs, **kwargs)
        self._lt_end_micro_step()
        if self._lt_book.replan_for(inputs, kwargs):
            self._lt_use_plan()
            self._lt_waiting_plan = None
            if self._lt_setup.device.torch_device.type == "cuda" and self._lt_setup.store is not None:
                self._lt_ladder.prepare()  # when it is needed, the device has no room, but the host has the time now
            if self._lt_replanner is not None:
                self._lt_replanner.plan_changed()
            self._lt_console.plan(self._lt_book.instance, self._lt_book.plan, "activations")
            self._lt_console.notes(self._lt_book.notes)
        if self._lt_setup.store is None:  # more ranks: one that ran again would leave the others waiting
            return self._lt_forward_once(inputs, kwargs)
        if self._lt_buffers is None:
            self._lt_buffers = Buffers(self.module)
        call = MicroBatch(self._lt_buffers, self._lt_setup.device.torch_device, inputs, kwargs)
        output = self._lt_forward(call, inputs, kwargs)
        call.ran(output)
        self._lt_call = call
        return output

    def _lt_forward_once(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._lt_activations.micro_step_begins()
        self._lt_micro_step_open = True
        try:
            with self._lt_activations.outer_context():
                return super().forward(*inputs, **kwargs)
        except BaseException:
            self._lt_abort()
            raise

    def _lt_forward(self, call: MicroBatch, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward; where the device runs out of memory in it, again under safer plans."""
        call.alone, depth = not self._lt_activations.has_open_graphs(), len(parameter_offload.FWD_MODULE_STACK)
        while True:
            try:
                return self._lt_forward_once(inputs, kwargs)
            except OUT_OF_MEMORY as error:
                failure = without_frames(error)
            # From here on nothing refers to the failed attempt, and its memory is free.
            forget_attempt(self, depth)
            self._lt_use_safer_plan("forward", failure, call.obstacle())
            call.restore()
            inputs, kwargs = call.args, call.kwargs

    def _lt_use_safer_plan(self, where: str, failure: BaseException, obstacle: str | None) -> None:
        """Out of device memory: put the next safer plan in force, or say why that does not help and what would."""
        ladder, book = self._lt_ladder, self._lt_book
        before, plan = book.plan, ladder.next()
        if plan is None:
            raise ladder.end(failure) from failure
        if obstacle is not None:
            raise ladder.restart(plan, where, obstacle, failure) from failure
        self._lt_adopt(book.instance, plan)
        ladder.climbed()
        book.ran_out_under(before)
        if self._lt_replanner is not None:
            self._lt_replanner.plan_changed()
        self._lt_console.say(ladder.line(before, plan, where))

    def _backward_prologue(self) -> None:
        """The gradient has arrived at the model's output, by `engine.backward` or by the user's own `backward`."""
        super()._backward_prologue()
        if self._lt_activations is not None:
            self._lt_activations.backward_begins()

    @in_first_step("the first backward")
    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        counts = self._lt_hook_counts() if retain_graph else []
        call, self._lt_call = self._lt_call, None
        if call is None or self._lt_setup.store is None:
            result = self._lt_backward_once(loss, retain_graph, scale_wrt_gas)
        else:
            gradients = self.optimizer.lazytrain_gradients
            gradients.backward_begins()
            try:
                result = self._lt_backward(call, loss, retain_graph, scale_wrt_gas)
            finally:
                gradients.backward_begins()
        for attributes, name, count in counts:  # upstream counts them down to 0 and then fetches nothing any more
            attributes[name] = count
        if not retain_graph:
            self._lt_end_micro_step()
        return result

    def _lt_backward_once(self, loss: Any, retain_graph: bool, scale_wrt_gas: bool) -> Any:
        try:
            return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        except BaseException:
            self._lt_abort()
            raise

    def _lt_backward(self, call: MicroBatch, loss: Any, retain_graph: bool, scale_wrt_gas: bool) -> Any:
        """The backward; where the device runs out of memory in it, the whole micro-batch again under safer plans."""
        position, depth = call.position_of(loss), len(parameter_offload.FWD_MODULE_STACK)
        generators = Generators.capture(self._lt_setup.device.torch_device)
        backwards = self._unmanaged_backward_count
        value = loss.detach()
        while True:
            try:
                return self._lt_backward_once(loss, retain_graph, scale_wrt_gas)
            except OUT_OF_MEMORY as error:
                failure = without_frames(error)
            loss = None
            self._unmanaged_backward_count = backwards
            forget_attempt(self, depth)
            self._lt_use_safer_plan("backward", failure, call.obstacle(position, retain_graph))
            self.optimizer.lazytrain_gradients.again()
            call.restore()
            output = self._lt_forward(call, call.args, call.kwargs)
            loss = call.returned(output, position, value)
            del output
            generators.set()

    def _lt_hook_counts(self) -> list[tuple[dict[str, Any], str, int]]:
        """How often DeepSpeed's hooks of each module have to fire in the coming backward."""
        names = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
        attributes = [module.__dict__ for module in self.module.modules()]
        return [(entries, name, entries[name]) for entries in attributes for name in names if name in entries]

    def _lt_end_micro_step(self) -> None:
        if self._lt_micro_step_open:
            self._lt_micro_step_open = False
            self._lt_activations.micro_step_ends()

    def _lt_abort(self) -> None:
        """An exception went through forward or backward: nothing of this micro-step stays."""
        if self._lt_micro_step_open:
            self._lt_micro_step_open = False
            self._lt_activations.abort()
        if self._lt_setup is not None and self._lt_setup.store is not None:
            self._lt_setup.store.release_all()

    def step(self, lr_kwargs: Any = None) -> None:
        at_boundary = self.is_gradient_accumulation_boundary()
        self._lt_end_micro_step()
        if at_boundary and self.global_steps == 0 and isinstance(self.optimizer, LazyStage3):
            untrained = self.optimizer.lazytrain_without_gradient()
            self._lt_console.untrained([self.param_names[parameter] for parameter in untrained])
        super().step(lr_kwargs)
        if self._lt_book is not None:
            self._lt_book.device.report_times()
            self._lt_book.monitor.micro_step += 1
        if at_boundary and self._lt_book is not None:
            timeline = self._lt_book.monitor.step_ended(self.global_steps)
            self._lt_console.step_done()
            self._lt_replan(timeline)

    def _lt_replan(self, timeline: Any) -> None:
        """After an optimizer step: where the plan turned out to be off, go on with another one."""
        if self._lt_replanner is None:
            return
        found = self._lt_waiting_plan or self._lt_replanner.step_done(timeline)
        self._lt_waiting_plan = None
        if found is None:
            return
        if not can_move(self.optimizer):
            self._lt_waiting_plan = found  # the script holds parameters gathered across its step
            return
        instance, plan = found
        changes = plan.blocks != self._lt_book.plan.blocks
        try:
            moves = self._lt_adopt(instance, plan)
        except LazyTrainError as error:
            self._lt_replanner.failed(error)
            return
        if changes:
            self._lt_console.plan(instance, plan, f"solved again; {moves}")

    # -- checkpoints -------------------------------------------------------------------------------------------
    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if type(self.checkpoint_engine) is TorchCheckpointEngine and self._lt_setup is not None:
            self.checkpoint_engine = MappedCheckpointEngine(self._config)

    @in_phase("saving a checkpoint")
    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        arguments = {"client_state": client_state or {}, "exclude_frozen_parameters": exclude_frozen_parameters}
        if not isinstance(self.checkpoint_engine, MappedCheckpointEngine) or not save_dir:
            return super().save_checkpoint(save_dir, tag, save_latest=save_latest, **arguments)
        tag = str(tag if tag is not None else f"global_step{self.global_steps}")
        self._checkpoint_tag_validation(tag)
        recover(save_dir)
        with committed(save_dir, tag, self.global_rank == 0, dist.barrier) as incomplete:
            result = super().save_checkpoint(save_dir, incomplete, save_latest=False, **arguments)
        if save_latest and self.global_rank == 0:
            write_latest(save_dir, tag)
        dist.barrier()
        return result

    def _save_zero_checkpoint(self, save_path: str, tag: str) -> None:
        rewritten, self.config = self.config, dict(self.config)  # a file that reads without LazyTrain installed
        try:
            super()._save_zero_checkpoint(save_path, tag)
        finally:
            self.config = rewritten

    def _get_zero_frozen_param_attributes(self, attr_func: Callable[[Any], Any]) -> Any:
        if not isinstance(self.optimizer, LazyStage3):
            return super()._get_zero_frozen_param_attributes(attr_func)
        with self.optimizer.lazytrain_homes.frozen_shown():
            return super()._get_zero_frozen_param_attributes(attr_func)

    def load_module_state_dict(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        fragments = checkpoint.get(FROZEN_PARAM_FRAGMENTS)
        if not fragments or not isinstance(self.optimizer, LazyStage3):
            super().load_module_state_dict(checkpoint, *args, **kwargs)
            return
        homes = self.optimizer.lazytrain_homes
        # Upstream copies into ds_tensor, which is an empty shell for those on NVMe.
        elsewhere = {self.param_names[p]: p.ds_tensor.new_empty(0) for p in homes.frozen_on_nvme()}
        here = {**checkpoint, FROZEN_PARAM_FRAGMENTS: {**fragments, **elsewhere}}
        super().load_module_state_dict(here, *args, **kwargs)
        homes.load_frozen(lambda parameter: fragments[self.param_names[parameter]])
        self.optimizer.lazytrain_weights_changed()

    @in_phase("loading a checkpoint")
    def load_checkpoint(self, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        if self.global_rank == 0:
            recover(load_dir)
        dist.barrier()
        return super().load_checkpoint(load_dir, *args, **kwargs)

    def destroy(self) -> None:
        """Free everything: device bytes, host threads, swap files; the model gets its plain forwards back."""
        try:
            if self._lt_activations is not None:
                self._lt_activations.abort()
                self._lt_activations.remove()
                self._lt_activations = None
        finally:
            try:
                super().destroy()
            finally:
                if self._lt_book is not None:
                    self._lt_book.close()
