"""Tiers mixed over blocks train to the same bits as everything in host memory, and to plain PyTorch's weights.

Thirty steps with clipping at work, two interleaved parameter groups and an empty one, a warm-up schedule, tensors of at
least 1 MiB in the compute dtype beside ones of 1, 3, 511, 513 and 67 x 211 elements, and a parameter of one element
registered first (there stock DeepSpeed 0.19.8 trains wrong on NVMe). On the file system of `tmp_path`: where /tmp is a
tmpfs, give pytest a `--basetemp` on a disk.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import tempfile
import time
from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn

from lazytrain_ds.optim.fused_adamw import FusedAdamW
from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit
from lazytrain_ds.planning.plan import SubGroupPlan
from lazytrain_ds.runtime.device.emulated import EmulatedDevice, Emulation
from lazytrain_ds.runtime.swap import NvmeStore
from tests.runtime.test_nvme_tiers import Wide
from tests.runtime.test_stage3 import assert_same, train
from tests.runtime.zero3 import engine_for, full_parameters, zero3_config

TIERS = ("device", "host", "nvme")
STEPS = 30
CLIP = 0.05
# A large epsilon: Adam turns the rounding noise of gradients that are nearly zero into whole steps, and plain PyTorch's
# noise differs from ours.
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5}
RATES = [1e-3, 3e-3]  # DeepSpeed drops the empty group
# 727 x 727 bf16 and 515 x 515 fp32 are 1.06 MB: neither a row nor a bias is a multiple of a disk block.
WIDTHS = {"fp32": 515, "bf16": 727}


def orthogonal_rows() -> list[tuple[str, str, int, bool]]:
    """(parameter tier, state tier, lead, kept): nine rows in which any two of the tiers and leads meet."""
    return [
        (p, o, (number + other) % 3, (number + 2 * other) % 3 < 2)
        for (number, p), (other, o) in itertools.product(enumerate(TIERS), enumerate(TIERS))
    ]


def covering_plan(number: int, step: str):
    """A change of a plan: block b gets row `5 * number + b`, so that plans 0 and 1 execute every row."""
    rows = orthogonal_rows()

    def arrange(plan):
        blocks = []
        for index, block in enumerate(plan.blocks):
            parameters, states, lead, kept = rows[(number * plan.block_count + index) % len(rows)]
            group = SubGroupPlan(states, block.optimizer.precision, "device" if states == "device" else "host")
            blocks.append(
                replace(block, parameter_tier=parameters, parameter_lead=lead, keep_parameters=kept, optimizer=group)
            )
        return replace(plan, blocks=tuple(blocks), optimizer_step=step)

    return arrange


def all_host(plan):
    blocks = tuple(
        replace(
            block,
            parameter_tier="host",
            parameter_lead=0,
            keep_parameters=False,
            optimizer=SubGroupPlan("host", block.optimizer.precision, "host"),
        )
        for block in plan.blocks
    )
    return replace(plan, blocks=blocks, optimizer_step="serial")


def groups(model: nn.Module) -> list[dict]:
    parameters = list(model.parameters())
    return [
        {"params": parameters[::2], "weight_decay": 0.1},
        {"params": parameters[1::2], "weight_decay": 0.0},
        {"params": []},
    ]


def calls(count: int, dtype: str):
    result = []
    for step in range(count):
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(100 + step))
        result.append(((x.to(torch.bfloat16) if dtype == "bf16" else x,), {}))
    return result


def run(arrange, dtype, accumulation, steps, optimizer_type=FusedAdamW, device=None, throttle=None):
    """(losses and norms, weights) of a run under a plan."""
    torch.manual_seed(0)
    model = Wide(WIDTHS[dtype])
    optimizer = optimizer_type(groups(model), **ADAM)
    warm_up = {"type": "WarmupLR", "params": {"warmup_max_lr": RATES, "warmup_num_steps": 10}}
    config = zero3_config(dtype, accumulation, clip=CLIP, scheduler=warm_up)
    with tempfile.TemporaryDirectory() as directory, NvmeStore(directory, throttle=throttle) as store:
        engine = engine_for(model, config, 0, device=device, optimizer=optimizer, nvme=store, arrange=arrange)
        try:
            losses = []
            for number, call in enumerate(calls(steps * accumulation, dtype)):
                losses += train(engine, [call])
                if number % accumulation == accumulation - 1:
                    losses.append(float(engine.get_global_grad_norm()))
            assert steps < 12 or engine.get_lr() == RATES
            return losses, full_parameters(engine)
        finally:
            engine.destroy()


@functools.cache
def reference(dtype, accumulation, steps, optimizer_type=FusedAdamW):
    losses, weights = run(all_host, dtype, accumulation, steps, optimizer_type)
    norms = losses[accumulation :: accumulation + 1]
    assert min(norms) > 2 * CLIP, "clipping has to be at work in every step"
    return losses, weights


def plain(accumulation, steps):
    """The same training in plain PyTorch, fp32."""
    torch.manual_seed(0)
    model = Wide(WIDTHS["fp32"])
    optimizer = torch.optim.AdamW(groups(model)[:2], **ADAM)
    schedule = WarmupLR(optimizer, warmup_max_lr=RATES, warmup_num_steps=10)
    losses = []
    for number, (args, _) in enumerate(calls(steps * accumulation, "fp32")):
        loss = model(*args)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if number % accumulation == accumulation - 1:
            losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_close_to_plain(accumulation, steps):
    losses, weights = plain(accumulation, steps)
    assert losses == pytest.approx(reference("fp32", accumulation, steps)[0], rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(
            reference("fp32", accumulation, steps)[1][name], weight, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: n + m
        )


def test_the_rows_meet_pairwise():
    rows = orthogonal_rows()
    assert {row[:2] for row in rows} == set(itertools.product(TIERS, TIERS))
    for factor in (0, 1):
        assert {(row[factor], row[2]) for row in rows} == set(itertools.product(TIERS, range(3)))
        assert {(row[factor], row[3]) for row in rows} == set(itertools.product(TIERS, (True, False)))
    assert {(row[2], row[3]) for row in rows} == set(itertools.product(range(3), (True, False)))


@pytest.mark.parametrize(
    ("number", "step", "dtype", "accumulation"), [(0, "hidden", "fp32", 1), (1, "hidden", "bf16", 4)]
)
def test_mixed_tiers_are_exact(number, step, dtype, accumulation):
    steps = 6 if accumulation == 1 else 3
    assert_same(run(covering_plan(number, step), dtype, accumulation, steps), reference(dtype, accumulation, steps))


def test_all_host_is_plain_pytorch():
    assert_close_to_plain(1, 6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_8bit_states_in_mixed_tiers_are_exact(dtype):
    kind = (dtype, 1, 4, HybridAdamW8bit)
    expected = reference(*kind)
    assert_same(run(covering_plan(0, "hidden"), *kind), expected)
    assert expected[0] != reference(dtype, 1, 4)[0], "8-bit moments round"


@pytest.mark.parametrize("seed", range(int(os.environ.get("LAZYTRAIN_TEST_SEEDS", "4"))))
def test_nan_in_freed_slots_and_random_delays_on_all_channels_change_nothing(seed):
    """`LAZYTRAIN_TEST_SEEDS=50` runs fifty. What is read too late is NaN, and every transfer may be the last one."""
    dtype, accumulation = ("fp32", "bf16")[seed // 2 % 2], (1, 4)[seed // 4 % 2]
    delay = random.Random(seed)
    device = EmulatedDevice(Emulation(10**9, h2d=4e9, d2h=4e9, debug=True, seed=seed))
    try:
        found = run(
            covering_plan(seed % 2, "hidden"), dtype, accumulation, 3, device=device,
            throttle=lambda *_: time.sleep(delay.choice((0.0, 0.0, 0.002, 0.01))),
        )  # fmt: skip
        assert device.ledger.live_bytes == 0
    finally:
        device.close()
    assert_same(found, reference(dtype, accumulation, 3))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("step", ["hidden", "serial"])
@pytest.mark.parametrize("number", [0, 1])
def test_every_mix_of_tiers_is_exact_after_thirty_steps(number, step, dtype, accumulation):
    expected = reference(dtype, accumulation, STEPS)
    assert_same(run(covering_plan(number, step), dtype, accumulation, STEPS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
def test_thirty_steps_are_plain_pytorchs(accumulation):
    assert_close_to_plain(accumulation, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("number", [0, 1])
def test_every_mix_of_tiers_is_exact_with_8bit_states(number, dtype):
    expected = reference(dtype, 1, STEPS, HybridAdamW8bit)
    assert_same(run(covering_plan(number, "hidden"), dtype, 1, STEPS, HybridAdamW8bit), expected)
