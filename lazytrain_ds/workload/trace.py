"""What each block needs and does, found by running the model's own code on fake tensors: no weights, no compute.

One forward of a shadow of the model (see shadow.py) under saved-tensor hooks and an operator trace gives, per
block: the bytes autograd keeps, the operators with their FLOPs, the bytes in use while it runs. The backward of
one block per class is run on its piece of the graph. The model itself, its hooks and the random state are not touched.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from lazytrain_ds.errors import format_bytes
from lazytrain_ds.workload.blocks import BlockTable
from lazytrain_ds.workload.linear import zero3_linear
from lazytrain_ds.workload.records import BlockTrace, ForwardTrace
from lazytrain_ds.workload.shadow import FakeTensors, RealTensors, make_shadow
from lazytrain_ds.workload.signature import parameter_numel
from lazytrain_ds.workload.tracer import Tracer
from lazytrain_ds.workload.values import KnownValues, models_see_real_tensors

__all__ = ["BlockTrace", "ForwardTrace", "TraceError", "run_with_inputs", "trace_with_inputs"]


class TraceError(Exception):
    """The model's code cannot run on fake tensors (data-dependent shapes, another signature). The cause is chained."""


def trace_with_inputs(
    model: nn.Module,
    table: BlockTable,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    zero3: bool = True,
    training: bool | None = None,
) -> ForwardTrace:
    """Trace `model(*args, **kwargs)`; of floating-point inputs only shape, strides and dtype are used.

    `dtype`: compute dtype to assume for the parameters (None: theirs). `device`: where the fake tensors pretend to
    be; it decides which attention kernel is chosen. `zero3`: use ZeRO-3's linear. `training`: put the shadow in
    this mode (None: leave). Raises TraceError when fake tensors cannot run the model.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        device = "cpu"  # a build without CUDA aborts the process on a fake CUDA tensor
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shadow = make_shadow(model, FakeTensors(mode, device), dtype=dtype)
    if training is not None:
        shadow.train(training)
    values = KnownValues()
    with mode:
        fake_args, fake_kwargs = tree_map(lambda value: _fake(value, device, values), (tuple(args), dict(kwargs or {})))
    tracer = Tracer(shadow, table, values)
    try:
        with (
            warnings.catch_warnings(),
            _quiet(),
            zero3_linear(zero3),
            models_see_real_tensors(),
            torch.enable_grad(),
            mode,
        ):
            warnings.simplefilter("ignore")
            return tracer.run(fake_args, fake_kwargs)
    except Exception as error:
        raise TraceError(f"{type(model).__name__} does not run on fake tensors: {error}") from error
    finally:
        tracer.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a stack for every operator that fake tensors cannot run; the TraceError says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _fake(value: Any, device: str, values: KnownValues) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if value.device.type != "meta":
        values.note(fake, value)
    return fake.requires_grad_(value.requires_grad)


def run_with_inputs(
    model: nn.Module,
    table: BlockTable,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    zero3: bool = True,
    training: bool | None = None,
    limit_bytes: int = 1 << 30,
) -> ForwardTrace:
    """As `trace_with_inputs`, by really running the model's code on the CPU: for code that looks at the data it routes.

    Only the first block of every class and what lies outside the blocks get weights, random ones of a trained model's
    scale (so routing is about even); the other blocks repeat them. Random state and the model itself are untouched.
    Raises TraceError when those weights need more than `limit_bytes`, or when the code fails.
    """
    first = {block.index for block in table.classes().values()}
    first |= {block.index for block in table if block.kind != "block"}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    named = dict(model.named_modules())
    skipped = [block for block in table if block.index not in first]
    absent = {id(tensor) for block in skipped for tensor in named[block.modules[0]].buffers()}
    absent |= {id(parameters[name]) for block in skipped for name in block.parameters}
    present = {id(parameter): parameter for parameter in model.parameters() if id(parameter) not in absent}.values()
    sizes = (parameter_numel(item) * (dtype or item.dtype).itemsize for item in present)
    need = math.fsum(sizes)
    if need > limit_bytes:
        raise TraceError(
            f"running one block of each class needs {format_bytes(need)}, "
            f"more than the {format_bytes(limit_bytes)} allowed"
        )
    with torch.random.fork_rng(devices=[]):
        shadow = make_shadow(model, RealTensors(absent), dtype=dtype)
        if training is not None:
            shadow.train(training)
        real_args, real_kwargs = tree_map(_real, (tuple(args), dict(kwargs or {})))
        tracer = Tracer(shadow, table, None)
        try:
            with warnings.catch_warnings(), zero3_linear(zero3), torch.enable_grad():
                warnings.simplefilter("ignore")
                return tracer.run(real_args, real_kwargs)
        except Exception as error:
            raise TraceError(f"{type(model).__name__} does not run: {error}") from error
        finally:
            tracer.close()


def _real(value: Any) -> Any:
    """A copy on the CPU; random where there is no data."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "meta":
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        made = made.normal_() if made.is_floating_point() else made.zero_()
    else:
        made = value.detach().to("cpu", copy=True)
    return made.requires_grad_(value.requires_grad)
