"""ActivationRuntime: carries out each block's ActivationAction inside an engine's forward and backward."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lazytrain_ds.errors import PlanError
from lazytrain_ds.runtime.activations import custom_functions
from lazytrain_ds.runtime.activations.counters import ActivationCounters
from lazytrain_ds.runtime.activations.frame import Frame, ParameterAccess, unpack
from lazytrain_ds.runtime.activations.mover import DEFAULT_STAGING_BYTES, Mover, OnStall, OnTask, Store
from lazytrain_ds.runtime.activations.takeover import Takeover, installation, owned
from lazytrain_ds.runtime.activations.wrapping import BlockForward, is_compiled
from lazytrain_ds.runtime.device.base import Device
from lazytrain_ds.runtime.policy import ActivationAction
from lazytrain_ds.runtime.selective import find_operators, linear_installation
from lazytrain_ds.workload.menu import MINIMUM_OFFLOAD_BYTES

__all__ = ["KEEP", "ActivationRuntime"]

logger = logging.getLogger(__name__)

KEEP = ActivationAction(kind="keep", ops=(), boundary="device", saved_tier="device", lead=1)
"""Everything stays on the device: what `None` stands for."""


def upstream_offload_is_on() -> bool:
    """Whether this thread is inside `deepspeed...offload_activations.CheckpointHiddenStatesOffload`."""
    module = sys.modules.get("deepspeed.runtime.activation_checkpointing.offload_activations")
    return module is not None and bool(module._manager_stack())


class ActivationRuntime:
    """One per engine.

    Args:
        blocks: the module whose forward is block i, or None where a block is a group of modules (embedding, head):
            what those save is always kept. A module may stand for several blocks.
        device: memory ledger and copy channels.
        parameters: who fetches and releases parameters; None where they are always present.
        store: NVMe store; without one, nothing may be planned there.
        pin_memory: whether host buffers may be page-locked.
        on_task: called with (kind, block, channel, start, end, bytes) for each transfer and recomputation; copies are
            left to the device where it has an `on_copy`. on_stall: called with (channel, seconds) that compute waited.
        root: the model; modules of it that hold blocks matter for taking over its own checkpoint calls.
        minimum_offload_bytes: smaller saved tensors stay on the device, because a transfer costs more than it saves;
            boundaries always go where the plan says.
        host_cap_bytes, staging_bytes: bounds of the host buffers for offloaded activations and of those on their way
            to and from NVMe. allocate_staging: makes a buffer of that many bytes that the store can move directly.

    The engine calls, per micro-step: `micro_step_begins`, its forward inside `outer_context`, `backward_begins`,
    its backward, `micro_step_ends`; and `abort` after an exception anywhere in between. Two forwards may come before
    a backward, and none may come at all.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module | None],
        *,
        device: Device,
        parameters: ParameterAccess | None = None,
        store: Store | None = None,
        pin_memory: bool = False,
        on_task: OnTask | None = None,
        on_stall: OnStall | None = None,
        root: nn.Module | None = None,
        minimum_offload_bytes: int = MINIMUM_OFFLOAD_BYTES,
        host_cap_bytes: int | None = None,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        allocate_staging: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.blocks = list(blocks)
        self.device = device
        self.parameters = parameters
        self.counters = ActivationCounters()
        self.mover = Mover(
            device, self.counters, store, pin_memory=pin_memory, host_cap_bytes=host_cap_bytes,
            staging_bytes=staging_bytes, allocate_staging=allocate_staging, on_task=on_task, on_stall=on_stall,
        )  # fmt: skip
        self.keep = KEEP
        self.frame: Frame | None = None
        self._open: list[Frame] = []
        self._minimum_offload_bytes = minimum_offload_bytes
        self._actions: list[ActivationAction] = [KEEP] * len(self.blocks)
        self._operators: dict[tuple[str, ...], frozenset[Any]] = {}
        self._said: set[Any] = set()
        self._installed = False
        self.watches_backward = False
        modules = list(dict.fromkeys(module for module in self.blocks if module is not None))
        names = {id(module): name for name, module in root.named_modules()} if root is not None else {}
        holders = list(root.modules()) if root is not None else []
        self.takeover = Takeover(modules, holders)
        self._wrappers = []
        for module in modules:
            places = [index for index, other in enumerate(self.blocks) if other is module]
            name = names.get(id(module)) or f"{places[0]} ({type(module).__name__})"
            if is_compiled(module):
                self.say_once((name, "unplannable"), f"block {name}: it is compiled; its activations are kept")
            else:
                self._wrappers.append(BlockForward(self, module, places, name))

    def say_once(self, key: Any, message: str) -> None:
        """Log `message` unless `key` was said before."""
        if key not in self._said:
            self._said.add(key)
            logger.warning("activations: %s", message)

    # -- life --------------------------------------------------------------------------------------------------
    def install(self) -> None:
        """Wrap the blocks' forwards."""
        if not self._installed:
            installation.add()
            custom_functions.installation.add()
            linear_installation.add()
            for wrapper in self._wrappers:
                wrapper.install()
            self._installed = True

    def remove(self) -> None:
        """Undo `install` exactly; graphs made meanwhile can still be walked backward."""
        if self._installed:
            for wrapper in self._wrappers:
                wrapper.remove()
            linear_installation.remove()
            custom_functions.installation.remove()
            installation.remove()
            self._installed = False

    # -- the plan ----------------------------------------------------------------------------------------------
    def set_actions(self, actions: Sequence[ActivationAction | None]) -> None:
        """Use these from the next forward on; None keeps everything. PlanError names the block that cannot be."""
        resolved = [KEEP if action is None else action for action in actions]
        if len(resolved) != len(self.blocks):
            raise PlanError(f"activation plan: {len(resolved)} actions for {len(self.blocks)} blocks")
        for index, action in enumerate(resolved):
            self._check(index, action, resolved[index - 1] if index else None)
        self._actions = resolved
        if any(action.kind != "keep" for action in resolved):
            # The first checkpoint imports it, and that import keeps stack frames: what the caller's local variables
            # hold, a whole micro-step's activations among it, would stay for ever.
            importlib.import_module("torch._dynamo")
        self.watches_backward = any(
            tier in ("host", "nvme") for action in resolved for tier in (action.boundary, action.saved_tier)
        )

    def _check(self, index: int, action: ActivationAction, before: ActivationAction | None) -> None:
        def fail(reason: str) -> None:
            raise PlanError(f"activation plan: block {index}: {reason}")

        if action.kind not in ("keep", "selective", "boundary"):
            fail(f"unknown kind {action.kind!r}")
        if action.boundary not in ("device", "host", "nvme", "dropped"):
            fail(f"unknown boundary home {action.boundary!r}")
        if action.saved_tier not in ("device", "host", "nvme"):
            fail(f"unknown tier {action.saved_tier!r}")
        if action.lead < 0:
            fail(f"lead must be at least 0, is {action.lead}")
        if self.blocks[index] is None and (action.kind != "keep" or action.boundary == "dropped"):
            fail(f"it is a group of modules, which cannot be recomputed, but its kind is {action.kind!r}")
        if "nvme" in (action.boundary, action.saved_tier) and self.mover.store is None:
            fail("its activations are to go to NVMe, but there is no NVMe store")
        if action.kind == "selective":
            self.operators(action.ops)
        if action.boundary == "dropped" and (action.kind != "boundary" or before is None or before.kind != "boundary"):
            fail("a boundary may be dropped only between blocks that keep their boundary alone")

    def action(self, block: int) -> ActivationAction:
        """What to do with `block`."""
        return self._actions[block]

    def drops_next(self, block: int) -> bool:
        """Whether the block after `block` has its boundary dropped."""
        return block + 1 < len(self._actions) and self._actions[block + 1].boundary == "dropped"

    def operators(self, names: tuple[str, ...]) -> frozenset[Any]:
        """The operators of a selective choice."""
        if names not in self._operators:
            self._operators[names] = find_operators(names)
        return self._operators[names]

    # -- the micro-step ----------------------------------------------------------------------------------------
    def has_open_graphs(self) -> bool:
        """Whether an earlier forward's backward is still to come (or may come)."""
        return any(frame.living() for frame in self._open)

    def micro_step_begins(self) -> None:
        """A training forward is about to run."""
        if self.frame is not None:
            self.frame.left()
        self._open = [frame for frame in self._open if frame.living()]
        self.frame = Frame(self.mover, self.parameters, self.device.torch_device, self._minimum_offload_bytes)
        self._open.append(self.frame)

    @contextlib.contextmanager
    def outer_context(self) -> Iterator[None]:
        """Around the engine's whole forward: views of parameter slots are packed wherever they are saved."""
        frame = self.frame
        if upstream_offload_is_on():
            self.say_once(
                "upstream offload",
                "DeepSpeed's hidden-states offload context is on as well. Under ZeRO-3 it finds none of the tensors "
                "that it marked (it knows them by id, and ZeRO-3 re-wraps them), and the plan decides where "
                "boundaries go: remove it from the training script.",
            )
        if frame is None or not torch.is_grad_enabled():
            with owned(self.takeover):
                yield
            return
        view_of = frame.parameters.view_of if frame.parameters is not None else None
        with owned(self.takeover), custom_functions.outside_blocks(frame.keep_outside, unpack, view_of):
            yield
        frame.settle_outside()
        frame.left()
        self.counters.held_saved_bytes, self.counters.held_boundary_bytes = frame.held_bytes()

    def backward_begins(self) -> None:
        """A backward is about to run: bring back what is needed within its lead of the last block."""
        if self.watches_backward:
            for frame in self._open:
                frame.prefetch(len(self.blocks) - 1)

    def reached(self, block: int) -> None:
        """The backward of `block` is about to begin: bring back what is needed within its lead of it."""
        if self.watches_backward:
            for frame in self._open:
                frame.prefetch(block)

    def micro_step_ends(self) -> None:
        """A backward is over. What its graphs no longer hold is gone; what they still hold goes home."""
        for frame in self._open:
            frame.left()
            frame.drop_copies()
        self._open = [frame for frame in self._open if frame.living()]
        self.frame = None
        self.mover.advance()

    def abort(self) -> None:
        """After an exception: release everything, however much of the graphs is still referenced."""
        for frame in self._open:
            frame.close()
        self._open.clear()
        self.frame = None
        self.mover.settle()
