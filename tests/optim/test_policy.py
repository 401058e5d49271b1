"""Which parameters keep fp32 moments."""

import pytest
import torch
from torch import nn

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.optim.policy import PrecisionPolicy


class RMSNormLike(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class MyEmbedding(nn.Embedding):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = MyEmbedding(300, 64, padding_idx=0)
        self.positions = nn.Embedding(100, 64)
        self.proj = nn.Linear(64, 128)
        self.norm = RMSNormLike(8192)
        self.layer_norm = nn.LayerNorm(8192)
        self.wide = nn.Linear(1, 9000)
        self.scale = nn.Parameter(torch.ones(5000))
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.tokens.weight


def precisions(model, **options):
    policy = PrecisionPolicy(**options)
    policy.observe(model)
    return {n: policy.choice(p) for n, p in model.named_parameters(remove_duplicate=False)}


def test_embeddings_norms_biases_and_small_tensors_keep_fp32():
    got = precisions(Model())
    assert {n: c.precision for n, c in got.items()} == {
        "tokens.weight": "fp32",
        "positions.weight": "fp32",
        "proj.weight": "8bit",
        "proj.bias": "fp32",
        "norm.weight": "fp32",
        "layer_norm.weight": "fp32",
        "layer_norm.bias": "fp32",
        "wide.weight": "8bit",
        "wide.bias": "fp32",
        "scale": "fp32",
        "head.weight": "fp32",  # tied to the embedding
    }
    assert got["tokens.weight"].reason == got["head.weight"].reason == "embedding"
    assert got["norm.weight"].reason == "norm" and got["wide.bias"].reason == "bias"
    assert got["proj.bias"].reason == "128 elements, fewer than 4096"
    assert got["scale"].reason == "one-dimensional"


def test_tying_the_other_way_round():
    model = nn.ModuleDict({"head": nn.Linear(64, 300, bias=False), "tokens": nn.Embedding(300, 64)})
    model["tokens"].weight = model["head"].weight  # the head comes first and owns the parameter
    assert precisions(model)["head.weight"].precision == "fp32"


def test_globs_win():
    got = precisions(Model(), fp32=["proj.*"], quantized=["positions.*", "norm.weight"])
    assert got["proj.weight"] == ("fp32", "matches 'proj.*'")
    assert got["positions.weight"].precision == got["norm.weight"].precision == "8bit"
    assert (
        precisions(Model(), quantized=["head.weight"])["tokens.weight"].precision == "8bit"
    )  # any of a tied one's names


def test_the_size_limit():
    assert precisions(Model(), min_8bit_size=0)["wide.weight"].precision == "8bit"
    assert precisions(Model(), min_8bit_size=8193)["proj.weight"].precision == "fp32"


def test_peft_wrapped_embeddings():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=64, target_modules=["tokens", "proj"], modules_to_save=["positions"])
    model = peft.get_peft_model(Model(), config)
    got = precisions(model)
    trained = {
        n: c.precision for n, c in got.items() if dict(model.named_parameters(remove_duplicate=False))[n].requires_grad
    }
    embedding = [n for n in trained if "lora_embedding" in n or "positions.modules_to_save" in n]
    assert len(embedding) == 3 and all(trained[n] == "fp32" for n in embedding)
    assert any("proj.lora_A" in n and p == "8bit" for n, p in trained.items())


def test_partitioned_parameters_count_with_their_full_size():
    param = nn.Parameter(torch.empty(0))
    param.ds_numel, param.ds_shape = 10_000, torch.Size([100, 100])
    assert PrecisionPolicy().choice(param).precision == "8bit"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(fp32="proj.*"), "must be a list of globs"),
        (dict(fp32=["nothing.*"]), "'nothing.*' matches no parameter; names look like"),
        (dict(min_8bit_size=-1), "min_8bit_size is -1"),
        (dict(fp32=["proj.*"], quantized=["proj.weight"]), "make one of them narrower"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ConfigError) as caught:
        precisions(Model(), **options)
    assert message in str(caught.value)
