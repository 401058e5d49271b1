"""Models that checkpoint by themselves: the plan takes over around and inside blocks, and nowhere else."""

from __future__ import annotations

import functools
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint

from tests.runtime.activation_models import llama
from tests.runtime.activation_tools import (
    BOUNDARY,
    GPT,
    KEEP,
    Block,
    action,
    assert_nothing_left,
    language_step,
    random_actions,
    run_pass,
    running,
    segments,
)
from tests.runtime.zero3 import one_process_group

STEP = language_step()
DEPTH = 4


@pytest.fixture(scope="module", autouse=True)
def configured() -> None:
    one_process_group()
    deepspeed.init_distributed("gloo")
    deepspeed.checkpointing.configure(None, partition_activations=False, num_checkpoints=DEPTH)


def torch_checkpoint(reentrant: bool, function: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=reentrant, **kwargs)


WAYS: dict[str, Any] = {
    "torch, non-reentrant": functools.partial(torch_checkpoint, False),
    "torch, reentrant": functools.partial(torch_checkpoint, True),
    "deepspeed": lambda function, *args: deepspeed.checkpointing.checkpoint(function, *args),
    "deepspeed, non-reentrant": lambda function, *args: deepspeed.checkpointing.non_reentrant_checkpoint(
        function, *args
    ),
}


class Around(GPT):
    """Checkpoints around its blocks; `style` is how the function refers to them."""

    def __init__(self, way: str, style: str = "module") -> None:
        super().__init__(DEPTH)
        self.way, self.style = way, style

    def span(self, start: int, stop: int) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            for index in range(start, stop):
                x = self.blocks[index](x)
            return x

        return run

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        way = WAYS[self.way]
        if self.style == "span":
            for start in range(0, DEPTH, 2):
                x = way(self.span(start, start + 2), x)
        else:
            for block in self.blocks:
                function = block if self.style == "module" else (lambda y, block=block: block(y))
                x = way(function, x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class InsideBlock(Block):
    """Checkpoints its own MLP."""

    way = ""

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.project(self.norm1(x)), self.dropout, self.training) * self.scale
        return x + WAYS[self.way](self.mlp, x)


PLANS = {
    "keep": [KEEP] * DEPTH,
    "boundary": [BOUNDARY] * DEPTH,
    "dropped": segments(DEPTH, DEPTH, "host"),
    "offload": [action("keep", "host", "host")] * DEPTH,
    "selective": [action("selective")] * DEPTH,
    "mix": random_actions(DEPTH, 2),
}
WORK = {"keep": (0, 0), "boundary": (0, 4), "dropped": (3, 4), "offload": (0, 0), "selective": (0, 4)}


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_around_blocks_are_taken_over(way):
    torch.manual_seed(0)
    model = Around(way)
    plain = GPT(DEPTH)
    plain.load_state_dict(model.state_dict())
    reference = run_pass(plain, STEP)
    run_pass(model, STEP).assert_equal(reference)
    for style in ("module", "lambda"):
        model.style = style
        for name, plan in PLANS.items():
            with running(model, list(model.blocks), plan) as runtime:
                run_pass(model, STEP, runtime).assert_equal(reference)
                if name in WORK:  # exactly the plan's second runs, none of the user's
                    assert (runtime.counters.reruns, runtime.counters.recomputes) == tuple(2 * n for n in WORK[name])
                assert runtime.takeover.taken == 2 * DEPTH
                assert_nothing_left(runtime)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_may_or_may_not_hold_blocks_is_known_after_its_first_time(way):
    torch.manual_seed(0)
    model = Around(way, "span")
    reference = run_pass(model, STEP)
    for plan in PLANS.values():
        with running(model, list(model.blocks), plan) as runtime:
            run_pass(model, STEP, runtime).assert_equal(reference)
            assert_nothing_left(runtime)
            taken = runtime.takeover.taken
            assert taken > 0
            run_pass(model, STEP, runtime).assert_equal(reference)
            assert runtime.takeover.taken == taken + 2 * 2
            assert_nothing_left(runtime)


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_inside_blocks_are_taken_over(way):
    torch.manual_seed(0)
    InsideBlock.way = way
    model = GPT(DEPTH, block=InsideBlock)
    reference = run_pass(model, STEP)
    for name, plan in PLANS.items():
        with running(model, list(model.blocks), plan) as runtime:
            run_pass(model, STEP, runtime).assert_equal(reference)
            if name in WORK:
                assert runtime.counters.recomputes == 2 * WORK[name][1]
            assert runtime.takeover.taken > 0
            assert_nothing_left(runtime)


