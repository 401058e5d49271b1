"""Runs a shadow of a model once, on fake or real tensors, and sorts what happens by block."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lazytrain_ds.workload.blocks import BlockTable
from lazytrain_ds.workload.operators import Operator, OperatorTrace, Storages
from lazytrain_ds.workload.records import BlockTrace, ForwardTrace
from lazytrain_ds.workload.values import KnownValues


def scalar_loss(output: Any) -> torch.Tensor | None:
    """The loss in a model's output: a scalar as it is; logits get a cross-entropy, as a training script would apply.

    None when there is neither (then only what happened inside the model counts).
    """
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    tensors = [tensor for tensor in tensors if tensor.requires_grad]
    for tensor in tensors:
        if tensor.dim() == 0:
            return tensor
    for tensor in tensors:
        if tensor.dim() >= 2:
            logits = tensor.flatten(0, -2).float()
            labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
            return nn.functional.cross_entropy(logits, labels)
    return None


@dataclass
class _Region:
    """What happened in one block (all its calls together), and what its backward needs to be run."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    input_serials: set[int] = field(default_factory=set)
    boundary_serials: set[int] = field(default_factory=set)
    boundary_bytes: int = 0
    output_bytes: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    needs_input: bool = False
    forward: list[Operator] = field(default_factory=list)
    backward: tuple[Operator, ...] = ()
    rerun_operators: int = 0
    transient_forward_bytes: int = 0
    transient_backward_bytes: int = 0
    chained: bool = False
    calls: int = 0
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    like: _Region | None = None

    def copy_from(self, other: _Region) -> None:
        """The costs of a block that is alike; where its input comes from stays its own."""
        self.output_bytes, self.kept, self.needs_input = other.output_bytes, other.kept, other.needs_input
        self.forward, self.backward, self.rerun_operators = other.forward, other.backward, other.rerun_operators
        self.transient_forward_bytes = other.transient_forward_bytes
        self.transient_backward_bytes = other.transient_backward_bytes

    def result(self) -> BlockTrace:
        return BlockTrace(
            boundary_bytes=self.boundary_bytes,
            output_bytes=self.output_bytes,
            kept=tuple(self.kept.values()),
            needs_input=self.needs_input,
            forward=tuple(self.forward),
            backward=self.backward,
            rerun_operators=self.rerun_operators,
            transient_forward_bytes=self.transient_forward_bytes,
            transient_backward_bytes=self.transient_backward_bytes,
            chained=self.chained,
            calls=self.calls,
        )


