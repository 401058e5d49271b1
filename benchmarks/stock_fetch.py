"""Stock DeepSpeed ZeRO-3 with offload, on the emulated device: the baseline of benchmarks/executor.py.

DeepSpeed's own coordinator runs unchanged: its trace, its prefetch bucket, its limits, its waits. Emulated is what a
CPU run lacks:

* a gathered parameter is a copy on the emulated h2d channel, issued where DeepSpeed issues it and waited for where
  DeepSpeed waits;
* a module's forward, recomputation and backward take its share (by parameters) of what the instance says its block
  takes; DeepSpeed fetches module by module, so compute has to be spread over modules for its prefetch to hide;
* a gradient is one copy on the d2h channel (DeepSpeed's three, down, up and down again, are counted as one);
* the optimizer step takes the instance's host seconds, after the last gradient, before the next forward.

All four favour stock. Device memory is not emulated here: stock has no cap.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lazytrain_ds.hardware.emulation import Emulation
from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import SubGroupPlan
from lazytrain_ds.runtime.device.emulated import EmulatedDevice
from lazytrain_ds.runtime.device.timing import Past, sleep_until

__all__ = ["StockFetch", "emulated_gathers"]


class _Gather:
    """What DeepSpeed waits for instead of `NoGatherHandle`: each parameter's copy on the emulated link."""

    device: EmulatedDevice  # set while `emulated_gathers` is active
    moved_bytes = 0

    def __init__(self, parameters: Any) -> None:
        self._parameters = parameters if isinstance(parameters, list) else [parameters]
        self._events = []
        for parameter in self._parameters:
            source = parameter.ds_tensor.data.view(-1)
            target = torch.empty_like(source)
            self._events.append(self.device.copy_async(target, source, "h2d", (), ("parameter_fetch", -1)))
            type(self).moved_bytes += source.numel() * source.element_size()
            parameter.data = target.view(parameter.ds_shape)
        self._complete = False

    def wait(self, **kwargs: Any) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        if self._complete:
            return
        self._complete = True
        for event in self._events:
            self.device.compute_waits(event)
        for parameter in self._parameters:
            parameter.ds_status = ZeroParamStatus.AVAILABLE


@contextmanager
def emulated_gathers(device: EmulatedDevice) -> Iterator[type[_Gather]]:
    """DeepSpeed's one-rank gathers cross `device`'s link."""
    from deepspeed.runtime.zero import partition_parameters as upstream

    originals = upstream.NoGatherHandle, upstream.NoGatherCoalescedHandle
    handle = type("EmulatedGather", (_Gather,), {"device": device})
    upstream.NoGatherHandle = upstream.NoGatherCoalescedHandle = handle
    try:
        yield handle
    finally:
        upstream.NoGatherHandle, upstream.NoGatherCoalescedHandle = originals


class StockFetch:
    """Times a stock engine on an emulated device: use as a context around its training steps."""

    def __init__(self, engine: Any, emulation: Emulation, instance: Instance, table: Any) -> None:
        """`instance`: what blocks cost. `table`: the block table of the engine's module."""
        self.engine, self.instance = engine, instance
        self.device = EmulatedDevice(emulation)
        costs = Costs(instance, instance.micro_batches[0])
        self._host_seconds = sum(costs.group(block, SubGroupPlan())[0] for block in range(instance.block_count))
        self._shares: dict[int, tuple[float, float]] = {}
        modules = dict(engine.module.named_modules())
        for block in table:
            owned = [module for name in block.modules for module in modules[name].modules()]
            sizes = {id(m): sum(p.ds_numel for p in m.parameters(recurse=False)) for m in owned}
            total = sum(sizes.values()) or 1
            numbers = costs.blocks[block.index]
            for module in owned:
                share = sizes[id(module)] / total
                if share:
                    self._shares[id(module)] = (share * numbers.forward_seconds, share * numbers.backward_seconds)
        self._open: int | None = None
        self._gradients: list[Any] = []

    # -- compute -----------------------------------------------------------------------------------------------
    def _begins(self, module: Any, forward: bool) -> None:
        if id(module) in self._shares:
            self._ends()
            self._open = id(module)
            self.device._clock.visit_begins(self._shares[id(module)][0 if forward else 1])

    def _ends(self, module: Any = None) -> None:
        if self._open is not None and (module is None or id(module) == self._open):
            self._open = None
            self.device.visit_ends()

    # -- installation ------------------------------------------------------------------------------------------
    @contextmanager
    def running(self) -> Iterator[None]:
        """DeepSpeed's calls are timed inside."""
        optimizer = self.engine.optimizer
        coordinator = optimizer.parameter_offload.param_coordinator
        originals = {
            (coordinator, name): getattr(coordinator, name)
            for name in ("fetch_sub_module", "release_sub_module", "release_backward_leftovers")
        }
        originals |= {(optimizer, name): getattr(optimizer, name) for name in ("partition_grads", "step")}
        fetch, release, leftovers, partition, step = originals.values()

        def fetched(module: Any, forward: bool) -> None:
            if id(module) in self._shares:
                self._ends()
            fetch(module, forward)
            self._begins(module, forward)

        def released(module: Any, forward: bool = False) -> None:
            self._ends(module)
            release(module, forward=forward)

        def left_over() -> None:
            self._ends()
            leftovers()

        def partitioned(parameters: Any, partitions: Any) -> Any:
            for partition_ in partitions:
                target = torch.empty_like(partition_)
                after = [self.device.record()]
                self._gradients.append(
                    self.device.copy_async(target, partition_.clone(), "d2h", after, ("gradient", -1))
                )
            return partition(parameters, partitions)

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self._ends()
            for event in self._gradients:
                self.device.host_waits(event)
            self._gradients.clear()
            began = self.device._clock.now()
            result = step(*args, **kwargs)
            if self.device.emulation.host is not None:
                end = began + self._host_seconds
                sleep_until(end)
                self.device._clock.wait_for(Past(end), since=began)
            return result

        replacements = (fetched, released, left_over, partitioned, stepped)
        for (owner, name), replacement in zip(originals, replacements, strict=True):
            setattr(owner, name, replacement)
        try:
            with emulated_gathers(self.device) as handle:
                self.gathers = handle
                yield
        finally:
            for owner, name in originals:
                delattr(owner, name)
            self.device.close()


def seconds_per_step(engine: Any, calls: Any, rounds: int) -> list[float]:
    """Wall seconds of each optimizer step of a stock engine."""
    times, started = [], time.perf_counter()
    for number, call in enumerate(calls):
        output = engine(**call)
        engine.backward(output if torch.is_tensor(output) else output.loss)
        engine.step()
        if number % rounds == rounds - 1:
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
    return times
