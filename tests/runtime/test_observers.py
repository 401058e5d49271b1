"""Looking at values between steps shows what a serial step would have left, however late the hidden updates are."""

from __future__ import annotations

import copy
import pickle
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from torch import nn

from lazytrain_ds.errors import OptimizerError
from lazytrain_ds.optim.fused_adamw import FusedAdamW
from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit
from lazytrain_ds.runtime.swap import NvmeStore
from tests.runtime.test_stage3 import Tower, features, train
from tests.runtime.zero3 import engine_for, full_parameters, zero3_config

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = {"fp32 on host": ("host", FusedAdamW), "fp32 on NVMe": ("nvme", FusedAdamW), "8-bit": ("nvme", HybridAdamW8bit)}


class Frozen(Tower):
    """With a frozen bias, for which every observer answers None."""

    def __init__(self) -> None:
        super().__init__()
        self.entry.bias.requires_grad_(False)


def slow_down(engine, seconds: float = 0.005) -> threading.Event:
    """Every update of the hidden worker starts late, and not before the event that this returns is set."""
    apply = engine.optimizer._lt_updater.apply
    gate = threading.Event()
    gate.set()

    def late(*args):
        time.sleep(seconds)
        assert gate.wait(60)
        apply(*args)

    engine.optimizer._lt_updater.apply = late
    return gate


def engine_of(tmp_path, kind="fp32 on host", step="hidden", dtype="fp32", clip=0.01, scheduler=False, accumulation=1):
    tier, optimizer_type = KINDS[kind]
    torch.manual_seed(0)
    model = Frozen()
    optimizer = optimizer_type([p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95))
    changes = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}} if scheduler else {}
    engine = engine_for(
        model,
        zero3_config(dtype, accumulation, clip=clip, **changes),
        1,
        optimizer=optimizer,
        tiers=(tier,),
        states=(tier,),
        nvme=NvmeStore(tmp_path / step) if tier == "nvme" else None,
        arrange=lambda plan: replace(plan, optimizer_step=step),
    )
    if step == "hidden":
        slow_down(engine)
    return engine


def close(engine) -> None:
    store = engine.optimizer.lazytrain.nvme
    engine.destroy()
    if store is not None:
        store.close()


@pytest.fixture
def pair(tmp_path, request):
    """Two equal engines: late hidden updates, and the serial step."""
    kind = getattr(request, "param", "fp32 on host")
    engines = [engine_of(tmp_path, kind, step) for step in ("hidden", "serial")]
    yield engines
    for engine in engines:
        close(engine)


def parameters(engine):
    return dict(engine.module.named_parameters())


def of(engine, step):
    return features(step).to(engine.get_data_types()[0])


def forward_backward(engine, step):
    engine.backward(engine(of(engine, step)))


def same(one, other) -> None:
    assert type(one) is type(other)
    if torch.is_tensor(one):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


def by_parameter(read):
    return lambda engine: {name: read(p) for name, p in parameters(engine).items()}


GETTERS = {
    "fp32 parameter": by_parameter(safe_get_full_fp32_param),
    "local fp32 parameter": by_parameter(safe_get_local_fp32_param),
    "optimizer states": by_parameter(lambda p: [safe_get_full_optimizer_state(p, key) for key in MOMENTS]),
    "local optimizer states": by_parameter(lambda p: [safe_get_local_optimizer_state(p, key) for key in MOMENTS]),
    "gradient": by_parameter(safe_get_full_grad),
    "local gradient": by_parameter(safe_get_local_grad),
    "gradient partitions": lambda engine: dict(engine.optimizer.get_fp32_grad_partitions()),
    "state_dict": lambda engine: [
        engine.optimizer.state_dict()[key] for key in ("optimizer_state_dict", "fp32_flat_groups")
    ],
    "raw masters": lambda engine: list(engine.optimizer.fp32_partitioned_groups_flat),
    "raw weights": lambda engine: list(engine.optimizer.fp16_partitioned_groups_flat),
    "raw states": lambda engine: list(engine.optimizer.optimizer.state.values()),
    "promoted states": lambda engine: list(engine.optimizer.state.values()),
    "gathered": full_parameters,
    "16-bit model": lambda engine: engine._zero3_consolidated_16bit_state_dict(),
    "evaluation": lambda engine: evaluate(engine),
    "checkpoint": lambda engine: saved(engine),
}