class Tracer:
    """Runs a shadow once and sorts what happens into regions: one per block of the table, one for what fits none."""

    def __init__(self, shadow: nn.Module, table: BlockTable, values: KnownValues | None) -> None:
        self.shadow, self.table = shadow, table
        self.storages = Storages()
        self.trace = OperatorTrace(self.storages, values)
        self.regions = [_Region() for _ in table]
        self.loose = _Region()
        self.order: dict[str, None] = {}
        self.shared: set[int] = set()
        self.handles: list[Any] = []
        self.current = self.loose
        self.last_output: list[torch.Tensor] = []
        self.hooks_active = True
        self.real = values is None
        self.seen: dict[Any, tuple[_Region, Callable[[list[torch.Tensor]], Any]]] = {}
        self._start, self._kept_before = 0, 0
        self.parameters = dict(shadow.named_parameters(remove_duplicate=False))
        self.fixed_serials = self.storages.serials([*shadow.parameters(), *shadow.buffers()])

    def close(self) -> None:
        """Take our hooks off and drop the graph (it has cycles through them)."""
        for handle in self.handles:
            handle.remove()
        self.regions, self.last_output, self.current, self.loose = [], [], _Region(), _Region()
        self.seen.clear()
        gc.collect()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardTrace:
        """One forward, then the backward of one block per class."""
        self._install()
        model_inputs = self.storages.serials((args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor), self.trace:
            if self.table[0].kind in ("embedding", "whole"):
                self._enter(self.regions[0], (args, kwargs), [])
            output = self.shadow(*args, **kwargs)
            loss = scalar_loss(output)
            self._leave([] if loss is None else [loss])
        self.hooks_active = False
        self._run_each_class_alone()
        blocks = tuple(region.result() for region in self.regions)
        boundaries = set().union(*(region.boundary_serials for region in self.regions))
        shared = self.shared - self.fixed_serials - boundaries - model_inputs
        size = self.storages.bytes
        return ForwardTrace(
            blocks=blocks,
            order=tuple(self.order),
            shared_bytes=sum(size[serial] for serial in shared),
            loose_bytes=sum(self.loose.kept.values()),
            input_bytes=sum(size[serial] for serial in model_inputs),
            notes=tuple(
                f"block {block.index} ({block.name}) was not called in the traced forward"
                for block, trace in zip(self.table, blocks, strict=True)
                if block.kind == "block" and not trace.calls
            ),
        )

    # -- marks --

    def _install(self) -> None:
        modules = dict(self.shadow.named_modules(remove_duplicate=False))
        for name, module in self.shadow.named_modules():
            self.handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._note_order(name)))
        for block in self.table:
            if block.kind != "block":
                continue
            module = modules[block.modules[0]]
            module.__dict__["forward"] = self._shortcut(block.index, block.class_name, module.forward)
            self.handles += [
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, index=block.index: self._before_block(index, args, kwargs),
                    with_kwargs=True,
                ),
                module.register_forward_hook(
                    lambda _, args, kwargs, output, index=block.index: self._after_block(index, output),
                    with_kwargs=True,
                ),
            ]
        for parameter in self.shadow.parameters():
            if parameter.requires_grad:
                # A gradient leaves the device as soon as it is there.
                self.handles.append(
                    parameter.register_post_accumulate_grad_hook(lambda owner: setattr(owner, "grad", None))
                )

    def _shortcut(self, index: int, class_name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward that runs once per class and kind of input, and is repeated from memory after that."""

        def run(*args: Any, **kwargs: Any) -> Any:
            region = self.regions[index] if self.hooks_active else None
            if region is None or region.calls != 1:
                return forward(*args, **kwargs)
            tensors = _tensors((args, kwargs))
            key = (class_name, self._kind_of_call(args, kwargs))
            if key in self.seen:
                region.like, repeat = self.seen[key]
                return repeat(tensors)
            output = forward(*args, **kwargs)
            repeat = self._repeater(output, tensors)
            if repeat is not None:
                self.seen[key] = (region, repeat)
            return output

        return run

    def _kind_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        kinds: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                # The code may look at the values of an integer tensor, so it must be the very same.
                which = None if leaf.is_floating_point() else self.storages.serial(leaf)
                kinds.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, which))
            else:
                kinds.append(leaf if isinstance(leaf, int | float | str | None) else id(leaf))
        return (tuple(kinds), str(spec))

    def _repeater(self, output: Any, inputs: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], Any] | None:
        """Makes an output like this one for other inputs; None when it holds objects whose inside we cannot see."""
        leaves, spec = tree_flatten(output)
        if not all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in leaves):
            return None
        places = {id(tensor): position for position, tensor in enumerate(inputs)}

        def repeat(tensors: list[torch.Tensor]) -> Any:
            made = []
            for leaf in leaves:
                if not isinstance(leaf, torch.Tensor):
                    made.append(leaf)
                elif id(leaf) in places:
                    made.append(tensors[places[id(leaf)]])
                else:
                    fresh = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
                    if self.real and fresh.is_floating_point():
                        fresh.normal_()
                    made.append(fresh.requires_grad_(leaf.requires_grad))
            return tree_unflatten(made, spec)

        return repeat

    def _note_order(self, name: str) -> None:
        if self.hooks_active:
            self.order.setdefault(name)

    def _before_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.hooks_active:
            return None
        tensors = _tensors((args, kwargs))
        between = self.trace.operators[self._start :]
        rewritten = any(operator.bytes_moved and not operator.made for operator in between)
        self._leave([tensor for tensor in tensors if tensor.requires_grad])
        region = self.regions[index]
        leaves: list[torch.Tensor] = []
        args, kwargs = tree_map(lambda value: _cut(value, leaves), (args, kwargs))
        self._enter(region, (args, kwargs), leaves)
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        if region.calls == 1:
            region.call = (args, kwargs)
            previous = self.storages.serials(self.last_output)
            region.chained = bool(floating) and self.storages.serial(floating[0]) in previous and not rewritten
        self.shared |= self.storages.serials(tensors)
        return args, kwargs

    def _after_block(self, index: int, output: Any) -> Any:
        if not self.hooks_active:
            return None
        self.last_output = _tensors(output)
        self._leave([tensor for tensor in self.last_output if tensor.requires_grad])
        region = self.regions[index]
        region.output_bytes += sum(
            self.storages.bytes[serial] for serial in self.storages.serials(self.last_output[:1])
        )
        follows = index + 1 < len(self.table) and self.table[index + 1].kind in ("rest", "head")
        leaves: list[torch.Tensor] = []
        output = tree_map(lambda value: _cut(value, leaves), output)
        self._enter(self.regions[index + 1] if follows else self.loose, output, leaves)
        return output

    def _enter(self, region: _Region, inputs: Any, leaves: list[torch.Tensor]) -> None:
        tensors = _tensors(inputs)
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        boundary = self.storages.serials(floating[:1] or tensors)
        region.boundary_serials |= boundary
        region.boundary_bytes += sum(self.storages.bytes[serial] for serial in boundary)
        region.input_serials |= self.storages.serials(tensors)
        region.inputs += leaves
        region.calls += 1
        self.current = region
        self._start = len(self.trace.operators)
        self._kept_before = sum(region.kept.values())
        self.trace.start_watching()

    def _leave(self, outputs: list[torch.Tensor]) -> None:
        region = self.current
        kept = sum(region.kept.values()) - self._kept_before
        region.transient_forward_bytes = max(region.transient_forward_bytes, self.trace.stop_watching() - kept)
        region.forward += self.trace.operators[self._start :]
        region.outputs += outputs
        self._start = len(self.trace.operators)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        region = self.current
        region.rerun_operators = len(region.forward) + len(self.trace.operators) - self._start
        serial = self.storages.serial(tensor)
        if serial in region.boundary_serials:
            region.needs_input = True
        elif serial not in self.fixed_serials and serial not in region.input_serials:
            region.kept[serial] = self.storages.bytes[serial]
        return tensor

    # -- one block alone --

    def _run_each_class_alone(self) -> None:
        modules = dict(self.shadow.named_modules(remove_duplicate=False))
        for block, region in zip(self.table, self.regions, strict=True):
            if region.like is not None:
                region.copy_from(region.like)  # an earlier block, done by now
                continue
            if region.call is not None:
                self._forward_alone(region, modules[block.modules[0]])
            names = [*block.parameters, *(name for name, _ in block.borrows)]
            self._backward_alone(region, [self.parameters[name] for name in names])

    def _forward_alone(self, region: _Region, module: nn.Module) -> None:
        """What a block uses while it runs when nothing is kept (then all of it is transient)."""
        assert region.call is not None
        args, kwargs = region.call
        try:
            with torch.no_grad(), self.trace:
                self.trace.start_watching()
                output = module(*args, **kwargs)
                peak = self.trace.stop_watching()
            del output
        except Exception:  # it cannot be called twice (a cache that grew); what it used with everything kept bounds it
            self.trace.stop_watching()
            peak = region.transient_forward_bytes + sum(region.kept.values())
        region.transient_forward_bytes = max(region.transient_forward_bytes, peak)

    def _backward_alone(self, region: _Region, parameters: list[nn.Parameter]) -> None:
        outputs = list({id(tensor): tensor for tensor in region.outputs if tensor.grad_fn is not None}.values())
        inputs = [*region.inputs, *(parameter for parameter in parameters if parameter.requires_grad)]
        if not outputs or not inputs:
            return
        gradients = [torch.empty_like(tensor) for tensor in outputs]
        start = len(self.trace.operators)
        with self.trace:
            self.trace.start_watching()
            torch.autograd.backward(outputs, gradients, inputs=inputs, retain_graph=True)
            peak = self.trace.stop_watching()
        for tensor in inputs:
            tensor.grad = None
        region.backward = tuple(self.trace.operators[start:])
        region.transient_backward_bytes = peak + sum(
            self.storages.bytes[serial] for serial in self.storages.serials(gradients)
        )


class _Cut(torch.autograd.Function):
    """Its input's values in the graph of `leaf`: each region's graph begins at its own inputs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


def _cut(value: Any, leaves: list[torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    leaf = torch.empty_like(value.detach()).requires_grad_()
    leaves.append(leaf)
    return _Cut.apply(value.detach(), leaf)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
