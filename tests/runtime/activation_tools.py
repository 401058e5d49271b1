"""What the activation tests share: small models, actions, a fake NVMe store, and one training pass."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lazytrain_ds.runtime.activations import KEEP, ActivationRuntime
from lazytrain_ds.runtime.device.cpu import CpuDevice
from lazytrain_ds.runtime.policy import ActivationAction

MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
ATTENTION = ("aten._scaled_dot_product_flash_attention_for_cpu.default",)


class Block(nn.Module):
    """Attention and MLP with dropout, biases, and a parameter of the block itself."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.project(attended), self.dropout, self.training) * self.scale
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Byte-level GPT; returns the loss."""

    def __init__(self, depth: int = 6, width: int = 32, dropout: float = 0.1, block: Callable[..., nn.Module] = Block,
                 vocabulary: int = 61, length: int = 16) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(block(width, dropout=dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class FakeTicket:
    """Done when the store says so, or when somebody waits."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def done(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class FakeStore:
    """The NVMe store's interface over a dict. Transfers happen at `wait`; `eager` ones at once."""

    def __init__(self, eager: bool = False) -> None:
        self.data: dict[str, torch.Tensor] = {}
        self.eager = eager
        self.written_bytes = self.read_bytes = 0
        self._last: dict[str, list[FakeTicket]] = {}

    def _ticket(self, key: str, work: Callable[[], None]) -> FakeTicket:
        earlier = list(self._last.get(key, ()))

        def in_order() -> None:
            for ticket in earlier:
                ticket.wait()
            work()

        ticket = FakeTicket(in_order)
        self._last.setdefault(key, []).append(ticket)
        if self.eager:
            ticket.wait()
        return ticket

    def write(self, key: str, tensor: torch.Tensor) -> FakeTicket:
        def work() -> None:
            self.data[key] = tensor.clone()
            self.written_bytes += tensor.nbytes

        return self._ticket(key, work)

    def read(self, key: str, out: torch.Tensor) -> FakeTicket:
        def work() -> None:
            out.copy_(self.data[key])
            self.read_bytes += out.nbytes

        return self._ticket(key, work)


def action(kind: str = "keep", boundary: str = "device", saved: str = "device", lead: int = 1,
           ops: tuple[str, ...] = MATMULS) -> ActivationAction:  # fmt: skip
    return ActivationAction(kind, ops if kind == "selective" else (), boundary, saved, lead)


BOUNDARY = action("boundary")
DROPPED = action("boundary", "dropped")


def segments(count: int, length: int, home: str = "device", lead: int = 1) -> list[ActivationAction]:
    """Every `length`-th boundary in `home`, the others dropped."""
    return [
        replace(DROPPED, lead=lead) if index % length else action("boundary", home, lead=lead) for index in range(count)
    ]


def random_actions(count: int, seed: int, store: bool = True) -> list[ActivationAction | None]:
    """Any valid plan."""
    draw = random.Random(seed)
    tiers = ["device", "host", "nvme"] if store else ["device", "host"]
    actions: list[ActivationAction | None] = []
    for index in range(count):
        before = actions[index - 1] if index else None
        kind = draw.choice(["keep", "selective", "boundary", "boundary", "boundary"])
        homes = list(tiers)
        if kind == "boundary" and before is not None and before.kind == "boundary":
            homes += ["dropped"] * 3
        saved = draw.choice(tiers) if kind != "boundary" else "device"
        ops = draw.choice([MATMULS, MATMULS + ATTENTION, ATTENTION])
        actions.append(action(kind, draw.choice(homes), saved, draw.randint(0, 3), ops))
    return actions


def make_runtime(model: nn.Module, blocks: list[nn.Module | None], **options: Any) -> ActivationRuntime:
    settings: dict[str, Any] = dict(device=CpuDevice(), store=FakeStore(), root=model, minimum_offload_bytes=1)
    return ActivationRuntime(blocks, **{**settings, **options})


@contextlib.contextmanager
def running(model: nn.Module, blocks: list[nn.Module | None], actions: Any = None,
            **options: Any) -> Iterator[ActivationRuntime]:  # fmt: skip
    """A runtime, installed for the duration."""
    runtime = make_runtime(model, blocks, **options)
    if actions is not None:
        runtime.set_actions(actions)
    runtime.install()
    try:
        yield runtime
    finally:
        runtime.remove()


@dataclass
class Pass:
    """Losses and gradients of some micro-steps."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]

    def assert_equal(self, other: Pass) -> None:
        for one, two in zip(self.losses, other.losses, strict=True):
            assert torch.equal(one, two), f"losses differ: {one} {two}"
        assert set(self.gradients) == set(other.gradients)
        for name, gradient in self.gradients.items():
            assert torch.equal(gradient, other.gradients[name]), f"gradient of {name} differs"


def run_pass(model: nn.Module, step: Callable[[nn.Module, int], torch.Tensor], runtime: ActivationRuntime | None = None,
             micro_steps: int = 2, seed: int = 7) -> Pass:  # fmt: skip
    """`micro_steps` accumulated micro-steps from one seed; `step(model, number)` is the loss."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    losses = []
    for number in range(micro_steps):
        if runtime is None:
            loss = step(model, number)
        else:
            runtime.micro_step_begins()
            with runtime.outer_context():
                loss = step(model, number)
            runtime.backward_begins()
        loss.backward()
        if runtime is not None:
            runtime.micro_step_ends()
        losses.append(loss.detach().clone())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Pass(losses, gradients)


def language_step(vocabulary: int = 61, length: int = 16, batch: int = 2) -> Callable[[nn.Module, int], torch.Tensor]:
    """Loss on fixed tokens, a different batch per micro-step; for our GPT and for transformers' models."""

    def step(model: nn.Module, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + number)
        tokens = torch.randint(0, vocabulary, (batch, length), generator=generator)
        output = model(input_ids=tokens, labels=tokens)
        return output if torch.is_tensor(output) else output.loss

    return step


def assert_nothing_left(runtime: ActivationRuntime) -> None:
    """Device and host bytes are back at the base line, without the garbage collector's help."""
    runtime.mover.settle()
    assert runtime.device.ledger.live_bytes == 0, runtime.device.ledger.by_purpose()
    assert runtime.mover.bytes_in_use == {"host": 0, "staging": 0}


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


__all__ = [
    "ATTENTION", "BOUNDARY", "DROPPED", "GPT", "KEEP", "MATMULS", "Block", "FakeStore", "Pass", "action",
    "assert_nothing_left", "language_step", "make_runtime", "no_garbage_collection", "random_actions", "run_pass",
    "running", "segments",
]  # fmt: skip