def evaluate(engine):
    engine.eval()
    with torch.no_grad():
        losses = [engine(features(9), order=order).item() for order in ((2, 0), (1,), (0, 1, 2))]
    engine.train()
    return losses


def saved(engine):
    with tempfile.TemporaryDirectory() as directory:
        engine.save_checkpoint(directory, tag="now")
        state = torch.load(next(Path(directory, "now").glob("*optim_states.pt")), weights_only=False)
    return [state["optimizer_state_dict"][key] for key in ("optimizer_state_dict", "fp32_flat_groups")]


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_every_reader_sees_the_finished_step(pair):
    hidden, serial = pair
    gate = slow_down(hidden)
    for step, (name, read) in enumerate(GETTERS.items()):
        hidden.optimizer.drain()
        train(serial, [((of(serial, step),), {})])
        gate.clear()
        train(hidden, [((of(hidden, step),), {})])
        assert hidden.optimizer._lt_worker.busy, name
        threading.Timer(0.02, gate.set).start()
        mine, theirs = read(hidden), read(serial)
        same(mine, theirs)
        if name in ("fp32 parameter", "optimizer states", "gradient"):
            assert mine["entry.bias"] is None or mine["entry.bias"] == [None, None]
            assert all(v is not None for k, v in mine.items() if k != "entry.bias")


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_states_are_those_of_the_optimizer_that_steps_each_parameter_alone(pair):
    """Moments read through the engine equal a run of the same kernel on whole parameters, 8-bit ones dequantized."""
    hidden, _ = pair
    named = {name: p for name, p in parameters(hidden).items() if p.requires_grad}
    start = {name: safe_get_full_fp32_param(p).clone() for name, p in named.items()}
    alone = {name: nn.Parameter(value) for name, value in start.items()}
    inner = hidden.optimizer.optimizer
    reference = FusedAdamW(alone.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=1e-2)
    if isinstance(inner, HybridAdamW8bit):
        reference = HybridAdamW8bit(alone.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=1e-2)
        for name, value in alone.items():
            reference.set_segments(value, [(0, value.numel(), inner.precision_of(named[name]))])
    for step in range(2):
        train(hidden, [((of(hidden, step),), {})])
        for name, value in alone.items():
            value.grad = safe_get_full_grad(named[name])
        reference.step()
    moments = reference.fp32_state_dict()["state"]
    for index, name in enumerate(alone):
        torch.testing.assert_close(safe_get_full_fp32_param(named[name]), alone[name].data, rtol=1e-6, atol=1e-8)
        for key in MOMENTS:
            shown = safe_get_full_optimizer_state(named[name], key)
            assert shown.shape == alone[name].shape
            torch.testing.assert_close(shown, moments[index][key], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_writers_reach_the_place_a_value_lives(pair):
    def change(engine):
        named = parameters(engine)
        weight, other, bias = named["blocks.1.0.weight"], named["blocks.2.2.weight"], named["head.bias"]
        generator = torch.Generator().manual_seed(5)
        value = torch.randn(weight.ds_shape, generator=generator)
        safe_set_full_fp32_param(weight, value)
        safe_set_full_optimizer_state(weight, value * 0.1, "exp_avg")
        safe_set_full_optimizer_state(weight, value.square(), "exp_avg_sq")
        safe_set_local_fp32_param(other, torch.randn(other.ds_numel, generator=generator))
        safe_set_local_optimizer_state(bias, torch.full((bias.ds_numel,), 0.5), "exp_avg")
        safe_set_full_fp32_param(named["entry.bias"], torch.ones(67))  # frozen: nothing to set
        return value, weight, bias

    for engine in pair:
        train(engine, [((of(engine, 0),), {})])
        value, weight, bias = change(engine)
        assert torch.equal(safe_get_full_fp32_param(weight), value)
        assert torch.equal(safe_get_full_optimizer_state(bias, "exp_avg"), torch.full((211,), 0.5))
        shown = safe_get_full_optimizer_state(weight, "exp_avg")
        if isinstance(engine.optimizer.optimizer, HybridAdamW8bit):
            assert not torch.equal(shown, value * 0.1), "8-bit moments round"
            torch.testing.assert_close(shown, value * 0.1, rtol=0.05, atol=0.01)
        else:
            assert torch.equal(shown, value * 0.1)
            assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg_sq"), value.square())
    for engine in pair:
        train(engine, [((of(engine, step),), {}) for step in (1, 2)])
    same(*(full_parameters(engine) for engine in pair))
    same(*(GETTERS["optimizer states"](engine) for engine in pair))


def test_gradients_before_and_after_the_step_are_stocks(tmp_path):
    """Stock shows the accumulated gradient before `step` and, once it is taken, the one scaled by the clipping."""
    torch.manual_seed(0)
    model = Frozen()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95))
    stock = engine_for(model, zero3_config(clip=0.01), optimizer=optimizer)
    ours = engine_of(tmp_path)
    for step in range(2):
        read = GETTERS["gradient"]
        for engine in (stock, ours):
            forward_backward(engine, step)
        before = read(ours)
        for engine in (stock, ours):
            engine.step()
        after = read(ours)
        for name, gradient in read(stock).items():
            if gradient is None:
                assert after[name] is None
                continue
            torch.testing.assert_close(after[name], gradient, rtol=1e-4, atol=1e-9)
            assert torch.equal(after[name], before[name] * ours.optimizer._lt_gradient_scale)
            assert gradient.abs().max() > 0 and ours.optimizer._lt_gradient_scale < 0.9
    close(stock) if hasattr(stock.optimizer, "lazytrain") else stock.destroy()
    close(ours)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_that_is_set_is_the_one_the_step_takes(tmp_path, dtype):
    results = []
    for how in ("full", "local", "vectorized"):
        engine = engine_of(tmp_path, step="hidden", dtype=dtype)
        named = parameters(engine)
        names = ["blocks.0.0.weight", "head.bias"]
        train(engine, [((of(engine, 0),), {})])
        forward_backward(engine, 1)
        if how == "vectorized":
            targets = [named[name] for name in (*names, "entry.bias")]
            deepspeed.utils.safe_update_full_grad_vectorized(
                targets, lambda gradient, p: torch.full_like(gradient, 0.25)
            )
        for name in names:
            value = torch.full(named[name].ds_shape, 0.25)
            if how == "full":
                safe_set_full_grad(named[name], value)
            elif how == "local":
                safe_set_local_grad(named[name], value.flatten())
            assert torch.equal(safe_get_full_grad(named[name]), value)
        engine.step()
        assert engine.get_global_grad_norm() > 0.25 * (67 * 134 + 211) ** 0.5 * 0.999
        train(engine, [((of(engine, 2),), {})])  # the next backward replaces what was set
        results.append(full_parameters(engine))
        close(engine)
    same(results[0], results[1])
    same(results[0], results[2])
    untouched = engine_of(tmp_path, dtype=dtype)
    train(untouched, [((of(untouched, step),), {}) for step in range(3)])
    assert not torch.equal(full_parameters(untouched)["head.bias"], results[0]["head.bias"])
    close(untouched)


