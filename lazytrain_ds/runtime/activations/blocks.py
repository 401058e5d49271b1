"""A block's forward, first run and second run, under an ActivationAction."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from lazytrain_ds.errors import UnsupportedError
from lazytrain_ds.runtime.activations.frame import ParameterHandle, unpack
from lazytrain_ds.runtime.activations.replay import (
    AutocastState,
    Buffers,
    PythonStates,
    RandomState,
    model_parallel_random_states,
    replayed_model_parallel_states,
)
from lazytrain_ds.runtime.activations.segments import DroppedHandle, OutputRecord, Segment, links_between
from lazytrain_ds.runtime.activations.storages import (
    BOUNDARY,
    SAVED,
    Handle,
    KeptAccount,
    KeptHandle,
    storage_key,
    version_of,
)
from lazytrain_ds.runtime.activations.structure import (
    copy_structure,
    is_stateful,
    tensors_among,
    tensors_in,
    tree_flatten,
    tree_unflatten,
)
from lazytrain_ds.runtime.activations.takeover import ours, owned
from lazytrain_ds.runtime.policy import ActivationAction
from lazytrain_ds.runtime.selective import KeptOutputs, out_of_place_bias, selective_contexts

if TYPE_CHECKING:
    from lazytrain_ds.runtime.activations.frame import Frame
    from lazytrain_ds.runtime.activations.wrapping import BlockForward

__all__ = ["BlockCall"]


class BlockCall:
    """One forward of one block. Lives as long as the graph needs it; holds no graph itself.

    `needed_at`: the block whose backward needs what this call sent away: its own, or the last one of its segment.
    """

    def __init__(self, wrapper: BlockForward, frame: Frame, block: int, action: ActivationAction) -> None:
        self.wrapper, self.frame, self.block, self.action = wrapper, frame, block, action
        self.needed_at = block
        self.fetched = False
        self.offloaded: list[weakref.ref[Any]] = []
        self._saved = KeptAccount(block, SAVED)
        self._inputs = KeptAccount(block, BOUNDARY)
        self.segment: Callable[[], Segment | None] = lambda: None
        self.links: dict[int, int] = {}
        self._boundary_positions: tuple[int, ...] = ()
        self._boundary_keys: frozenset[int] = frozenset()
        self._given_keys: frozenset[int] = frozenset()
        self._place: tuple[Segment, int] | None = None
        self._rerunnable = False
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._leaves: list[Any] = []
        self._spec: Any = None
        self._positions: list[int] = []
        self._unclaimed: list[int] = []
        self._packed: dict[int, list[Handle]] = {}
        self._given: dict[int, Handle] = {}
        self._boundary: dict[int, Handle] = {}
        self._buffers: list[Any] = []
        self._random: RandomState | None = None
        self._autocast: AutocastState | None = None
        self._tracker: dict[str, Any] | None = None
        self._python: PythonStates | None = None
        self._kept_outputs: KeptOutputs | None = None

    # -- the first run -----------------------------------------------------------------------------------------
    def run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward as the model sees it."""
        frame = self.frame
        self._classify(tensors_among(args, kwargs))
        if frame.mover.moving:
            frame.mover.advance()
        frame.calls.append(weakref.ref(self))
        frame.settle_outside()
        if self.action.kind == "keep":
            frame.previous = frame.previous_segment = None
            with torch.autograd.graph.saved_tensors_hooks(self._pack_hook(), unpack):
                output = self.wrapper.original(*args, **kwargs)
        else:
            output, place = self._run_checkpointed(args, kwargs)
        for account in (self._saved, self._inputs):
            frame.settle(account)
        self._saved = self._inputs = None  # from here on they belong to the handles
        outputs = tensors_in(output)
        frame.outputs = [OutputRecord.of(tensor) for tensor in outputs]
        hooks = []
        if self.wrapper.runtime.watches_backward:
            hooks.append(functools.partial(_reached, frame, self.block))
        if self.action.boundary == "dropped":  # after the other: what a re-run starts from is on its way by then
            hooks.append(functools.partial(_begins, frame, self.block, place))
        for hook in hooks:
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(hook)
        return output

    def _classify(self, tensors: list[torch.Tensor]) -> None:
        """Which inputs are the boundary: what the previous block returned, else the first floating-point tensor."""
        links = links_between(self.frame.outputs, tensors)
        floating = [index for index, tensor in enumerate(tensors) if tensor.is_floating_point()]
        self.links = {position: index for position, index in links.items() if position in floating}
        with_gradient = [index for index in floating if tensors[index].requires_grad]
        self._boundary_positions = tuple(self.links) or tuple((with_gradient or floating)[:1])
        keys = [storage_key(tensor) for tensor in tensors]
        self._boundary_keys = frozenset(keys[position] for position in self._boundary_positions)
        own = self.wrapper.own_storages(with_parameters=self.frame.parameters is None)
        self._given_keys = (frozenset(keys) | own) - self._boundary_keys

    def _pack_hook(self) -> Callable[[torch.Tensor], torch.Tensor | Handle]:
        if self.action.saved_tier == "device" == self._boundary_tier:
            return self.frame.keeper(self._saved, self._inputs, self._boundary_keys, self._given_keys)
        return self._pack

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Handle:
        """Pack hook for everything that a kept block saves."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return self.frame.keep_special(tensor)
        parameters = self.frame.parameters
        if parameters is not None and (view := parameters.view_of(tensor)) is not None:
            return ParameterHandle(view)
        key = storage_key(tensor)
        if key in self._boundary_keys:
            return self.frame.offload(tensor, self._inputs, self._boundary_tier, self)
        if key in self._given_keys:
            return KeptHandle(tensor)
        return self.frame.offload(tensor, self._saved, self.action.saved_tier, self)

    @property
    def _boundary_tier(self) -> Any:
        return "device" if self.action.boundary == "dropped" else self.action.boundary

    def _run_checkpointed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Segment, int] | None]:
        """The block's output, and its place in a segment if its boundary is dropped."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        wrapper, frame = self.wrapper, self.frame
        runtime = wrapper.runtime
        self._join_segment()
        self._first = (args, kwargs)
        self._spec = spec
        self._positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._leaves = [
            None if isinstance(leaf, torch.Tensor) else copy_structure(leaf) if is_stateful(leaf) else leaf
            for leaf in leaves
        ]
        self._tracker, self._python = model_parallel_random_states(), PythonStates.capture()
        self._rerunnable = runtime.drops_next(self.block)
        if self._rerunnable:
            self._prepare_rerun(tensors)
        versions = [version_of(tensor) for tensor in tensors]
        copies = [] if wrapper.proven else [tensor.detach().clone() for tensor in tensors]
        buffers = wrapper.buffers.before()
        context: dict[str, Any] = {}
        if self.action.kind == "selective":
            self._kept_outputs = KeptOutputs(runtime.operators(self.action.ops), self._keep_output, frame.device)
            context["context_fn"] = functools.partial(selective_contexts, self._kept_outputs)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(self._pack_input, unpack),
                out_of_place_bias() if self._kept_outputs is not None else contextlib.nullcontext(),
                ours(),
            ):
                output = checkpoint(self._run, *tensors, use_reentrant=False, preserve_rng_state=True, **context)
        finally:
            if self._kept_outputs is not None:
                self._kept_outputs.keep = None  # it is bound to this call, which holds the outputs: a cycle
        self._buffers = wrapper.buffers.after(buffers)
        self._check_inputs(tensors, versions, copies)
        wrapper.proven = True
        if self._kept_outputs is not None:
            self._kept_outputs.watch(tensors_in(output))
            for reason in self._kept_outputs.dropped:
                message = f"block {wrapper.name}: the output of {reason} cannot be kept and is recomputed"
                runtime.say_once((wrapper.name, reason), message)
        frame.previous = self if self._rerunnable else None
        place, self._place = self._place, None  # the segment owns its calls, not the other way round
        frame.previous_segment = place[0] if place is not None else None
        return output, place

    def _check_inputs(self, tensors: list[torch.Tensor], versions: list[int], copies: list[torch.Tensor]) -> None:
        """What autograd was told to save must not have changed; where it has, the second run gets `copies`."""
        wrapper = self.wrapper
        for index, tensor in enumerate(tensors):
            if version_of(tensor) == versions[index]:
                continue
            if not copies:
                raise UnsupportedError(
                    f"block {wrapper.name} changed its input in place in this call, but not in its first one, so its "
                    'activations cannot be recomputed. Set lazytrain.activations to "keep_all", or make the change '
                    "out of place."
                )
            for handle in self._packed.get(storage_key(tensor), ()):
                handle.replace(copies[index])
            wrapper.cannot_be_planned("it changes its input in place")
        self._packed.clear()

    def _join_segment(self) -> None:
        """Take a place behind the previous block if this block's boundary is to be dropped and can be."""
        if self.action.boundary != "dropped":
            return
        frame = self.frame
        previous = frame.previous
        if previous is None or not self.links:
            self.wrapper.runtime.say_once(
                (self.wrapper.name, "boundary"),
                f"block {self.wrapper.name}: its input is not what the block before it returned, so it cannot be made "
                "again and is kept on the device",
            )
            return
        segment = frame.previous_segment or Segment(previous)
        self._place = (segment, segment.extend(self))
        self._unclaimed = list(self.links)

    def _prepare_rerun(self, tensors: list[torch.Tensor]) -> None:
        """Remember what is needed to run this block again without a graph: for the next one's dropped input."""
        self._random = RandomState.capture(self.frame.device)
        self._autocast = AutocastState.capture(self.frame.device)
        replaced = self.links if self._place is not None else self._boundary_positions
        for position, tensor in enumerate(tensors):
            if position not in replaced:
                self._given[position] = self._pack_given(tensor)
            elif self._place is None:
                self._boundary[position] = self._pack_boundary(tensor)

    def _pack_input(self, tensor: torch.Tensor) -> torch.Tensor | Handle:
        """Pack hook for the checkpoint's inputs: the only things saved outside it."""
        if isinstance(tensor, Parameter):
            return tensor
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return self._noted(tensor, self.frame.keep_special(tensor))
        parameters = self.frame.parameters
        if parameters is not None and (view := parameters.view_of(tensor)) is not None:
            return ParameterHandle(view)
        if storage_key(tensor) not in self._boundary_keys:
            return self._pack_given(tensor)
        if self._place is not None:
            for position in self._unclaimed:
                if self._is_input(tensor, position):
                    self._unclaimed.remove(position)
                    return DroppedHandle(*self._place, position)
        return self._pack_boundary(tensor)

    def _pack_given(self, tensor: torch.Tensor) -> Handle:
        return self._noted(tensor, KeptHandle(tensor))

    def _pack_boundary(self, tensor: torch.Tensor) -> Handle:
        handle = self.frame.offload(tensor, self._inputs, self._boundary_tier, self)
        return self._noted(tensor, handle)

    def _noted(self, tensor: torch.Tensor, handle: Handle) -> Handle:
        if not self.wrapper.proven and tensor.layout is torch.strided:
            self._packed.setdefault(storage_key(tensor), []).append(handle)
        return handle

    def _is_input(self, tensor: torch.Tensor, position: int) -> bool:
        record = self.frame.outputs[self.links[position]]
        return record is not None and record.matches(tensor)

    def _keep_output(self, tensor: torch.Tensor) -> Handle:
        return self.frame.offload(tensor, self._saved, self.action.saved_tier, self)

    def boundary(self) -> dict[int, torch.Tensor]:
        """The inputs that were kept for re-running from here."""
        return {position: handle.restore() for position, handle in self._boundary.items()}

    def prefetch(self) -> bool:
        """Start bringing back what was sent away, in the order of its use; False where memory ran short."""
        for reference in reversed(self.offloaded):
            storage = reference()
            if storage is not None and not storage.fetch():
                return False
        self.fetched = True
        return True

    # -- the second run ----------------------------------------------------------------------------------------
    def _run(self, *tensors: torch.Tensor) -> Any:
        """What `checkpoint` runs: the forward, and in backward the recomputation."""
        if self._first is not None:
            args, kwargs = self._first
            self._first = None
            return self.wrapper.original(*args, **kwargs)
        counters = self.frame.mover.counters
        counters.recomputes += 1
        started = time.perf_counter()
        inputs = dict(enumerate(tensors))
        try:
            with self._again():
                args, kwargs = self._arguments(inputs)
                return self.wrapper.original(*args, **kwargs)
        finally:  # early stop leaves by an exception
            self.frame.mover.report("recompute", self.block, "compute", started, 0)

    def rerun(self, inputs: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """The block's outputs again, without a graph. Calls the saved forward, never the module: see below.

        The module's own hooks would reset DeepSpeed's count of gradients still to come, and the block would never be
        released (DeepSpeed parameter_offload.py, `_post_backward_module_hook`).
        """
        self.frame.mover.counters.reruns += 1
        assert self._random is not None and self._autocast is not None
        given = {position: handle.restore() for position, handle in self._given.items()}
        with torch.no_grad(), self._again(), self._random.replayed(), self._autocast.replayed():
            args, kwargs = self._arguments({**given, **inputs})
            return tensors_in(self.wrapper.original(*args, **kwargs))

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """Everything that makes a later run equal to the first one, except what `checkpoint` replays itself."""
        runtime = self.wrapper.runtime
        parameters = self.frame.parameters
        with contextlib.ExitStack() as stack:
            stack.enter_context(owned(runtime.takeover, inside_block=True))
            if parameters is not None:
                stack.enter_context(parameters.hold(self.block))
            if self._python is not None:
                stack.enter_context(self._python.replayed())
            if self._buffers:
                stack.enter_context(Buffers.replayed(self._buffers))
            if self._tracker is not None:
                stack.enter_context(replayed_model_parallel_states(self._tracker))
            if self._kept_outputs is not None:
                stack.enter_context(out_of_place_bias())
            yield

    def _arguments(self, tensors: dict[int, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments around `tensors`, with fresh containers and fresh copies of caches."""
        leaves = [copy_structure(leaf) if is_stateful(leaf) else leaf for leaf in self._leaves]
        for number, position in enumerate(self._positions):
            leaves[position] = tensors[number]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs


def _begins(frame: Frame, block: int, place: tuple[Segment, int] | None, gradient: torch.Tensor) -> None:
    """Tensor hook: the backward of a block with a dropped boundary begins.

    Its segment is re-run now: before the block's own parameters are brought, and before anything needs them. Left to
    the first unpacked tensor, that would be in the middle of its last module, whose parameters are in use by then.
    """
    if place is not None:
        segment, position = place
        segment.prepare(position)
    if frame.parameters is not None:
        frame.parameters.backward_begins(block)


def _reached(frame: Frame, block: int, gradient: torch.Tensor) -> None:
    """Tensor hook: the gradient has arrived at `block`'s output."""
    frame.prefetch(block)
