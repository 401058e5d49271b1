"""A plan moves and recomputes; it never changes the result: ten steps, bit for bit, in the engine that users get.

Compared between plans: every loss, every accumulated gradient, the final weights (`torch.equal`). Compared with stock
ZeRO-3 and with plain PyTorch, in fp32: losses and weights to rtol 1e-5; their norm is summed in another order, so the
last bit of the clipping coefficient may differ.

`LAZYTRAIN_ALL_PLANS=1` runs every rule, every planner and 20 random plans for every model (20 minutes of one core);
without it each model and precision gets a share of them, other seeds each.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lazytrain_ds.planning.instance import Instance
from tests import models
from tests.integration.plans import random_plan
from tests.integration.training import (
    LENGTH,
    MODELS,
    RULES,
    Result,
    config,
    gpt,
    llama,
    plan_block,
    rule_block,
    run,
    run_plain,
    tokens,
)

STEPS = 10
# Caps that neither keeping everything nor the plans' other extremes meet: the planner has to mix.
CAPS = {
    ("gpt", "fp32"): "9MB",
    ("gpt", "bf16"): "5.5MB",
    ("llama", "fp32"): "24MB",
    ("llama", "bf16"): "18MB",
    ("llama-tied", "fp32"): "24MB",
    ("llama-tied", "bf16"): "18MB",
}
PAIRS = [(name, dtype) for name in ("gpt", "llama", "llama-tied") for dtype in ("fp32", "bf16")]
# A third of them is left to `-m slow`; random plans cover all six every time.
SLOW_PAIRS = {("llama", "bf16"), ("llama-tied", "fp32")}
MOST_PAIRS = [pytest.param(*pair, marks=[pytest.mark.slow] if pair in SLOW_PAIRS else []) for pair in PAIRS]
ALL = os.environ.get("LAZYTRAIN_ALL_PLANS") == "1"


def execute(name: str, dtype: str, block: dict[str, Any] | None) -> tuple[Result, Any, Instance | None]:
    """(result, plan in force at the end, its instance)."""
    seen: list[Any] = [None, None]

    def look(engine: Any) -> None:
        if block is not None:
            seen[:] = engine.lazytrain_plan, engine.lazytrain_instance
            assert engine._lt_activations.mover.bytes_in_use == {"host": 0, "staging": 0}

    result = run(MODELS[name], config(block, dtype), tokens(STEPS), check=look)
    return result, seen[0], seen[1]


@functools.cache
def reference(name: str, dtype: str) -> tuple[Result, Instance]:
    """The run under keep_all, and the instance that random plans are drawn from."""
    result, plan, instance = execute(name, dtype, rule_block("keep_all"))
    assert plan.origin == "keep_all"
    assert all(len(gradients) > 4 for gradients in result.gradients) and len(result.gradients) == STEPS
    assert instance is not None
    return result, instance


def check_random(name: str, dtype: str, seed: int, directory: Path) -> None:
    expected, instance = reference(name, dtype)
    plan = random_plan(instance, seed)
    result, executed, _ = execute(name, dtype, plan_block(plan, directory))
    assert executed.blocks == plan.blocks and executed.optimizer_step == plan.optimizer_step
    result.assert_identical(expected)


@pytest.mark.parametrize(("name", "dtype"), MOST_PAIRS)
@pytest.mark.parametrize("rule", ["checkpoint_all_host", "megatrain"])
def test_rules_are_bit_identical(name, dtype, rule):
    result, plan, _ = execute(name, dtype, rule_block(rule))
    assert plan.origin == rule
    result.assert_identical(reference(name, dtype)[0])


@pytest.mark.parametrize(("name", "dtype"), MOST_PAIRS)
def test_the_published_activation_program_is_bit_identical(name, dtype):
    result, plan, _ = execute(name, dtype, rule_block("paper"))
    assert plan.origin == "paper"
    result.assert_identical(reference(name, dtype)[0])


@pytest.mark.parametrize(("name", "dtype"), MOST_PAIRS)
def test_the_planners_choice_under_a_cap_is_bit_identical_and_within_the_cap(name, dtype):
    result, plan, instance = execute(name, dtype, {"device_memory": CAPS[name, dtype]})
    choices = {block.choice for block in plan.blocks}
    assert plan.origin == "auto" and (len(choices) > 1 or any(b.saved_tier == "host" for b in plan.blocks))
    assert plan.prediction.peak_bytes("device") <= instance.tier("device").usable_bytes
    result.assert_identical(reference(name, dtype)[0])


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
@pytest.mark.parametrize("share", [0, 1])
def test_random_plans_are_bit_identical(name, dtype, share, tmp_path):
    check_random(name, dtype, 2 * PAIRS.index((name, dtype)) + share, tmp_path)


@pytest.mark.skipif(not ALL, reason="set LAZYTRAIN_ALL_PLANS=1 for the whole matrix")
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("what", [*RULES, "paper", "rules", "milp", *range(20)])
def test_every_plan_is_bit_identical(name, dtype, what, tmp_path):
    if isinstance(what, int):
        check_random(name, dtype, what, tmp_path)
    else:
        execute(name, dtype, rule_block(what))[0].assert_identical(reference(name, dtype)[0])


@pytest.mark.parametrize("name", ["gpt", "llama", "llama-tied"])
def test_close_to_stock_zero3_and_to_plain_pytorch(name):
    ours = reference(name, "fp32")[0]
    execute(name, "fp32", None)[0].assert_close(ours)
    run_plain(MODELS[name], config(None), tokens(STEPS)).assert_close(ours)


# -- accumulation and evaluation -----------------------------------------------------------------------------------
@functools.cache
def accumulated(name: str) -> tuple[Result, Instance]:
    seen: list[Instance] = []
    settings = config(rule_block("keep_all"), accumulation=4)
    result = run(MODELS[name], settings, tokens(8), check=lambda engine: seen.append(engine.lazytrain_instance))
    assert len(result.gradients) == 2
    return result, seen[0]


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_accumulation(name, tmp_path):
    expected, instance = accumulated(name)
    assert instance.rounds(2) == 4
    blocks = [rule_block("megatrain"), plan_block(random_plan(instance, 31), tmp_path)]
    for block in blocks:
        run(MODELS[name], config(block, accumulation=4), tokens(8)).assert_identical(expected)
    stock = config(None, accumulation=4)
    run(MODELS[name], stock, tokens(8)).assert_close(expected)
    run_plain(MODELS[name], stock, tokens(8)).assert_close(expected)


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.slow), "llama"])
def test_evaluation_in_between_changes_nothing(name, tmp_path):
    """Another shape, without gradient, between forward and backward and inside an accumulation."""
    expected, instance = accumulated(name)
    losses: list[list[float]] = []

    def evaluate(engine: Any, micro_step: int) -> None:
        if micro_step % 3 == 1:
            engine.eval()
            with torch.no_grad():
                for rows in (1, 3, 1):
                    batch = models.batch(900 + micro_step, rows=rows, length=LENGTH // 2)
                    output = engine(input_ids=batch, labels=batch)
                    losses[-1].append(float(output if torch.is_tensor(output) else output.loss))
            engine.train()

    for block in (rule_block("megatrain"), plan_block(random_plan(instance, 32), tmp_path), rule_block("keep_all")):
        losses.append([])
        run(MODELS[name], config(block, accumulation=4), tokens(8), between=evaluate).assert_identical(expected)
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 9


# -- models that checkpoint by themselves --------------------------------------------------------------------------
class CheckpointedGPT(models.GPT):
    """A GPT whose author wrote a checkpoint around each block."""

    how = "non-reentrant"

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from deepspeed import checkpointing

        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            if self.how == "deepspeed":
                x = checkpointing.checkpoint(block, x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        logits = self.head(self.norm(x)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def checkpointed_gpt(how: str) -> Any:
    def make() -> models.GPT:
        model = CheckpointedGPT(length=LENGTH)
        model.how = how
        return model

    return make


def checkpointed_llama(reentrant: bool) -> Any:
    def make() -> Any:
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return make


OWN = {
    "torch, reentrant": (checkpointed_gpt("reentrant"), gpt),
    "torch, non-reentrant": (checkpointed_gpt("non-reentrant"), gpt),
    "deepspeed.checkpointing": (checkpointed_gpt("deepspeed"), gpt),
    "transformers, reentrant": (checkpointed_llama(True), llama),
    "transformers, non-reentrant": (checkpointed_llama(False), llama),
}


@functools.cache
def without_own_checkpointing(make: Any) -> Result:
    return run(make, config(rule_block("keep_all")), tokens(4))


@pytest.mark.parametrize("how", OWN)
def test_models_that_checkpoint_by_themselves(how):
    """The plan decides instead of the model, to the same bits."""
    make, plain = OWN[how]
    expected = without_own_checkpointing(plain)
    recomputes: list[int] = []
    for rule in ("keep_all", "megatrain"):

        def look(engine: Any) -> None:
            recomputes.append(engine._lt_activations.counters.recomputes)

        run(make, config(rule_block(rule)), tokens(4), check=look).assert_identical(expected)
    count = 5 if plain is gpt else 3
    assert recomputes == [0, 4 * count]
    run(make, config(None), tokens(4)).assert_close(expected)


# -- NVMe ----------------------------------------------------------------------------------------------------------
def wide_gpt() -> Any:
    """Boundaries and most saved tensors of at least 1 MiB."""
    return gpt(width=512, blocks=3)


def wide_llama() -> Any:
    return llama(width=512, blocks=3)


@pytest.mark.parametrize(
    "make", [pytest.param(wide_gpt, id="gpt"), pytest.param(wide_llama, id="llama", marks=pytest.mark.slow)]
)
def test_activations_on_nvme(make, tmp_path):
    seen: list[Instance] = []
    swap = tmp_path / "swap"
    nvme = {"nvme_path": str(swap)}
    expected = run(
        make, config({**rule_block("keep_all"), **nvme}), tokens(3), check=lambda e: seen.append(e.lazytrain_instance)
    )
    assert not swap.exists() or not os.listdir(swap), "a plan without NVMe opens no store"

    def went_there(engine: Any) -> None:
        store = engine._lt_book.nvme_store
        assert store.directory.parent == swap
        activations = engine._lt_activations.counters.offloaded_bytes["nvme"]
        assert activations >= 3 * 2**20
        states = any(block.optimizer.tier == "nvme" for block in engine.lazytrain_plan.blocks)
        assert store.bytes_written > activations if states else store.bytes_written >= activations

    forced = config({"activations": "nvme", **nvme})
    run(make, forced, tokens(3), check=went_there).assert_identical(expected)
    for seed in (41, 42):
        plan = random_plan(seen[0], seed)
        homes = {home for block in plan.blocks for home in (block.boundary, block.saved_tier)}
        assert "nvme" in homes
        run(make, config(plan_block(plan, tmp_path, **nvme)), tokens(3), check=went_there).assert_identical(expected)
    assert not swap.exists() or not os.listdir(swap)
