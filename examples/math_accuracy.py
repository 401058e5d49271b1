"""Does a run with other optimizer states learn arithmetic as well? Exact answers, the same problems for every config.

A plain DeepSpeed script: a small GPT learns additions of three-digit numbers once per config, from the same weights and
batches. It prints the share of unseen problems solved with every digit right, and on how many the runs differ.

    deepspeed --num_gpus 1 examples/math_accuracy.py --configs examples/configs/math_fp32.json \
        examples/configs/math_8bit.json

Takes a few minutes on a CPU (1500 steps a config); with --smoke, under a minute, and accuracies mean nothing.
"""

import argparse
import math
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.nn import functional

DIGITS = 3
VOCABULARY = 12  # ten digits, "+" and "="
_PLUS, _EQUALS = 10, 11
CONTEXT = 3 * DIGITS + 3
PROBLEMS = 20_000


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits (batch x length x vocabulary) for token ids (batch x length); the head shares the embedding's weight."""

    def __init__(self, vocabulary, context, width, depth, heads):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = 0.02 / math.sqrt(2 * depth) if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(p, std=scale)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def additions(a, b):
    """Token ids of "a + b = sum" with all numbers least digit first, and targets for the sum's digits only."""

    def digits(x, count):
        return torch.stack([x // 10**i % 10 for i in range(count)], 1)

    n = len(a)
    symbols = torch.tensor([[_PLUS, _EQUALS]]).expand(n, 2)
    row = torch.cat(
        [digits(a, DIGITS), symbols[:, :1], digits(b, DIGITS), symbols[:, 1:], digits(a + b, DIGITS + 1)], 1
    )
    targets = row[:, 1:].clone()
    targets[:, : 2 * DIGITS + 1] = -100
    return row[:, :-1], targets


def random_additions(count, generator):
    """`count` random problems as `additions` gives them."""
    return additions(*torch.randint(0, 10**DIGITS, (2, count), generator=generator))


@torch.no_grad()
def solved(model, count=PROBLEMS, device="cpu"):
    """Which of the same `count` problems come out right: every digit, each after the true ones before it."""
    ids, targets = random_additions(count, torch.Generator().manual_seed(99))
    right = []
    for rows, expected in zip(ids.split(2000), targets.split(2000), strict=True):
        got = model(rows.to(device)).argmax(-1)[:, -DIGITS - 1 :].cpu()
        right.append((got == expected[:, -DIGITS - 1 :]).all(1))
    return torch.cat(right)


def train(config, options):
    """Train as one config says; returns the problems solved at the end and the loss of the last step."""
    torch.manual_seed(options.seed)
    model = GPT(VOCABULARY, CONTEXT, options.width, options.depth, 4)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(1000 + options.seed)
    while engine.global_steps < options.steps:
        ids, targets = random_additions(engine.train_micro_batch_size_per_gpu(), generator)
        logits = engine(ids.to(engine.device))
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten().to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.global_steps % 250 == 0 and engine.is_gradient_accumulation_boundary():
            print(f"  step {engine.global_steps}: loss {loss.item():.4f}", flush=True)
    engine.eval()
    result = solved(engine, options.problems, engine.device)
    engine.destroy()
    return result, loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument(
        "--configs", nargs="+", required=True, help="DeepSpeed configs to compare, the first as reference"
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.problems = 12, 2000

    results = {}
    for config in options.configs:
        print(f"{config}:", flush=True)
        results[config] = train(config, options)
    reference = results[options.configs[0]][0]
    for config, (right, loss) in results.items():
        differ = int((right != reference).sum())
        accuracy = 100 * right.double().mean().item()
        print(
            f"{Path(config).stem}: {accuracy:.2f} % of {len(right)} problems solved, last loss {loss:.4f}, "
            f"{differ} solved by only one of this and {Path(options.configs[0]).stem}",
            flush=True,
        )


if __name__ == "__main__":
    main()
