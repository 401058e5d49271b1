"""Replace estimated seconds by measured ones: time blocks in real steps, carry the medians into an Instance, cache
them.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lazytrain_ds.planning.instance import BlockCosts, Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.timeline import Timeline
from lazytrain_ds.workload.blocks import BlockTable


@dataclass(frozen=True)
class Seconds:
    """Of one micro-batch of one class of blocks. `backward` is without any recomputation; None: not seen."""

    forward: float | None = None
    backward: float | None = None


Measured = Mapping[str, Seconds]


class BlockTimer:
    """Times forward and backward of every block of a model while it trains as usual.

    Used as a context manager around whole micro-steps. It adds hooks to the block modules and to their inputs and
    outputs, and takes them off at the end. Meant for blocks that keep everything: what a checkpoint re-runs would
    count as backward. `clock`: `time.perf_counter`, or `time.thread_time` where other processes disturb (one
    compute thread then). Groups (embedding, head) are timed from the last block's end, or the start, to the next mark.
    """

    def __init__(self, model: nn.Module, table: BlockTable, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model, self.table, self.clock = model, table, clock
        self.forward: dict[int, list[float]] = {block.index: [] for block in table}
        self.backward: dict[int, list[float]] = {block.index: [] for block in table}
        self._handles: list[Any] = []
        self._entered: dict[int, float] = {}
        self._left = 0.0
        self._backward_from: tuple[int, float] | None = None

    def __enter__(self) -> BlockTimer:
        modules = dict(self.model.named_modules())
        self._handles.append(self.model.register_forward_pre_hook(self._start))
        self._handles.append(self.model.register_forward_hook(self._end))
        for block in self.table:
            if block.kind != "block":
                continue
            module = modules[block.modules[0]]
            self._handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, index=block.index: self._enter(index, args, kwargs), with_kwargs=True
                )
            )
            self._handles.append(
                module.register_forward_hook(lambda _, args, output, index=block.index: self._leave(index, output))
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def seconds(self, classes: Mapping[int, str], skip: int = 1) -> dict[str, Seconds]:
        """Medians by class name; `classes`: block -> class; the first `skip` micro-steps (warm-up) do not count."""
        result: dict[str, Seconds] = {}
        for name in dict.fromkeys(classes.values()):
            members = [index for index, owner in classes.items() if owner == name]
            forward = [value for index in members for value in self.forward[index][skip:]]
            backward = [value for index in members for value in self.backward[index][skip:]]
            result[name] = Seconds(
                statistics.median(forward) if forward else None, statistics.median(backward) if backward else None
            )
        return result

    # -- marks --

    def _start(self, *_: Any) -> None:
        self._left = self.clock()
        self._group: int | None = self.table[0].index if self.table[0].kind in ("embedding", "whole") else None

    def _enter(self, index: int, args: Any, kwargs: Any) -> None:
        now = self.clock()
        if self._group is not None:
            self.forward[self._group].append(now - self._left)
        group, self._group = self._group, None
        for tensor in _floating((args, kwargs))[:1]:
            if tensor.requires_grad:
                tensor.register_hook(lambda _, index=index, group=group: self._backward_mark(index, group))
        self._entered[index] = self.clock()

    def _leave(self, index: int, output: Any) -> None:
        now = self.clock()
        self.forward[index].append(now - self._entered[index])
        follows = index + 1 < len(self.table) and self.table[index + 1].kind in ("rest", "head")
        self._group = index + 1 if follows else None
        if follows:
            for tensor in _floating(output)[:1]:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _, group=index + 1: self._backward_mark(group, index))
        self._left = self.clock()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        now = self.clock()
        last = self._group
        if last is not None:
            self.forward[last].append(now - self._left)
        for tensor in _floating(output)[:1]:
            if tensor.requires_grad and last is not None:
                tensor.register_hook(lambda _: self._begin_backward(last))

    def _begin_backward(self, group: int) -> None:
        self._backward_from = (group, self.clock())

    def _backward_mark(self, index: int, following: int | None) -> None:
        """The gradient of a region's input is there: its backward has ended, and that of what comes before begins."""
        now = self.clock()
        if self._backward_from is not None and self._backward_from[0] == index:
            self.backward[index].append(now - self._backward_from[1])
        before = index - 1 if following is None else following
        self._backward_from = (before, self.clock())


