"""Small models of the shapes that users train, with dropout where the real ones have it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A pre-norm transformer block with a parameter of its own and biases everywhere."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.out(a), self.dropout, self.training) * self.scale
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """A GPT whose forward returns the loss, as plain DeepSpeed scripts do."""

    def __init__(
        self,
        vocabulary: int = 211,
        width: int = 64,
        blocks: int = 5,
        heads: int = 4,
        length: int = 32,
        dropout: float = 0.1,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def llama(blocks: int = 3, width: int = 64, vocabulary: int = 211, length: int = 32, tied: bool = False) -> nn.Module:
    """A Hugging Face Llama with grouped-query attention and attention dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=172,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=length,
            use_cache=False,
            attention_dropout=0.1,
            tie_word_embeddings=tied,
        )
    )


def batch(step: int, vocabulary: int = 211, rows: int = 2, length: int = 32) -> torch.Tensor:
    """Token ids that depend on `step` alone."""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1000 + step))
