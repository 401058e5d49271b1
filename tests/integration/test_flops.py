"""Counted FLOPs of the blocks' matmuls in the real engine are what the executed plan says: 6N, 8N, 6 + 2(2m-1)/m."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lazytrain_ds.planning.plan import Plan
from tests.integration.training import LENGTH, config, engine_of, gpt, llama, loss_of, plan_block, tokens

BLOCKS = 6
TOKENS = 2 * LENGTH


def segments(instance: Any, length: int) -> Plan:
    """Every `length`-th block keeps its boundary, the others drop it; 0: every block keeps everything."""
    from lazytrain_ds.planning.rules import build, sub_group

    plan = build("checkpoint_all" if length else "keep_all", instance, 2, "host", sub_group(instance, "host"))
    dropped = [i for i in range(2, BLOCKS + 1) if length and (i - 1) % length]
    blocks = [replace(b, boundary="dropped") if i in dropped else b for i, b in enumerate(plan.blocks)]
    return replace(plan, blocks=tuple(blocks), origin=f"segments of {length}")


def counted(make: Any, settings: dict[str, Any]) -> tuple[int, Any, dict[str, int]]:
    """FLOPs of one step after the first, the engine's instance, and the recomputations of that step."""
    torch.manual_seed(0)
    with engine_of(make(), settings) as engine:
        first, second = tokens(2)
        engine.backward(loss_of(engine(**first)))
        engine.step()
        counters = engine._lt_activations.counters
        counters.reset()
        with FlopCounterMode(display=False) as counter:
            engine.backward(loss_of(engine(**second)))
            engine.step()
        runs = {"reruns": counters.reruns, "recomputes": counters.recomputes}
        return counter.get_total_flops(), engine.lazytrain_instance, runs


def block_weights(model: Any) -> int:
    """Elements of matrices inside the blocks."""
    blocks = model.blocks if hasattr(model, "blocks") else model.model.layers
    return sum(p.numel() for block in blocks for p in block.parameters() if p.dim() == 2)


@pytest.fixture(scope="module")
def kept() -> Any:
    return counted(lambda: gpt(blocks=BLOCKS), config({"planner": {"kind": "keep_all"}}))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 6])
def test_blocks_of_a_gpt_do_what_the_plan_says(kept, length, tmp_path):
    """Attention on a CPU is one operator that the counter does not know, so only parameters' matmuls are counted."""
    model = gpt(blocks=BLOCKS)
    _, instance, _ = kept
    plan = segments(instance, length)
    total, _, runs = counted(lambda: gpt(blocks=BLOCKS), config(plan_block(plan, tmp_path)))
    per_parameter_and_token = (total - 6 * model.head.weight.numel() * TOKENS) / (block_weights(model) * TOKENS)
    expected = 6 + 2 * (2 * length - 1) / length if length else 6
    assert per_parameter_and_token == pytest.approx(expected, rel=1e-12)
    segment_count = BLOCKS // length if length else 0
    assert runs == {"reruns": BLOCKS - segment_count if length else 0, "recomputes": BLOCKS if length else 0}


def test_the_planner_knows_the_same_figures(kept, tmp_path):
    total, instance, _ = kept
    costs = [instance.costs(block, 2) for block in range(1, BLOCKS + 1)]
    attention = sum(c.forward_flops for c in costs) - 2 * block_weights(gpt(blocks=BLOCKS)) * TOKENS
    assert attention >= 0
    checkpointed, _, _ = counted(lambda: gpt(blocks=BLOCKS), config(plan_block(segments(instance, 1), tmp_path)))
    assert checkpointed - total == sum(c.menu[-1].recompute_flops for c in costs) - attention


def test_early_stop_skips_what_backward_does_not_need(tmp_path):
    """Without dropout behind it the last matmul's output is not needed: 8N less that matmul's forward."""

    def make() -> Any:
        return gpt(blocks=BLOCKS, dropout=0.0)

    model = make()
    total, instance, _ = counted(make, config({"planner": {"kind": "checkpoint_all"}}))
    last = sum(block.down.weight.numel() for block in model.blocks)
    blocks = total - 6 * model.head.weight.numel() * TOKENS
    by_plan = sum(instance.costs(block, 2).menu[-1].recompute_flops for block in range(1, BLOCKS + 1))
    forward = sum(instance.costs(block, 2).forward_flops for block in range(1, BLOCKS + 1))
    assert blocks in (8 * block_weights(model) * TOKENS, (8 * block_weights(model) - 2 * last) * TOKENS)
    assert forward - by_plan == (8 * block_weights(model)) * TOKENS - blocks


def six_layer_llama() -> Any:
    return llama(blocks=BLOCKS)


@pytest.fixture(scope="module")
def kept_llama() -> Any:
    return counted(six_layer_llama, config({"planner": {"kind": "keep_all"}}))


@pytest.mark.parametrize(("length", "ratio"), [(1, 8 / 6), (3, (6 + 10 / 3) / 6)])
def test_blocks_of_a_llama_do_what_the_plan_says(kept_llama, length, ratio, tmp_path):
    """Its attention is made of matmuls that count as well; they are recomputed in the same proportion."""
    head = 6 * six_layer_llama().lm_head.weight.numel() * TOKENS
    keep, instance, _ = kept_llama
    total, _, _ = counted(six_layer_llama, config(plan_block(segments(instance, length), tmp_path)))
    assert (total - head) / (keep - head) == pytest.approx(ratio, rel=1e-12)
