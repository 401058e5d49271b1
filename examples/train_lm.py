"""Train a small byte-level language model on the Python standard library's own source files.

A plain DeepSpeed script: everything about how it is trained stands in the DeepSpeed config.

    deepspeed --num_gpus 1 examples/train_lm.py --deepspeed_config ds_configs/quickstart_cpu.json
"""

import argparse
import math
import sysconfig
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed import comm
from torch import nn
from tqdm import tqdm

VOCABULARY = 256  # bytes
VALIDATION_BATCHES = 16


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class ByteGPT(nn.Module):
    """Returns the mean cross-entropy, in nats per byte, of predicting `targets` from `inputs` (both batch x length)."""

    def __init__(self, width: int, heads: int, blocks: int, length: int, dropout: float):
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs, targets):
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.drop(self.bytes(inputs) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_bytes():
    """(training bytes, validation bytes) from the standard library's modules; every tenth file is for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = ([], [])
    for index, file in enumerate(files):
        parts[index % 10 == 0].append(file.read_bytes())
    return tuple(torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)


def sample(data, batch: int, length: int, generator, device):
    """`batch` random windows: inputs, and the same windows one byte later."""
    starts = torch.randint(len(data) - length - 1, (batch,), generator=generator)
    windows = torch.stack([data[start : start + length + 1] for start in starts.tolist()]).long().to(device)
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def bits_per_byte(engine, data, length: int) -> float:
    """Mean over the same random validation windows every time; all ranks see the same ones."""
    engine.eval()
    generator = torch.Generator().manual_seed(1)
    batch = engine.train_micro_batch_size_per_gpu()
    losses = [engine(*sample(data, batch, length, generator, engine.device)).item() for _ in range(VALIDATION_BATCHES)]
    engine.train()
    return sum(losses) / len(losses) / math.log(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--length", type=int, default=128, help="bytes per training window")
    parser.add_argument("--width", type=int, default=400)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = ByteGPT(args.width, args.heads, args.blocks, args.length, args.dropout)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    chief = comm.get_rank() == 0
    train, validation = load_bytes()
    if chief:
        print(f"{parameters / 1e6:.1f} M parameters, {len(train) / 1e6:.1f} MB of training text", flush=True)

    before = bits_per_byte(engine, validation, args.length)
    generator = torch.Generator().manual_seed(args.seed + 1 + comm.get_rank())
    with tqdm(total=args.steps, desc="training", unit="step", disable=not chief, mininterval=1.0) as bar:
        while engine.global_steps < args.steps:
            for _ in range(engine.gradient_accumulation_steps()):
                batch = sample(train, engine.train_micro_batch_size_per_gpu(), args.length, generator, engine.device)
                loss = engine(*batch)
                engine.backward(loss)
                engine.step()
            bar.update()
            bar.set_postfix_str(f"{loss.item() / math.log(2):.3f} bits per byte", refresh=False)
    after = bits_per_byte(engine, validation, args.length)
    if chief:
        print(
            f"validation bits per byte: {before:.3f} before training, {after:.3f} after {args.steps} steps", flush=True
        )
    engine.destroy()


if __name__ == "__main__":
    main()