def test_a_gradient_set_before_a_backward_gives_way_to_it_and_one_without_backward_counts(tmp_path):
    engine = engine_of(tmp_path)
    bias, unused = parameters(engine)["head.bias"], parameters(engine)["blocks.2.0.bias"]
    safe_set_full_grad(bias, torch.full((211,), 7.0))
    engine.backward(engine(features(0), order=(0, 1)))
    assert safe_get_full_grad(bias).max() < 7.0
    assert torch.equal(safe_get_full_grad(unused), torch.zeros(134))
    before = safe_get_full_fp32_param(unused)
    safe_set_full_grad(unused, torch.ones(134))
    engine.step()
    assert not torch.equal(safe_get_full_fp32_param(unused), before)
    close(engine)


def test_what_needs_no_wait_does_not_wait(tmp_path):
    engine = engine_of(tmp_path, scheduler=True)
    train(engine, [((of(engine, 0),), {})])
    engine.optimizer.drain()
    release = threading.Event()
    apply = engine.optimizer._lt_updater.apply
    engine.optimizer._lt_updater.apply = lambda *args: (release.wait(60), apply(*args))
    train(engine, [((of(engine, 1),), {})])
    rates = engine.get_lr()
    assert engine.get_global_grad_norm() > 0
    engine.module.state_dict()
    engine.lr_scheduler.step()
    assert engine.get_lr() != rates and [g["lr"] for g in engine.optimizer.param_groups] == engine.get_lr()
    assert engine.optimizer._lt_worker.busy and engine.optimizer.loss_scale == 1.0
    release.set()
    close(engine)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_rate_changed_while_updates_wait_counts_from_the_next_step_on(tmp_path, tier):
    kind = "fp32 on NVMe" if tier == "nvme" else "fp32 on host"
    results = []
    for step in ("hidden", "serial"):
        engine = engine_of(tmp_path, kind, step, scheduler=True)
        for number in range(3):
            train(engine, [((of(engine, number),), {})])
            for group in engine.optimizer.param_groups:
                group["lr"] *= 2.0
        results.append((engine.get_lr(), full_parameters(engine)))
        close(engine)
    same(*results)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_changed_weight_and_a_refresh_of_masters(tmp_path, dtype):
    """Weights edited in place are the masters' new values after `refresh_fp32_params`, as with stock."""
    results = []
    for step in ("hidden", "serial"):
        engine = engine_of(tmp_path, "fp32 on NVMe", step, dtype)
        train(engine, [((of(engine, 0),), {})])
        weight = parameters(engine)["blocks.1.0.weight"]
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.mul_(0.5)
        engine.optimizer.refresh_fp32_params()
        train(engine, [((of(engine, 1),), {})])
        results.append((full_parameters(engine), GETTERS["fp32 parameter"](engine)))
        close(engine)
    same(*results)


