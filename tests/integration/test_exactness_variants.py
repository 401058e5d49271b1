"""The matrix of test_exactness.py in other circumstances: still the same bits under every plan.

Circumstances: accumulation over four micro-batches with evaluation in between, models that checkpoint by themselves,
NVMe homes (tensors of 1 MiB and more), and the example's own model. Ten optimizer steps, dropout on, fp32 and bf16
(for NVMe in bf16 three steps of a smaller batch: a CPU without bf16 arithmetic needs ten seconds for each).

`-m slow` runs a rule, the planner's choice under a cap and a random plan of each; `LAZYTRAIN_ALL_PLANS=1` every rule,
both programs and 20 random plans.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

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
    loss_of,
    plan_block,
    rule_block,
    run,
    run_plain,
)

STEPS = 10
ALL = os.environ.get("LAZYTRAIN_ALL_PLANS") == "1"
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lm.py"


# -- models --------------------------------------------------------------------------------------------------------
class CheckpointedGPT(models.GPT):
    """A GPT whose author wrote a checkpoint around each block."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def checkpointed(name: str) -> Any:
    if name == "gpt":
        return CheckpointedGPT(length=LENGTH)
    model = MODELS[name]()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def wide(name: str) -> Any:
    """Matrices of at least 1 MiB; in fp32 boundaries as well."""
    if name == "gpt":
        return gpt(width=512, blocks=3)
    return llama(width=512, blocks=3, tied=name == "llama-tied")


def example_model() -> Any:
    """examples/train_lm.py's own class: an odd number of blocks and its dropout, narrower."""
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ByteGPT(width=64, heads=4, blocks=5, length=LENGTH, dropout=0.1)


def example_calls(count: int, rows: int) -> list[dict[str, Any]]:
    batches = [models.batch(step, 256, rows, LENGTH + 1) for step in range(count)]
    return [{"inputs": batch[:, :-1], "targets": batch[:, 1:]} for batch in batches]


# -- circumstances -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """`make(name)` under a plan against `make_reference(name)` under keep_all; `between`: what happens in between."""

    make: Callable[[str], Any]
    make_reference: Callable[[str], Any] | None = None
    accumulation: int = 1
    between: Callable[[Any, int], None] | None = None
    nvme: bool = False

    def rows(self, dtype: str) -> int:
        return 1 if self.nvme and dtype == "bf16" else 2

    def steps(self, dtype: str) -> int:
        return 3 if self.nvme and dtype == "bf16" else STEPS

    def calls(self, name: str, dtype: str) -> list[dict[str, Any]]:
        count = self.steps(dtype) * self.accumulation
        if name == "example":
            return example_calls(count, self.rows(dtype))
        batches = [models.batch(step, rows=self.rows(dtype), length=LENGTH) for step in range(count)]
        return [dict.fromkeys(("input_ids", "labels"), batch) for batch in batches]

    def settings(self, block: dict[str, Any] | None, dtype: str, directory: Path | None = None) -> dict[str, Any]:
        if block is not None:  # measured times may put other choices on a block's menu: plans are from one instance
            block = {"replan": False, **block}
        if block is not None and self.nvme and directory is not None:
            block = {**block, "nvme_path": str(directory / "swap")}
        return config(block, dtype, self.accumulation, train_micro_batch_size_per_gpu=self.rows(dtype))


