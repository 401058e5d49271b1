"""Another plan from the next step on: everything moves to its new home, and the run stays what it was, bit for bit.

Plans follow each other that differ in every decision, tiers of parameters and states among them, on a real file system.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from lazytrain_ds.errors import PlanError, SwapError
from lazytrain_ds.planning.plan import SubGroupPlan
from lazytrain_ds.runtime.swap import NvmeStore
from lazytrain_ds.workload.measure import MeasuredCache
from tests.integration.plans import random_plan
from tests.integration.training import ADAMW, MODELS, Result, config, engine_of, rule_block, tokens, train

STEPS = 6
HYBRID = {"type": "HybridAdamW8bit", "params": {**ADAMW["params"], "min_8bit_size": 1024}}


def settings(directory, dtype, accumulation, kind, rule="checkpoint_all", **block):
    optimizer = HYBRID if kind == "8bit" else ADAMW
    block = {**rule_block(rule), "nvme_path": str(directory), "replan": False, **block}
    return config(block, dtype, accumulation, optimizer=optimizer)


def execute(name: str, values: dict[str, Any], accumulation: int, seeds=(), look=None) -> tuple[Result, list[Any]]:
    """A run whose plan is replaced by the random one of `seeds[n]` after step n."""
    moves: list[Any] = []
    torch.manual_seed(0)
    model = MODELS[name]()
    with engine_of(model, values) as engine:
        torch.manual_seed(7)
        parts = []
        calls = tokens(STEPS * accumulation)
        for step in range(STEPS):
            parts.append(train(engine, calls[step * accumulation : (step + 1) * accumulation]))
            if step < len(seeds):
                instance = engine.lazytrain_instance
                plan = random_plan(instance, seeds[step])
                moves.append(engine._lt_adopt(instance, plan))
                assert engine.lazytrain_plan.blocks == plan.blocks
                check_homes(engine)
        if look is not None:
            look(engine)
    whole = Result([loss for part in parts for loss in part.losses], [g for part in parts for g in part.gradients])
    whole.weights = parts[-1].weights
    return whole, moves


def check_homes(engine):
    optimizer, plan = engine.optimizer, engine.lazytrain_plan
    for sub_group in optimizer._lt_layout.sub_groups:
        assert optimizer._lt_states.tiers[sub_group.index] == plan.blocks[sub_group.block].optimizer.tier
    on_nvme = {index for index, block in enumerate(plan.blocks) if block.parameter_tier == "nvme"}
    assert set(optimizer._lt_homes.on_nvme) == on_nvme
    store = engine._lt_book.nvme_store
    keys = set(store.keys()) if store is not None else set()
    parameters = {part.key for block in optimizer._lt_layout.blocks if block.index in on_nvme for part in block.parts}
    assert {key for key in keys if key.startswith("parameters/")} == parameters
    states = {f"states/{index}" for index, tier in enumerate(optimizer._lt_states.tiers) if tier == "nvme"}
    assert {key for key in keys if key.startswith("states/")} == states


@functools.cache
def reference(name, dtype, accumulation, kind, directory):
    return execute(name, settings(directory, dtype, accumulation, kind), accumulation)[0]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("nvme")


CASES = [
    ("gpt", "fp32", 1, "adamw", 0),
    ("llama-tied", "bf16", 4, "8bit", 20),
    pytest.param("gpt", "bf16", 4, "adamw", 10, marks=pytest.mark.slow),
    pytest.param("llama-tied", "bf16", 1, "8bit", 20, marks=pytest.mark.slow),
    pytest.param("gpt", "fp32", 4, "8bit", 30, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "dtype", "accumulation", "kind", "seed"), CASES)
def test_very_different_plans_may_follow_each_other(disk, name, dtype, accumulation, kind, seed):
    expected = reference(name, dtype, accumulation, kind, disk)
    values = settings(disk, dtype, accumulation, kind)
    result, moves = execute(name, values, accumulation, range(seed, seed + STEPS))
    assert all(each.parameters and each.states and each.moved_bytes for each in moves)
    result.assert_identical(expected)


def test_frozen_blocks_become_resident(disk):
    """Nothing updates them, so only their move can say that a new slot holds nothing yet."""

    def execute(resident: bool) -> Result:
        torch.manual_seed(0)
        model = MODELS["gpt"]()
        model.blocks[1].requires_grad_(False)
        with engine_of(model, settings(disk, "fp32", 1, "adamw", "megatrain")) as engine:
            torch.manual_seed(7)
            first = train(engine, tokens(STEPS)[:2])
            if resident:
                plan = engine.lazytrain_plan
                blocks = tuple(replace(block, parameter_tier="device") for block in plan.blocks)
                assert blocks != plan.blocks
                engine._lt_adopt(engine.lazytrain_instance, replace(plan, blocks=blocks))
            rest = train(engine, tokens(STEPS)[2:])
        return Result([*first.losses, *rest.losses], [*first.gradients, *rest.gradients], rest.weights)

    execute(True).assert_identical(execute(False))


# -- what real steps show ------------------------------------------------------------------------------------------
def test_a_link_that_slows_down_in_the_middle_of_a_run(capsys):
    """Measured, solved again, moved at a step boundary; the same bits as a run without."""
    device = {"device": {"emulate": {"memory": "6MB", "h2d": "2GB/s", "d2h": "2GB/s"}}}

    def execute(replan):
        torch.manual_seed(0)
        block = {**device, "replan": replan, "planner": {"time_limit": 0.2}}
        with engine_of(MODELS["gpt"](), config(block)) as engine:
            torch.manual_seed(7)
            parts = [train(engine, tokens(8))]
            before = engine.lazytrain_plan
            engine._lt_book.device._channels["h2d"].rate = 2e7
            parts.append(train(engine, tokens(18)[8:]))
            channel = engine.lazytrain_instance.channel("h2d").bytes_per_second
            resolved = engine._lt_replanner.resolved if engine._lt_replanner else 0
            after = engine.lazytrain_plan
        whole = Result([*parts[0].losses, *parts[1].losses], [*parts[0].gradients, *parts[1].gradients])
        whole.weights = parts[1].weights
        return whole, resolved, channel, before, after

    expected, none, untouched, *_ = execute(False)
    assert none == 0 and untouched == 2e9
    capsys.readouterr()
    result, resolved, channel, before, after = execute("auto")
    result.assert_identical(expected)
    said = capsys.readouterr().out
    assert resolved >= 1 and channel == pytest.approx(2e7, rel=0.3)
    assert "h2d 0.0" in said and "GB/s instead of" in said and "solved again" in said
    if after.blocks != before.blocks:
        assert "plan (solved again; " in said


def test_measured_times_are_kept_for_the_next_run(tmp_path):
    block = {"profile": {"cache_dir": str(tmp_path)}, "replan": "auto", "planner": {"time_limit": 0.2}}
    values = config(block)
    torch.manual_seed(0)
    with engine_of(MODELS["gpt"](), values) as engine:
        assert engine._lt_book.corrections is None
        train(engine, tokens(STEPS))
        estimated = engine._lt_book.estimated
    files = list(tmp_path.glob("measured-*.json"))
    assert len(files) == 1
    torch.manual_seed(0)
    with engine_of(MODELS["gpt"](), values) as engine:
        train(engine, tokens(1))
        book = engine._lt_book
        assert book.corrections is not None and book.estimated.classes == estimated.classes
        block = next(item for item in book.instance.classes if item.name == "Block").at(2)
        assert block.forward_seconds == pytest.approx(MeasuredCache(tmp_path).load(key_of(files[0]))["Block"].forward)
    values["lazytrain"]["profile"]["refresh"] = True
    with engine_of(MODELS["gpt"](), values) as engine:
        assert engine._lt_book.corrections is None


def key_of(file):
    return file.stem.removeprefix("measured-")


def test_a_plan_may_wait_until_nobody_holds_parameters(disk):
    import deepspeed

    torch.manual_seed(0)
    with engine_of(MODELS["gpt"](), settings(disk, "fp32", 1, "adamw", replan="auto")) as engine:
        train(engine, tokens(1))
        instance = engine.lazytrain_instance
        plan = random_plan(instance, 3)
        parameters = list(engine.module.blocks[1].parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            engine._lt_waiting_plan = (instance, plan)
            engine._lt_replan(None)
            assert engine._lt_waiting_plan is not None and engine.lazytrain_plan.blocks != plan.blocks
        engine._lt_replan(None)
        assert engine._lt_waiting_plan is None and engine.lazytrain_plan.blocks == plan.blocks
        train(engine, tokens(1))


def test_a_move_that_finds_no_room_is_undone(disk, monkeypatch):
    torch.manual_seed(0)
    values = settings(disk, "fp32", 1, "adamw")
    expected = reference("gpt", "fp32", 1, "adamw", disk)
    with engine_of(MODELS["gpt"](), values) as engine:
        torch.manual_seed(7)
        first = train(engine, tokens(STEPS)[:2])
        instance, before = engine.lazytrain_instance, engine.lazytrain_plan
        everything = tuple(
            replace(block, parameter_tier="nvme", optimizer=SubGroupPlan("nvme", "fp32", "host"))
            for block in before.blocks
        )
        real, calls = NvmeStore.write, []

        def full(self, key, tensor):
            calls.append(key)
            if len(calls) > 5:
                raise SwapError(f"NVMe store: no room for {key}")
            return real(self, key, tensor)

        monkeypatch.setattr(NvmeStore, "write", full)
        with pytest.raises(SwapError, match="no room"):
            engine._lt_adopt(instance, replace(before, blocks=everything))
        monkeypatch.setattr(NvmeStore, "write", real)
        assert engine.lazytrain_plan is before and len(calls) > 5
        check_homes(engine)
        rest = train(engine, tokens(STEPS)[2:])
    whole = Result([*first.losses, *rest.losses], [*first.gradients, *rest.gradients], rest.weights)
    whole.assert_identical(expected)


def test_another_precision_is_no_plan_for_the_same_run(disk):
    torch.manual_seed(0)
    with engine_of(MODELS["gpt"](), settings(disk, "fp32", 1, "8bit", state_precision="auto")) as engine:
        train(engine, tokens(1))
        before = engine.lazytrain_plan
        other = {"8bit": "fp32", "fp32": "8bit"}
        blocks = tuple(
            replace(block, optimizer=replace(block.optimizer, precision=other[block.optimizer.precision]))
            for block in before.blocks
        )
        with pytest.raises(PlanError, match="another plan cannot make them"):
            engine._lt_adopt(engine.lazytrain_instance, replace(before, blocks=blocks))
        assert engine.lazytrain_plan is before


def test_a_checkpoint_after_a_change_of_plan_is_that_of_the_run_without(disk, tmp_path):
    expected = reference("gpt", "fp32", 1, "adamw", disk)
    torch.manual_seed(0)
    with engine_of(MODELS["gpt"](), settings(disk, "fp32", 1, "adamw")) as engine:
        torch.manual_seed(7)
        first = train(engine, tokens(STEPS)[:3])
        engine._lt_adopt(engine.lazytrain_instance, random_plan(engine.lazytrain_instance, 5))
        engine.save_checkpoint(str(tmp_path))
        state = torch.get_rng_state()
    torch.manual_seed(1)
    with engine_of(MODELS["gpt"](), settings(disk, "fp32", 1, "adamw")) as engine:
        engine.load_checkpoint(str(tmp_path))
        torch.set_rng_state(state)
        rest = train(engine, tokens(STEPS)[3:])
    whole = Result([*first.losses, *rest.losses], [*first.gradients, *rest.gradients], rest.weights)
    whole.assert_identical(expected)