def test_raw_access_to_states_on_nvme_shows_that_they_are_away(tmp_path):
    engine = engine_of(tmp_path, "fp32 on NVMe")
    train(engine, [((of(engine, 0),), {})])
    assert [master.numel() for master in engine.optimizer.fp32_partitioned_groups_flat] == [0] * 5
    assert len(engine.optimizer.optimizer.state) == 0
    device = engine.optimizer.get_hp_param_device(parameters(engine)["head.bias"], "exp_avg")
    assert device == torch.device("cpu")
    close(engine)


def test_the_guarded_optimizer_is_otherwise_itself(tmp_path):
    engine = engine_of(tmp_path)
    inner = engine.optimizer.optimizer
    assert type(inner).__name__ == "FusedAdamW" and isinstance(inner, FusedAdamW)
    train(engine, [((of(engine, 0),), {})])
    for twin in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        assert type(twin) is FusedAdamW
        assert len(twin.state) == len(inner.state) == 5
    close(engine)
    assert type(inner) is FusedAdamW


def test_unknown_states_and_wrong_shapes_are_refused(tmp_path):
    engine = engine_of(tmp_path)
    weight = parameters(engine)["head.weight"]
    with pytest.raises(OptimizerError, match=r"no state 'momentum'.*exp_avg"):
        safe_get_full_optimizer_state(weight, "momentum")
    with pytest.raises(OptimizerError, match=r"3 elements, the parameter has 14137 \(\(211, 67\)\)"):
        safe_set_full_fp32_param(weight, torch.ones(3))
    close(engine)