def _floating(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def from_timeline(instance: Instance, timeline: Timeline, plan: Plan) -> dict[str, Seconds]:
    """Medians by class from what a run under `plan` recorded.

    A backward task contains what its block's choice re-runs; that is taken off, as the estimated share of the measured
    forward. What re-makes a dropped boundary is a task of its own (`recompute`) and does not enter.
    """
    forward: dict[str, list[float]] = {name: [] for name in instance.order}
    backward: dict[str, list[tuple[float, float]]] = {name: [] for name in instance.order}
    for task in timeline.tasks:
        if task.channel != "compute" or task.block < 0:
            continue
        name = instance.order[task.block]
        if task.kind == "forward":
            forward[name].append(task.seconds)
        elif task.kind == "backward":
            costs = instance.costs(task.block, plan.micro_batch)
            again = costs.choice(plan.blocks[task.block].choice).recompute_seconds
            backward[name].append((task.seconds, again / costs.forward_seconds if costs.forward_seconds else 0.0))
    result = {}
    for name in dict.fromkeys(instance.order):
        seconds = statistics.median(forward[name]) if forward[name] else None
        own = [whole - share * (seconds or 0.0) for whole, share in backward[name] if share == 0 or seconds is not None]
        result[name] = Seconds(seconds, max(0.0, statistics.median(own)) if own else None)
    return result


def with_measured(instance: Instance, measured: Measured, micro_batch: int) -> Instance:
    """The instance with measured seconds at `micro_batch`; recomputation scales with the forward.

    Other micro-batches are scaled by the same ratios: a class that ran 1.3 times as long as estimated is expected
    to do so at any size. Classes that were not seen keep their estimates.
    """
    classes = []
    for block_class in instance.classes:
        seconds = measured.get(block_class.name)
        if seconds is None:
            classes.append(block_class)
            continue
        known = block_class.at(micro_batch)
        forward = _ratio(seconds.forward, known.forward_seconds)
        backward = _ratio(seconds.backward, known.backward_seconds)
        costs = tuple(_scaled(costs, forward, backward) for costs in block_class.costs)
        classes.append(replace(block_class, costs=costs))
    return replace(instance, classes=tuple(classes))


def _ratio(measured: float | None, estimated: float) -> float:
    return measured / estimated if measured is not None and estimated > 0 else 1.0


def _scaled(costs: BlockCosts, forward: float, backward: float) -> BlockCosts:
    menu = tuple(replace(choice, recompute_seconds=choice.recompute_seconds * forward) for choice in costs.menu)
    return replace(
        costs,
        forward_seconds=costs.forward_seconds * forward,
        backward_seconds=costs.backward_seconds * backward,
        menu=menu,
    )


# -- cache --


def workload_key(instance: Instance, micro_batch: int, machine: str) -> str:
    """Fingerprint of what measured seconds depend on: the blocks' shapes and costs, their dtypes, versions, the
    machine.

    `machine`: `hardware.probe.machine_key()`. Caps, rates and placement do not enter.
    """
    facts: list[Any] = [torch.__version__, machine, micro_batch, instance.sequence_length]
    for item in instance.classes:
        costs = item.at(micro_batch)
        facts.append([item.name, item.parameter_count, item.trainable_count, item.dtype, costs.boundary_bytes,
                      costs.forward_flops, costs.menu[0].kept_bytes])  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class MeasuredCache:
    """Measured seconds in one JSON file per key. A file that cannot be read counts as absent."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).expanduser()

    def _file(self, key: str) -> Path:
        return self.directory / f"measured-{key}.json"

    def load(self, key: str) -> dict[str, Seconds] | None:
        """What was stored under `key`, or None."""
        try:
            data = json.loads(self._file(key).read_text())
            return {str(name): Seconds(_number(pair[0]), _number(pair[1])) for name, pair in data.items()}
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None

    def store(self, key: str, measured: Measured) -> bool:
        """Write atomically; False where the directory cannot be written (then the next run measures again)."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary = self._file(key).with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps({name: [item.forward, item.backward] for name, item in measured.items()}))
            temporary.replace(self._file(key))
        except OSError:
            return False
        return True


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no duration")
    return float(value)
