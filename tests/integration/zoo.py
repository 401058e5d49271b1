"""Models that users really have and that break trainers: each takes `x` (rows, length, WIDTH) and returns a loss."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32
LENGTH = 256  # a boundary of 64 KiB: large enough to be offloaded


def features(count: int, rows: int = 2, length: int = LENGTH) -> list[dict[str, Any]]:
    return [
        {"x": torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(step))} for step in range(count)
    ]


class Mlp(nn.Module):
    """The plainest block, with dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Stack(nn.Module):
    """`entry`, blocks, `head`; the loss is the mean square."""

    block: type[nn.Module] = Mlp
    count = 4

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run_blocks(self.entry(x))).square().mean()


class NoBlocks(nn.Module):
    """Nothing is repeated: the whole model is one block."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.mixed, self.head = nn.Linear(WIDTH, WIDTH), Mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixed(self.entry(x))).square().mean()


class Nested(Stack):
    """Lists in a list, as in models of several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(Mlp() for _ in range(2)) for _ in range(2))

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.blocks:
            for block in stage:
                x = block(x)
        return x


class KeywordBlock(Mlp):
    """Everything by keyword, and a tuple with None and a dictionary back."""

    def forward(self, *, hidden: torch.Tensor, scale: float, mask: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        out = super().forward(hidden * scale)
        if mask is not None:
            out = out * mask
        return out, None, {"k": out}


class Keywords(Stack):
    block = KeywordBlock

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], 1, dtype=x.dtype)
        for number, block in enumerate(self.blocks):
            _, nothing, extra = block(hidden=x, scale=1.0 + 0.1 * number, mask=mask if number % 2 else None)
            assert nothing is None
            x = extra["k"]
        return x


class SharedInside(Stack):
    """One normalisation and one projection used inside every block."""

    def __init__(self) -> None:
        super().__init__()
        shared_norm, shared_up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        for block in self.blocks:
            block.norm, block.up = shared_norm, shared_up


class SharedLayers(Stack):
    """ALBERT: one block, several times, and another one in between."""

    def __init__(self) -> None:
        super().__init__()
        one, two = Mlp(), Mlp()
        self.blocks = nn.ModuleList([one, two, one, one])


class OtherOrder(Stack):
    """Called last to first, the second one twice."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for number in (3, 2, 1, 1, 0):
            x = self.blocks[number](x)
        return x


class Skips(Stack):
    """U-Net like: what early blocks return goes into late ones as well."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        third = self.blocks[2](second + first)
        return self.blocks[3](third + x) + second


class Router(nn.Module):
    """Data-dependent routing: experts see the tokens that chose them, some see none; a balance loss on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero().squeeze(-1)
            if at.numel():
                out = out.index_add(0, at, expert(flat[at]) * weights[at, None])
        return x + out.view_as(x), weights.mean()


class Experts(Stack):
    block = Router

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, balance = self.entry(x), 0.0
        for block in self.blocks:
            x, penalty = block(x)
            balance = balance + penalty
        return self.head(x).square().mean() + 0.01 * balance


class Containers(Stack):
    """Parameters owned by the model itself, by a list, and by a container around the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(self.count))
        self.blocks.register_parameter("gain", nn.Parameter(torch.ones(WIDTH)))

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = block(x * scale)
        return x * self.blocks.gain


class Tied(Stack):
    """The head is the entry transposed, and one matrix is shared by two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.entry.weight
        self.blocks[3].up.weight = self.blocks[0].up.weight


class LayerDrop(Stack):
    """Skips a block with probability a half, by Python's generator."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return x


class OddBlock(nn.Module):
    """weight_norm, a packed 3-D tensor, a scalar, a single-element bias, an empty module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
        self.packed = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.1)
        self.gain = nn.Parameter(torch.tensor([0.5]))
        self.one = nn.Linear(WIDTH, 1)
        self.nothing = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.transpose(1, 2)).transpose(1, 2)
        y = torch.einsum("btw,ewv->btv", y, self.packed)
        return self.nothing(x + self.gain * y * torch.sigmoid(self.one(x)))


class Odd(Stack):
    block = OddBlock


class ScalarBlock(OddBlock):
    """A parameter without dimensions, and one that nothing but its exponential uses."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.temperature = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.temperature.exp())


class Scalars(Stack):
    block = ScalarBlock


@dataclass
class Output:
    """What a block returns whose author likes dataclasses: tensors, None, numbers and text."""

    hidden: torch.Tensor
    norms: list[torch.Tensor]
    nothing: None = None
    count: int = 1
    name: str = "block"


class DataclassBlock(Mlp):
    def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
        out = super().forward(x)
        return Output(out, [out.square().mean()], count=x.shape[0])


class Dataclasses(Stack):
    block = DataclassBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, norms = self.entry(x), []
        for block in self.blocks:
            output = block(hidden)
            assert output.nothing is None and output.count == x.shape[0] and output.name == "block"
            hidden = output.hidden
            norms += output.norms
        return self.head(hidden).square().mean() + 0.01 * torch.stack(norms).sum()


class CacheBlock(Mlp):
    """Fills a cache that goes from block to block, as decoders of Hugging Face do with `use_cache=True`."""

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:  # type: ignore[override]
        out = super().forward(x)
        cache.append(out.detach())
        return out, cache


class Caches(Stack):
    block = CacheBlock

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        cache: list[torch.Tensor] = []
        for block in self.blocks:
            x, cache = block(x, cache)
        assert len(cache) == self.count, "one entry per block, however often a block runs"
        return x + 0.1 * cache[0]


class Remember(torch.autograd.Function):
    """Keeps an integer tensor and a plain attribute in its context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        order = torch.arange(x.shape[-1] - 1, -1, -1)
        ctx.save_for_backward(x, order)
        ctx.factor = torch.tensor(3.0)
        return x.sin()[..., order] * ctx.factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, order = ctx.saved_tensors
        return gradient[..., order] * ctx.factor * x.cos()


class Custom(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * Remember.apply(super().forward(x))


class CustomFunction(Stack):
    block = Custom


class Moving(Mlp):
    """Running statistics that a second forward must not move again, and in-place activations."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.batch = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.batch(x.transpose(1, 2)).transpose(1, 2)
        return super().forward(F.relu(self.up(y), inplace=True)[..., :WIDTH] + x)


class Buffers(Stack):
    block = Moving


class FrozenNorms(Stack):
    """Frozen normalisation and entry, the author's own checkpoint around every block."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.entry.parameters(), *(p for b in self.blocks for p in b.norm.parameters())):
            parameter.requires_grad_(False)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant:
            x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class FrozenNormsReentrant(FrozenNorms):
    reentrant = True


class LoraBlock(Mlp):
    """Frozen weights with low-rank additions."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.b(self.a(x))


class Lora(Stack):
    block = LoraBlock

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.entry.parameters():
            parameter.requires_grad_(False)


ZOO: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        Stack, NoBlocks, Nested, Keywords, SharedInside, SharedLayers, OtherOrder, Skips, Experts, Containers, Tied,
        LayerDrop, Odd, Scalars, Dataclasses, Caches, CustomFunction, Buffers, FrozenNorms, FrozenNormsReentrant, Lora,
    )
}  # fmt: skip
