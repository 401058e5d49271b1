"""DeepSpeed's parameter coordinator, replaced: which block is needed now, and what the policy says to fetch next.

Upstream records a trace and prefetches by element count; here DeepSpeed's hooks only tell where execution is. A block
is entered when the first of its modules (or of its own parameters) is needed. A different order, a skipped or a
repeated block needs no special care: what is not there is fetched on demand, what was prefetched in vain is evicted
when its slot is needed or at the end of the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator, iter_params
from deepspeed.utils import z3_leaf_module
from torch.nn import Module, Parameter

from lazytrain_ds.runtime.device.base import Device
from lazytrain_ds.runtime.inference import KeptForInference
from lazytrain_ds.runtime.parameters import ParameterStore
from lazytrain_ds.runtime.policy import BlockAction, Policy

__all__ = ["LazyCoordinator"]

OUTLASTING = "parameters used around the blocks"


def in_backward() -> bool:
    """Whether the calling thread executes an autograd graph (then a module's forward is a recomputation)."""
    return torch._C._current_graph_task_id() != -1


class LazyCoordinator(PartitionedParameterCoordinator):
    """Executes a Policy at DeepSpeed's fetch and release points (one rank). `bind` comes after construction.

    A *visit* is one use of a block: forward, re-run or backward. It begins with the first need of the block and ends
    with its post-hook, or, for a group of modules (embedding, head), when another visit begins.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store: ParameterStore | None = None
        self.policy: Policy | None = None
        self._root: Module | None = None
        self._units: dict[int, tuple[int, ...]] = {}
        self._owner_of: dict[int, int] = {}
        self._block_of_module: dict[int, int] = {}
        self._whole_blocks: set[int] = set()
        self._visit: tuple[str, int] | None = None
        self._action = BlockAction()
        self._lent: set[int] = set()
        self._containers: list[Module] = []
        self._outlasting: list[Parameter] = []
        self._deferred: int | None = None
        self._training_pass = True
        self._kept: KeptForInference | None = None
        self._since = 0.0
        self.device: Device | None = None
        self.on_visit: Callable[[str, int, float, float], None] | None = None
        self.on_memory: Callable[[int], None] | None = None
        self.on_backward: Callable[[int], None] | None = None
        self.make_room: Callable[[int], None] | None = None
        self._lock = threading.RLock()

    def bind(
        self,
        root: Module,
        store: ParameterStore,
        policy: Policy,
        block_modules: dict[int, Module],
        owner_of: dict[int, int],
    ) -> None:
        """`block_modules`: the module whose forward is the block, for blocks that are one module.

        `owner_of`: id(module) -> block that the module belongs to, for every module with parameters.
        """
        self.store, self.policy, self._root = store, policy, root
        self._kept = KeptForInference(store)
        self._owner_of = dict(owner_of)
        self._block_of_module = {id(module): block for block, module in block_modules.items()}
        self._whole_blocks = set(block_modules)
        self._containers = [
            module
            for module in root.modules()
            if id(module) not in owner_of or module is root or self._holds_blocks(module)
        ]
        self._units.clear()

    def _holds_blocks(self, module: Module) -> bool:
        inside = (id(child) in self._block_of_module for child in module.modules())
        return id(module) not in self._block_of_module and any(inside)

    # -- no trace ----------------------------------------------------------------------------------------------
    def is_complete_trace(self) -> bool:
        return False

    def is_record_trace(self) -> bool:
        return False

    def is_invalid_trace(self) -> bool:
        return True

    def trace_prologue(self, sub_module: Module) -> None:
        return None

    def reset_step(self) -> None:
        """Root forward begins: what an earlier forward left behind (no backward came) is let go."""
        if self.store is None or in_backward():
            return
        # Fetch and release run under DeepSpeed's no_grad, so the mode of this forward has to be noted here.
        self._training_pass = torch.is_grad_enabled()
        self._release_unused()

    # -- fetch -------------------------------------------------------------------------------------------------
    def _units_of(self, module: Module) -> tuple[int, ...]:
        """Blocks that own the parameters `module` uses directly (external ones included)."""
        units = self._units.get(id(module))
        if units is None or module.__dict__.get("_external_params"):
            parameters = iter_params(module, recurse=z3_leaf_module(module))
            units = tuple(dict.fromkeys(self.store.block_of[parameter.ds_id] for parameter in parameters))
            self._units[id(module)] = units
        return units

    @torch.no_grad()
    def fetch_sub_module(self, current_submodule: Module, forward: bool) -> None:
        if self.store is None:  # during DeepSpeed's own construction nothing is planned yet
            super().fetch_sub_module(current_submodule, forward)
            return
        with self._lock:
            phase = "backward" if in_backward() else "forward"
            block = self._block_of_module.get(id(current_submodule))
            if block is not None:
                if phase == "backward" and not forward and self.policy.reruns_before_backward(block):
                    self._deferred = block  # its segment is re-run first; its own parameters would only wait in a slot
                    return
                self._enter(phase, block)
            for unit in self._units_of(current_submodule):
                self._use(phase, self._owner_of.get(id(current_submodule), unit), unit)

    def _use(self, phase: str, owner: int, unit: int) -> None:
        """A module of block `owner` needs the parameters of `unit`."""
        if self._deferred is not None and owner == self._deferred:
            self._enter(phase, owner)
        inside = self._visit is not None and self._visit[1] in self._whole_blocks
        if not inside and owner not in self._whole_blocks:
            self._enter(phase, owner)
        if self._visit is None or unit != self._visit[1]:
            self._lent.add(unit)
        self.store.need(unit)
        self.store.blocks[unit].in_use = True

    def _enter(self, phase: str, block: int) -> None:
        """A visit begins: the one before ends, and what the policy says is issued."""
        if self._visit == (phase, block):
            return
        self._leave(more_backward=phase != "forward")
        if block == self._deferred:
            self._deferred = None
        self._visit = (phase, block)
        if phase == "forward" and not self._training_pass:
            self._kept.make_room(self.policy)
        else:
            self._kept.let_go()
        if phase == "forward":
            self._action = self.policy.before_forward(block)
        elif phase == "rerun":
            self._action = self.policy.before_rerun(block)
        else:
            self._action = self.policy.before_backward(block)
        self.store.issue(block, must=True)
        ahead = self._action.fetch_ahead if self._training_pass or phase != "forward" else ()
        for unit in (*self._action.fetch, *ahead):
            if not self.store.issue(unit):
                break  # no slot is free: later ones would not find one either, and order matters
        if self._training_pass:  # the plan counts no idle slots; forwards without gradient count them as in use
            self.store.trim_slots()
        if phase == "backward" and self.on_backward is not None:
            self.on_backward(block)
        self.store.need(block)
        if phase == "backward" and self.make_room is not None:
            self.make_room(block)
        self.store.blocks[block].in_use = True
        self._since = time.perf_counter()  # waiting for the parameters is a stall, not compute
        if self.device is not None:
            try:
                own_bytes = self.device.visit_begins(phase, block)
            except BaseException:  # out of memory: it has not begun
                self._visit = None
                raise
            if own_bytes and self.on_memory is not None:
                self.on_memory(self.device.ledger.live_bytes + own_bytes)

    def _leave(self, more_backward: bool = False) -> None:
        """The visit under way ends: blocks not held until their next use are released.

        `more_backward`: another block's backward comes next, so this one was not the last.
        """
        if self._visit is None:
            return
        phase, block = self._visit
        self._end_visit()
        if phase == "forward" and not self._training_pass:
            gone = {block, *self._lent}
        else:
            gone = set(self._action.release) | {unit for unit in self._lent if unit not in self._planned_units(block)}
        self._lent.clear()
        self._action = BlockAction()
        for unit in gone:
            self.store.blocks[unit].in_use = False
            if phase == "backward" and (unit > 0 or more_backward):
                self._let_outlast(unit)
            if phase == "forward" and not self._training_pass:
                self._kept.offer(unit, self.policy)
            self.store.release(unit)

    def _end_visit(self) -> None:
        """The compute of the visit under way has been issued (on a device that plays its speed: is over)."""
        if self._visit is None:
            return
        phase, block = self._visit
        self._visit = None
        took = self.device.visit_ends() if self.device is not None else None
        if self.on_visit is not None and not (self.device is not None and self.device.times_later):
            start, end = took or (self._since, time.perf_counter())
            self.on_visit(phase, block, start, end)

    def _let_outlast(self, unit: int) -> None:
        """What a module around the blocks uses of `unit` gets a copy of its own until this backward ends.

        Such a parameter may have been used before the first block, so that its gradient is accumulated, with the full
        shape, after everything else; or after the last block, so that its saved value is used before any other visit.
        Block 0 needs no care at its last visit; its first may be that of the model's own parameters, before the head's.
        """
        for module in self._containers:
            for parameter in iter_params(module, recurse=False):
                if (
                    self.store.block_of[parameter.ds_id] == unit
                    and parameter.requires_grad
                    and self.store.view_of(parameter.data) is not None
                ):
                    self.store.device.charge(parameter.ds_numel * parameter.element_size(), OUTLASTING)
                    parameter.data = parameter.data.clone()
                    self._outlasting.append(parameter)

    def _planned_units(self, block: int) -> tuple[int, ...]:
        """Owners that the plan knows `block` borrows from: their release is the plan's."""
        return tuple(owner for borrower, owner in self.policy.instance.borrows if borrower == block)

    @contextmanager
    def hold(self, block: int) -> Iterator[None]:
        """Parameters of `block` are present and stay: a visit of its own (re-run) unless it is being visited."""
        interrupted = None
        with self._lock:
            own = self._visit is not None and self._visit[1] == block and self._visit[0] != "forward"
            if block == self._deferred:
                self._enter("backward", block)
                own = True
            if not own:
                if self._deferred is None and self._visit is not None and self._visit[0] == "backward":
                    # In the middle of that block's backward, which goes on afterwards with its parameters.
                    interrupted = self._visit, self._action, self._lent
                    self._visit, self._lent = None, set()
                self._enter("rerun" if in_backward() else "forward", block)
            self.store.need(block)
            self.store.blocks[block].holds += 1
        try:
            yield
        finally:
            with self._lock:
                self.store.blocks[block].holds -= 1
                if not own:
                    self._leave()
                    if self._deferred == block + 1:  # the last block of the segment: now its own backward begins
                        self._enter("backward", self._deferred)
                if interrupted is not None:
                    self._visit, self._action, self._lent = interrupted

    def backward_begins(self, block: int) -> None:
        """What `block`'s backward was deferred for is done (also where nothing had to be re-run)."""
        with self._lock:
            if self._deferred == block:
                self._enter("backward", block)

    # -- release -----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def release_sub_module(self, submodule: Module, forward: bool = False) -> None:
        if self.store is None:
            super().release_sub_module(submodule, forward=forward)
            return
        with self._lock:
            if forward and in_backward():
                return  # a recomputation: the block stays until its post-backward
            block = self._block_of_module.get(id(submodule))
            if block is not None and self._visit == ("forward" if forward else "backward", block):
                self._leave()
            if forward and submodule is self._root and not self._training_pass:
                if self._visit is not None:  # the last block is a group of modules, whose visit nothing else ends
                    self._kept.offer(self._visit[1], self.policy)
                self._release_unused()

    def _release_unused(self) -> None:
        for parameter in self._outlasting:
            self.store.device.ledger.discharge(parameter.ds_numel * parameter.element_size(), OUTLASTING)
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        self._outlasting.clear()
        self._end_visit()
        while self.device is not None and self.device.visit_ends() is not None:
            pass  # visits that an exception left open
        self._action = BlockAction()
        self._lent.clear()
        self._deferred = None
        for block in self.store.blocks:
            if not block.holds:
                block.in_use = False
                self.store.release(block.index)

    @torch.no_grad()
    def release_and_reset_all(self, module: Module) -> None:
        if self.store is None:
            super().release_and_reset_all(module)
            return
        with self._lock:
            self._release_unused()
            self.store.release_all()
        for parameter in iter_params(module, recurse=True):
            parameter.ds_active_sub_modules.clear()
            if parameter.ds_status is ZeroParamStatus.AVAILABLE:  # gathered by someone else and not given back
                parameter.partition()

    @torch.no_grad()
    def release_backward_leftovers(self) -> None:
        """End of a backward: blocks whose post-backward never fired (their input needs no gradient) are released."""
        if self.store is None:
            super().release_backward_leftovers()
            return
        with self._lock:
            self._release_unused()