def evaluate(engine: Any, micro_step: int) -> None:
    """Another shape, without gradient, between forward and backward, inside accumulations and at their ends."""
    if micro_step % 3 == 1:
        engine.eval()
        with torch.no_grad():
            for rows in (1, 3):
                batch = models.batch(900 + micro_step, rows=rows, length=LENGTH // 2)
                assert torch.isfinite(loss_of(engine(input_ids=batch, labels=batch)))
        engine.train()


CASES = {
    "accumulation": Case(lambda name: MODELS[name](), accumulation=4, between=evaluate),
    "own checkpointing": Case(checkpointed, lambda name: MODELS[name]()),
    "nvme": Case(wide, nvme=True),
    "example": Case(lambda name: example_model()),
}
PAIRS = [
    (case, name, dtype)
    for case in CASES
    for name in (("example",) if case == "example" else ("gpt", "llama", "llama-tied"))
    for dtype in ("fp32", "bf16")
]


@dataclass
class Expected:
    """The run under keep_all, the instance of a run of this circumstance, and what keep_all would take."""

    result: Result
    instance: Instance
    peak_bytes: int


@functools.cache
def expected(case: str, name: str, dtype: str, directory: Path) -> Expected:
    chosen, seen = CASES[case], []

    def look(engine: Any) -> None:
        seen[:] = engine.lazytrain_plan, engine.lazytrain_instance

    settings = chosen.settings(rule_block("keep_all"), dtype, directory)
    calls = chosen.calls(name, dtype)
    result = run(lambda: (chosen.make_reference or chosen.make)(name), settings, calls, check=look)
    assert seen[0].origin == "keep_all" and len(result.gradients) == chosen.steps(dtype)
    if chosen.make_reference is not None:  # the blocks of a model that checkpoints may have another instance
        run(lambda: chosen.make(name), settings, calls[:1], check=look)
    return Expected(result, seen[1], seen[0].prediction.peak_bytes("device"))


def check(case: str, name: str, dtype: str, what: str | int, directory: Path, shared: Path) -> None:
    chosen, reference = CASES[case], expected(case, name, dtype, shared)
    seen: list[Any] = []
    if isinstance(what, int):
        plan = random_plan(reference.instance, what)
        block = plan_block(plan, directory)
    elif what == "capped":
        block = {"device_memory": int(0.8 * reference.peak_bytes)}
    else:
        block = rule_block(what)

    def look(engine: Any) -> None:
        seen[:] = engine.lazytrain_plan, engine.lazytrain_instance
        assert engine._lt_activations.mover.bytes_in_use == {"host": 0, "staging": 0}

    settings = chosen.settings(block, dtype, shared)  # one swap directory: the disk is measured once
    result = run(lambda: chosen.make(name), settings, chosen.calls(name, dtype), chosen.between, look)
    executed, instance = seen
    if isinstance(what, int):
        assert executed.blocks == plan.blocks and executed.optimizer_step == plan.optimizer_step
    elif what == "capped":
        assert executed.origin == "auto"
        assert executed.prediction.peak_bytes("device") <= instance.tier("device").usable_bytes < reference.peak_bytes
    elif what in (*RULES, "paper"):
        assert executed.origin == what
    result.assert_identical(reference.result)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name", "dtype"), PAIRS)
@pytest.mark.parametrize("what", ["megatrain", "capped", "random"])
def test_a_share_of_the_plans(case, name, dtype, what, tmp_path, shared):
    seed = 100 + PAIRS.index((case, name, dtype))
    check(case, name, dtype, seed if what == "random" else what, tmp_path, shared)


@pytest.mark.skipif(not ALL, reason="set LAZYTRAIN_ALL_PLANS=1 for the whole matrix")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "name", "dtype"), PAIRS)
@pytest.mark.parametrize("what", [*RULES, "paper", "rules", "milp", "capped", *range(20)])
def test_every_plan(case, name, dtype, what, tmp_path, shared):
    check(case, name, dtype, what, tmp_path, shared)


def test_random_plans_of_the_nvme_case_use_nvme_for_everything(shared):
    """Activations, parameters and states, over the seeds that are run."""
    instance = expected("nvme", "gpt", "fp32", shared).instance
    plans = [random_plan(instance, seed) for seed in range(20)]
    blocks = [block for plan in plans for block in plan.blocks]
    for attribute in ("boundary", "saved_tier", "parameter_tier"):
        assert any(getattr(block, attribute) == "nvme" for block in blocks), attribute
    assert any(block.optimizer.tier == "nvme" for block in blocks)
    assert min(instance.costs(index, 2).boundary_bytes for index in range(1, 4)) >= 2**20


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), [(case, name) for case, name, dtype in PAIRS if dtype == "fp32"])
def test_close_to_stock_zero3_and_to_plain_pytorch(case, name, shared):
    chosen, ours = CASES[case], expected(case, name, "fp32", shared).result
    stock, calls = chosen.settings(None, "fp32"), chosen.calls(name, "fp32")
    run(lambda: chosen.make(name), stock, calls).assert_close(ours)
    run_plain(lambda: chosen.make(name), stock, calls).assert_close(ours)