@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_gradient_checkpointing_enable_is_taken_over(reentrant):
    torch.manual_seed(0)
    model = llama()
    reference = run_pass(model, STEP)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    layers = list(model.model.layers)
    for plan in ([KEEP] * 5, [BOUNDARY] * 5, segments(5, 3), [action("selective", "host", "host")] * 5):
        with running(model, layers, plan) as runtime:
            run_pass(model, STEP, runtime).assert_equal(reference)
            expected = 0 if plan[0].kind == "keep" else 2 * 5
            assert runtime.counters.recomputes == expected
            assert runtime.takeover.taken > 0
            assert_nothing_left(runtime)


class ChunkedLoss(GPT):
    """Checkpoints its head, which no plan recomputes: that stays the user's."""

    runs = 0

    def chunk(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        halves = zip(x.chunk(2), labels.chunk(2), strict=True)
        return sum(WAYS[self.way](self.chunk, *half) for half in halves)


@pytest.mark.parametrize("way", ["torch, non-reentrant", "torch, reentrant", "deepspeed"])
def test_checkpoints_without_blocks_stay_the_users(way):
    torch.manual_seed(0)
    model = ChunkedLoss(DEPTH)
    model.way = way
    reference = run_pass(model, STEP)
    for plan in PLANS.values():
        with running(model, list(model.blocks), plan) as runtime:
            model.runs = 0
            run_pass(model, STEP, runtime).assert_equal(reference)
            assert model.runs == 2 * 2 * 2, "both halves, twice, in both micro-steps"
            assert runtime.takeover.taken == 0
            assert_nothing_left(runtime)


def test_other_models_and_threads_see_the_originals_while_ours_is_installed():
    torch.manual_seed(0)
    ours, other = Around("torch, non-reentrant"), Around("torch, reentrant")
    names = (torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._checkpoint_without_reentrant_generator)
    runs = []
    hook = other.blocks[0].up.register_forward_hook(lambda *_: runs.append(1))
    reference = run_pass(other, STEP)
    once = len(runs)
    with running(ours, list(ours.blocks), PLANS["boundary"]) as first, running(other, []) as second:
        runs.clear()
        run_pass(other, STEP).assert_equal(reference)
        assert len(runs) == once == 4
        run_pass(ours, STEP, first)
        assert second.takeover.taken == 0 and first.takeover.taken == 2 * DEPTH
    hook.remove()
    assert names == (
        torch.utils.checkpoint.CheckpointFunction,
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
    )


def test_activations_partitioned_across_ranks_stay_partitioned(monkeypatch):
    module = deepspeed.runtime.activation_checkpointing.checkpointing
    torch.manual_seed(0)
    model = Around("deepspeed")
    with running(model, list(model.blocks), PLANS["boundary"]) as runtime:
        partitioned = []
        monkeypatch.setattr(module, "mp_size", 2)
        monkeypatch.setattr(module, "PARTITION_ACTIVATIONS", True)

        def partition(args: Any, *_: Any) -> Any:
            partitioned.append(len(args))
            raise InterruptedError  # the real one needs a second rank; that it is reached is what counts

        monkeypatch.setattr(module, "partition_activations", partition)
        with pytest.raises(InterruptedError):
            run_pass(model, STEP, runtime)
        assert partitioned == [1] and runtime.takeover.taken == 0
        runtime.abort()
