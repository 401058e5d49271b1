"""The models of the acceptance matrix, small. Each builder seeds itself; each takes `input_ids` and `labels`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.runtime.activation_tools import GPT, Block

VOCABULARY = 61


def _transformers(name: str, **settings: object) -> nn.Module:
    import transformers

    common = dict(vocab_size=VOCABULARY, use_cache=False)
    config = getattr(transformers, f"{name}Config")(**{**common, **settings})
    return getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(config)


_ROTARY = dict(
    hidden_size=32, intermediate_size=88, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, attention_dropout=0.1,
)  # fmt: skip


def llama() -> nn.Module:
    return _transformers("Llama", **_ROTARY)


def qwen2_tied() -> nn.Module:
    return _transformers("Qwen2", **_ROTARY, tie_word_embeddings=True)


def mixtral() -> nn.Module:
    return _transformers("Mixtral", **_ROTARY, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)


def gpt2_dropout() -> nn.Module:
    return _transformers("GPT2", n_embd=32, n_layer=5, n_head=4, n_positions=64, resid_pdrop=0.1, embd_pdrop=0.1,
                         attn_pdrop=0.1)  # fmt: skip


class LoraLinear(nn.Module):
    """A frozen linear with a trainable low-rank correction."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def lora() -> nn.Module:
    """Everything frozen, norms included, except the corrections."""
    model = GPT(5)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.down = LoraLinear(block.qkv), LoraLinear(block.down)
    return model


def frozen_linears() -> nn.Module:
    model = GPT(5)
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.requires_grad_(False)
    return model


def frozen_embedding() -> nn.Module:
    model = GPT(5)
    model.embed.requires_grad_(False)
    model.position.requires_grad_(False)
    return model


class ConvBlock(nn.Module):
    """A weight-normed convolution, batch statistics and a residual."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 3, padding=1))
        self.norm, self.dropout = nn.BatchNorm1d(width), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return x + F.dropout(F.relu(y), self.dropout, self.training)


def conv_weight_norm() -> nn.Module:
    return GPT(5, block=ConvBlock)


class Float32Norm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return y.to(x.dtype)


def float32_norms() -> nn.Module:
    model = GPT(5)
    for block in model.blocks:
        block.norm1, block.norm2 = Float32Norm(32), Float32Norm(32)
    return model


def gpt() -> nn.Module:
    return GPT(5)


# name -> (builder, whether the engine runs in bf16)
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt": (gpt, "fp32"),
    "gpt bf16, fp32 norms": (float32_norms, "bf16"),
    "llama": (llama, "fp32"),
    "llama bf16": (llama, "bf16"),
    "qwen2 tied": (qwen2_tied, "fp32"),
    "mixtral top-2": (mixtral, "fp32"),
    "gpt2 dropout": (gpt2_dropout, "fp32"),
    "frozen embedding and lora": (lora, "fp32"),
    "frozen linears": (frozen_linears, "fp32"),
    "frozen embedding": (frozen_embedding, "bf16"),
    "conv weight norm": (conv_weight_norm, "fp32"),
}

__all__ = ["MODELS", "VOCABULARY", "Block"]
