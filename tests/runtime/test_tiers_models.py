"""Models that go their own way, under mixed tiers and late hidden updates: to the bits of the serial all-host plan."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from lazytrain_ds.optim.fused_adamw import FusedAdamW
from lazytrain_ds.runtime.swap import NvmeStore
from tests import models
from tests.runtime.test_observers import slow_down
from tests.runtime.test_stage3 import Tower, features
from tests.runtime.test_tiers import all_host, covering_plan
from tests.runtime.zero3 import engine_for, full_parameters, zero3_config

WIDTH = 67


class Experts(nn.Module):
    """Residual top-1 mixtures of three small experts; the batch decides, and one expert is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))}) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for depth, block in enumerate(self.blocks):
            chosen = int(x.detach().sum() > depth - 1)
            x = x + block["experts"][chosen](x)
        return self.head(x).square().mean()


class LayerDrop(Tower):
    """Drops blocks at random (seeded)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, tuple(index for index in range(3) if torch.rand(()) > 0.4))


class Branches(Tower):
    """Another block last in every step; sometimes none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return super().forward(x, ((0, 1, 2), (), (2, 0), (1, 1, 1))[self.step % 4])


class Oddities(nn.Module):
    """weight_norm, a packed 3-D parameter, a scalar, one without elements' worth of shape, an empty module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.convolution = nn.utils.weight_norm(nn.Conv1d(1, 1, 3, padding=1))
        self.blocks = nn.ModuleList(Packed() for _ in range(3))
        self.nothing = nn.Identity()
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x[:, None, :32] * self.scale)[:, 0]
        for block in self.blocks:
            x = self.nothing(block(x))
        return self.head(x).square().mean()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 32, 32) * 0.1)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * torch.einsum("bi,eij->bj", x, self.experts)


class MixedTypes(Tower):
    """bf16 blocks between an fp32 embedding and an fp32 head, with an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.to(torch.bfloat16)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.entry(x)
        for block in self.blocks:
            x = x + block(x.to(torch.bfloat16)).float()
        return self.head(x).square().mean()


class Around(Tower):
    """Parameters of the whole model, used before the first block and after the last, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 0.1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x + self.shifts[0]) * (1 + self.shifts[1])
        return super().forward(x) + F.mse_loss(self.shifts[0], torch.zeros(WIDTH))


def vectors(step):
    return {"x": features(step)}


def tokens(step):
    return dict.fromkeys(("input_ids", "labels"), models.batch(step))


MODELS = {
    "experts": (Experts, vectors),
    "layer drop": (LayerDrop, vectors),
    "branches": (Branches, vectors),
    "oddities": (Oddities, vectors),
    "mixed types": (MixedTypes, vectors),
    "around": (Around, vectors),
    "tied gpt": (lambda: models.GPT(tied=True), tokens),
}


def run(tmp_path, make, inputs, arrange, late, calls=5, backwards=1, accumulation=2):
    # As in our engine: upstream's broadcast among one rank fails on parameters without dimensions.
    alone = mock.patch.object(DeepSpeedEngine, "_broadcast_model", lambda self: None)
    with NvmeStore(tmp_path) as store, alone:
        torch.manual_seed(0)
        model = make()
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        config = zero3_config(accumulation=accumulation, clip=0.05)
        engine = engine_for(model, config, 0, optimizer=optimizer, nvme=store, arrange=arrange)
        if late:
            slow_down(engine)
        losses = []
        torch.manual_seed(7)
        for number in range(calls * accumulation):
            for repeat in range(backwards):
                loss = engine(**inputs(10 * number + repeat))
                if number % 3 == 1:  # evaluation inside an accumulation, another shape
                    engine.eval()
                    with torch.no_grad():
                        state = torch.get_rng_state()
                        engine(**{name: value[:1] for name, value in inputs(99).items()})
                        torch.set_rng_state(state)
                    engine.train()
                if repeat < backwards - 1:
                    engine.set_gradient_accumulation_boundary(False)
                elif backwards > 1:
                    engine.set_gradient_accumulation_boundary(number % accumulation == accumulation - 1)
                engine.backward(loss)
                losses.append(loss.item())
            engine.step()
        weights = full_parameters(engine)
        engine.destroy()
    return losses, weights


def assert_same(one, other):
    assert one[0] == other[0]
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_tiers_and_late_updates_are_exact(tmp_path, name, number):
    make, inputs = MODELS[name]
    expected = run(tmp_path, make, inputs, all_host, False)
    assert_same(run(tmp_path, make, inputs, covering_plan(number, "hidden"), True), expected)


def test_several_backwards_in_one_micro_step(tmp_path):
    expected = run(tmp_path, Tower, vectors, all_host, False, backwards=3)
    assert_same(run(tmp_path, Tower, vectors, covering_plan(0, "hidden"), True, backwards=3), expected)
    torch.manual_seed(0)
    plain = Tower()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number in range(10):
        for repeat in range(3):
            (plain(**vectors(10 * number + repeat)) / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in expected[1].items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_two_parameter_groups_of_one_dtype_and_one_of_another(tmp_path):
    def grouped(arrange, late):
        def change(plan):
            return replace(arrange(plan), optimizer_step="hidden" if late else "serial")

        return run(tmp_path, MixedTypes, vectors, change, late, accumulation=1)

    assert_same(grouped(covering_plan(1, "hidden"), True), grouped(all_host, False))
