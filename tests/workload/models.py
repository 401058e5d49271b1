"""Small models in the shapes users bring: each test names the property it needs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ResidualMLP(nn.Module):
    """Pre-norm residual block with odd widths."""

    def __init__(self, width: int = 67, hidden: int = 211, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class TinyLM(nn.Module):
    """Embedding, residual MLP blocks, norm and (tied) head; returns the loss when labels are given."""

    def __init__(self, depth: int = 3, width: int = 67, vocabulary: int = 97, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(ResidualMLP(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class EncoderDecoder(nn.Module):
    """Two families of blocks with a shared embedding."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.shared = nn.Embedding(50, width)
        self.encoder = nn.ModuleList(ResidualMLP(width, 3 * width) for _ in range(depth))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(ResidualMLP(width, 4 * width) for _ in range(depth + 1))
        self.head = nn.Linear(width, 50)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        memory = self.shared(input_ids)
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(input_ids) + self.encoder_norm(memory)
        for block in self.decoder:
            x = block(x)
        return self.head(x)


def llama(layers: int = 3, *, tied: bool = False, **changes: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = dict(
        vocab_size=101, hidden_size=64, intermediate_size=172, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def gpt2(layers: int = 3, **changes: object) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = dict(vocab_size=101, n_embd=64, n_layer=layers, n_head=4, n_positions=256, use_cache=False)
    return GPT2LMHeadModel(GPT2Config(**{**settings, **changes}))


def qwen2(layers: int = 3, **changes: object) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = dict(
        vocab_size=101, hidden_size=64, intermediate_size=172, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes}))


def mixtral(layers: int = 2, **changes: object) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = dict(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
        use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(MixtralConfig(**{**settings, **changes}))


def t5(layers: int = 2) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4, use_cache=False)
    )
