"""The acceptance matrix: every choice and seeded mixes are bit-identical to keep-all under ZeRO-3, our coordinator.

`LAZYTRAIN_TEST_MIXES=50` runs all 50 mixes per model; by default a seeded 10 of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lazytrain_ds.runtime.activations import ActivationRuntime
from lazytrain_ds.runtime.policy import ActivationAction, PlanPolicy
from tests.runtime.activation_models import MODELS
from tests.runtime.activation_tools import (
    ATTENTION,
    BOUNDARY,
    KEEP,
    MATMULS,
    FakeStore,
    action,
    language_step,
    random_actions,
    segments,
)
from tests.runtime.zero3 import engine_for, zero3_config

STEP = language_step()
ALL_MIXES = range(50)
CHOSEN = int(os.environ.get("LAZYTRAIN_TEST_MIXES", "10"))
MIXES = sorted(random.Random(0).sample(ALL_MIXES, min(CHOSEN, len(ALL_MIXES))))


def choices(count: int) -> dict[str, list[ActivationAction]]:
    """Each choice alone."""
    both = MATMULS + ATTENTION
    return {
        "boundary": [BOUNDARY] * count,
        "boundary host": [action("boundary", "host")] * count,
        "boundary nvme": [action("boundary", "nvme", lead=2)] * count,
        "segments of 2": segments(count, 2),
        "segments of 3": segments(count, 3, "host"),
        "segments of 4": segments(count, 4, "nvme", lead=2),
        "saved host": [action("keep", "host", "host")] * count,
        "saved nvme": [action("keep", "nvme", "nvme", lead=2)] * count,
        "selective matmuls": [action("selective")] * count,
        "selective attention": [action("selective", ops=ATTENTION)] * count,
        "selective both, host": [action("selective", "host", "host", ops=both)] * count,
        "selective both, nvme": [action("selective", "nvme", "nvme", ops=both)] * count,
    }


class Trial:
    """An engine whose parameters never change (learning rate 0) and an activation runtime over its coordinator."""

    def __init__(self, name: str, accumulation: int, **zero: Any) -> None:
        from lazytrain_ds.runtime.setup import StoreAccess

        build, dtype = MODELS[name]
        torch.manual_seed(0)
        self.model = build()
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.accumulation = accumulation
        config = zero3_config(dtype, accumulation)
        config["zero_optimization"].update(zero)
        self.engine = engine_for(
            self.model, config, seed=5, optimizer=torch.optim.AdamW(trainable, lr=0.0, weight_decay=0.0)
        )
        self.setup = self.engine.optimizer.lazytrain
        modules = [self.setup.block_modules.get(block.index) for block in self.setup.resolved.table]
        self.places = [index for index, module in enumerate(modules) if module is not None]
        self.runtime = ActivationRuntime(
            modules, device=self.setup.device, parameters=StoreAccess(self.setup.store, self.setup.coordinator),
            store=FakeStore(), root=self.model, minimum_offload_bytes=1,
        )  # fmt: skip
        self.runtime.install()
        self.check_bytes = True

    @property
    def count(self) -> int:
        return len(self.places)

    def _policy(self, placed: Sequence[ActivationAction | None]) -> PlanPolicy:
        """Parameters where they were, and visits (re-runs before backward) as the actions make them."""
        blocks = []
        for before, one in zip(self.setup.plan.blocks, placed, strict=True):
            recomputed = one is not None and one.kind == "boundary"
            dropped = one is not None and one.boundary == "dropped"
            blocks.append(
                replace(
                    before, choice="boundary" if recomputed else "keep", boundary="dropped" if dropped else "device",
                    saved_tier="device",
                )
            )  # fmt: skip
        plan = replace(self.setup.plan, blocks=tuple(blocks))
        plan.check(self.setup.instance)
        return PlanPolicy(plan, self.setup.instance, self.setup.resolved.table)

    def run(self, actions: Sequence[ActivationAction | None]) -> list[torch.Tensor]:
        """Losses of one step's micro-steps and its whole gradient buffer; checks that nothing stays."""
        placed: list[ActivationAction | None] = [None] * len(self.runtime.blocks)
        for place, one in zip(self.places, actions, strict=True):
            placed[place] = one
        self.runtime.set_actions(placed)
        self.setup.coordinator.policy = self._policy(placed)
        torch.manual_seed(7)
        results = []
        for number in range(self.accumulation):
            self.runtime.micro_step_begins()
            with self.runtime.outer_context():
                loss = STEP(self.engine, number)
            self.runtime.backward_begins()
            self.engine.backward(loss)
            self.runtime.micro_step_ends()
            results.append(loss.detach().clone())
            if number + 1 < self.accumulation:
                self.engine.step()
            del loss
        self.engine.optimizer._lt_gradients.settle()
        results.append(torch.cat(self.engine.optimizer._lt_group_gradients))
        self.engine.step()
        if not self.check_bytes:
            return results
        self.runtime.mover.settle()
        held = {k: v for k, v in self.setup.device.ledger.by_purpose().items() if k.startswith("activations")}
        assert not held
        assert self.runtime.mover.bytes_in_use == {"host": 0, "staging": 0}
        return results

    def close(self) -> None:
        self.runtime.remove()
        self.engine.destroy()


def assert_same(reference: list[torch.Tensor], result: list[torch.Tensor], what: str) -> None:
    for number, (one, two) in enumerate(zip(reference, result, strict=True)):
        what_differs = "gradients" if number == len(result) - 1 else f"loss {number}"
        assert torch.equal(one, two), f"{what}: {what_differs} differ"


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_choice_and_mix_is_bit_identical_to_keep_all(name, accumulation):
    trial = Trial(name, accumulation)
    try:
        reference = trial.run([KEEP] * trial.count)
        assert all(torch.isfinite(each).all() for each in reference)
        assert reference[-1].abs().max() > 0
        assert_same(reference, trial.run([KEEP] * trial.count), "keep-all again")
        for choice, actions in choices(trial.count).items():
            assert_same(reference, trial.run(actions), choice)
        for seed in MIXES:
            assert_same(reference, trial.run(random_actions(trial.count, seed)), f"mix {seed}")
    finally:
        trial.close()
