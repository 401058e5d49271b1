"""DeepSpeed's parameter coordinator, replaced: which block is needed now, and what the policy says to fetch next.

Upstream records a trace and prefetches by element count; here DeepSpeed's hooks only tell where execution is. A block
is entered when the first of its modules (or of its own parameters) is needed. A different order, a skipped or a
repeated block needs no special care: what is not there is fetched on demand, what was prefetched in vain is evicted
when its slot is needed or at the end of the step.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator, iter_params
from deepspeed.utils import z3_leaf_module
from torch.nn import Module

from lazytrain_ds.runtime.parameters import ParameterStore
from lazytrain_ds.runtime.policy import Policy

__all__ = ["LazyCoordinator"]


def in_backward() -> bool:
    """Whether the calling thread executes an autograd graph (then a module's forward is a recomputation)."""
    return torch._C._current_graph_task_id() != -1


class LazyCoordinator(PartitionedParameterCoordinator):
    """Executes a Policy at DeepSpeed's fetch and release points (one rank). `bind` comes after construction."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store: ParameterStore | None = None
        self.policy: Policy | None = None
        self._units: dict[int, tuple[int, ...]] = {}
        self._block_of_module: dict[int, int] = {}
        self._module_of_block: dict[int, Module] = {}
        self._owner_of: dict[int, int] = {}
        self._root: Module | None = None
        self._current: tuple[str, int] | None = None
        self._forward_block: int | None = None
        self._borrowed: dict[int, int] = {}
        self._training_pass = True
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
        self._owner_of = dict(owner_of)
        self._module_of_block = dict(block_modules)
        self._block_of_module = {id(module): block for block, module in block_modules.items()}
        self._units.clear()

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
        self._current = None
        self._forward_block = None
        self._borrowed.clear()
        for block in self.store.blocks:
            if block.passes and not block.holds:
                block.passes.clear()
                if not block.resident:
                    self.store.release(block.index)

    # -- fetch -------------------------------------------------------------------------------------------------
    def _units_of(self, module: Module) -> tuple[int, ...]:
        """Blocks that own the parameters `module` uses directly (external ones included)."""
        parameters = list(iter_params(module, recurse=z3_leaf_module(module)))
        units = self._units.get(id(module))
        if units is None or len(module.ds_external_parameters() or ()) > 0:
            owners = [self.store.block_of[parameter.ds_id] for parameter in parameters]
            units = tuple(dict.fromkeys(owners))
            self._units[id(module)] = units
        return units

    @torch.no_grad()
    def fetch_sub_module(self, current_submodule: Module, forward: bool) -> None:
        if self.store is None:  # during DeepSpeed's own construction nothing is planned yet
            super().fetch_sub_module(current_submodule, forward)
            return
        with self._lock:
            whole = self._block_of_module.get(id(current_submodule))
            if whole is not None:
                self._enter(whole)
            for unit in self._units_of(current_submodule):
                owner = self._owner_of.get(id(current_submodule), unit)
                if whole is None and owner not in self._module_of_block:
                    self._enter(owner)
                if unit != owner:
                    self._borrowed[unit] = owner
                self.store.need(unit)
                self.store.blocks[unit].passes.add("backward" if in_backward() else "forward")

    def _return_borrowed(self, entered: int) -> None:
        """Parameters lent to a block (tied weights) go back once another block is entered."""
        for unit, borrower in list(self._borrowed.items()):
            if borrower != entered:
                del self._borrowed[unit]
                if unit != entered:
                    self.store.blocks[unit].passes.clear()
                    self.store.release(unit)

    def _enter(self, block: int) -> None:
        """Execution reached `block`: issue what the policy says, once per pass."""
        backward = in_backward()
        here = ("backward" if backward else "forward", block)
        if self._current == here:
            return
        self._current = here
        self._return_borrowed(block)
        if not backward:
            self._leave_group(block)
            self._forward_block = block
        action = self.policy.before_backward(block) if backward else self.policy.before_forward(block)
        if block not in action.fetch and self.store.blocks[block].byte_count:
            self.store.issue(block, must=True)
        if not self._training_pass and not backward:
            fetch = tuple(index for index in action.fetch if index >= block)  # no backward follows this forward
        else:
            fetch = action.fetch
        for index in fetch:
            if not self.store.issue(index, must=index == block):
                break
        self.store.need(block)
        self.store.blocks[block].passes.add("backward" if backward else "forward")

    def _leave_group(self, entered: int) -> None:
        """A group of modules (embedding, head) has no post-forward of its own: it is left when another is entered."""
        left = self._forward_block
        if left is not None and left != entered and left not in self._module_of_block:
            self._leave_forward(left)

    def _leave_forward(self, block: int) -> None:
        keep = self.policy.before_forward(block).keep and self._training_pass
        last = block == len(self.store.blocks) - 1 and self._training_pass
        if not keep and not last:
            self.store.blocks[block].passes.discard("forward")
            self.store.release(block)

    # -- release -----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def release_sub_module(self, submodule: Module, forward: bool = False) -> None:
        if self.store is None:
            super().release_sub_module(submodule, forward=forward)
            return
        with self._lock:
            block = self._block_of_module.get(id(submodule))
            if forward:
                if in_backward():
                    return  # a recomputation: the block stays until its post-backward
                if block is not None:
                    self._leave_forward(block)
                if submodule is self._root and not self._training_pass:
                    self._release_unused()
            elif block is not None:
                self.store.blocks[block].passes.clear()
                self.store.release(block)

    def _release_unused(self) -> None:
        for block in self.store.blocks:
            if not block.holds:
                block.passes.clear()
                self.store.release(block.index)
        self._current = None
        self._forward_block = None
        self._borrowed.clear()

    @torch.no_grad()
    def release_and_reset_all(self, module: Module) -> None:
        if self.store is None:
            super().release_and_reset_all(module)
            return
        with self._lock:
            self.store.release_all()
            self._current = None
            self._forward_block = None
            self._borrowed.clear()
        for parameter in iter_params(module, recurse=True):
            parameter.ds_active_sub_modules.clear()
            if parameter.ds_status.name == "AVAILABLE":  # gathered by someone else and not given back
                parameter.partition()

    @torch.no_grad()
    def release_backward_leftovers(self) -> None:
        """End of a backward: blocks whose post-backward never fired (their input needs no gradient) are released."""
        if self.store is None:
            super().release_backward_leftovers()
            return
        with self._lock:
            self._release_unused()
