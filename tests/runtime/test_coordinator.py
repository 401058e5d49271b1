"""When blocks are fetched and let go inside the real engine: what a plan lays out, whatever the model does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.program import PARAMETER, Program
from tests.integration.training import config, engine_of, llama, rule_block, run, tokens, train

pytest.importorskip("deepspeed")

WIDTH = 48


def copies_planned(engine) -> int:
    """Parameter copies of one optimizer step, by the simulator's layout of the plan in force."""
    plan, instance = engine.lazytrain_plan, engine.lazytrain_instance
    program = Program(Costs(instance, plan.micro_batch), plan)
    return plan.rounds * sum(transfer.kind == PARAMETER for issued in program.issues for transfer in issued)


@pytest.mark.parametrize("rule", ["keep_all", "checkpoint_all", "megatrain"])
def test_each_block_is_copied_as_often_as_the_plan_says(rule):
    """Llama's last module uses its weights before autograd unpacks anything: its segment must be re-run before that."""
    torch.manual_seed(0)
    with engine_of(llama(blocks=5), config(rule_block(rule))) as engine:
        train(engine, tokens(1))
        before = engine.optimizer._lt_store.copies
        train(engine, tokens(2))
        assert engine.optimizer._lt_store.copies - before == 2 * copies_planned(engine)


class Tail(nn.Module):
    """A block whose last operation saves nothing: its bias gets its gradient before anything is unpacked."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.last = nn.Parameter(torch.zeros(WIDTH)) if own else Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return self.last(x) if isinstance(self.last, Shift) else x + self.last


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def features(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))} for step in range(count)]


@pytest.mark.parametrize("own", [True, False], ids=["own bias", "child's bias"])
def test_a_block_that_ends_in_a_bias_can_be_in_a_segment(own):
    def make() -> nn.Module:
        return Stack(*(Tail(own) for _ in range(4)))

    kept = run(make, config(rule_block("keep_all")), features(3))
    run(make, config(rule_block("megatrain")), features(3)).assert_identical(kept)


class Penalised(Tail):
    """Part of the loss leaves the block beside its output, as a router's balance loss does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(x))
        self.penalty = inner.square().mean()
        return x + self.down(inner)


class PenalisedStack(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return loss + 0.1 * sum(block.penalty for block in self.blocks)


@pytest.mark.parametrize("rule", ["checkpoint_all", "megatrain"])
def test_a_loss_that_leaves_a_block_beside_its_output(rule):
    def make() -> nn.Module:
        return PenalisedStack(*(Penalised(False) for _ in range(4)))

    kept = run(make, config(rule_block("keep_all")), features(3))
    run(make, config(rule_block(rule)), features(3)).assert_identical(kept)
