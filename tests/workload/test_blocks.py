"""Blocks of models as users write them: every parameter owned once, order, kinds, classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lazytrain_ds.errors import ConfigError, UnsupportedError
from lazytrain_ds.workload.blocks import BlockTable, find_blocks
from tests.workload.models import EncoderDecoder, ResidualMLP, TinyLM, gpt2, llama, mixtral, qwen2, t5


def kinds(table: BlockTable) -> list[str]:
    return [block.kind for block in table]


def check_ownership(model: nn.Module, table: BlockTable) -> None:
    """Each parameter belongs to exactly one block, under a name the model knows."""
    by_name = dict(model.named_parameters(remove_duplicate=False))
    owned = [id(by_name[name]) for block in table for name in block.parameters]
    assert len(owned) == len(set(owned))
    assert set(owned) == {id(parameter) for parameter in model.parameters()}
    for block in table:
        assert table[block.index] is block
        for name, owner in block.borrows:
            assert owner < block.index
            assert name in table[owner].parameters


def test_plain_module_list():
    model = TinyLM(depth=3)
    table = find_blocks(model)
    assert kinds(table) == ["embedding", "block", "block", "block", "head"]
    assert [block.name for block in table] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert table[0].modules == ("embed",)
    assert set(table[0].parameters) == {"embed.weight", "position"}
    assert table[4].modules == ("norm", "head")
    assert {block.class_name for block in table.repeated} == {"ResidualMLP"}
    check_ownership(model, table)


@pytest.mark.parametrize("build", [llama, gpt2, qwen2, mixtral])
def test_huggingface_decoders(build):
    model = build()
    table = find_blocks(model)
    layers = len(table) - 2
    assert kinds(table) == ["embedding", *["block"] * layers, "head"]
    assert len({block.class_name for block in table}) == 3
    check_ownership(model, table)


def test_encoder_and_decoder_are_both_blocks():
    model = EncoderDecoder()
    table = find_blocks(model)
    assert kinds(table) == ["embedding", "block", "block", "rest", "block", "block", "block", "head"]
    assert [block.family for block in table.repeated] == [0, 0, 1, 1, 1]
    assert [block.class_name for block in table.repeated] == ["ResidualMLP"] * 2 + ["ResidualMLP.1"] * 3
    check_ownership(model, table)


def test_t5():
    model = t5()
    table = find_blocks(model)
    assert kinds(table).count("block") == 4
    assert table[0].kind == "embedding"
    # the first block of each stack owns the relative position table, so it is a class of its own
    assert len({block.class_name for block in table.repeated}) == 4
    check_ownership(model, table)


def test_tied_head_is_owned_by_the_embedding():
    table = find_blocks(qwen2())
    head = table[len(table) - 1]
    assert head.borrows == (("model.embed_tokens.weight", 0),)
    assert "lm_head.weight" not in head.parameters
    assert table.borrows == ((len(table) - 1, 0),)
    assert table.owner("model.embed_tokens.weight") == 0


def test_blocks_registered_after_their_head_are_ordered_by_the_observed_order():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(67, 5)
            self.blocks = nn.ModuleList(ResidualMLP() for _ in range(2))
            self.embed = nn.Embedding(7, 67)

    model = Backwards()
    guessed = find_blocks(model)
    assert guessed[0].modules == ("head", "embed")
    seen = find_blocks(model, order=["", "embed", "blocks.0", "blocks.0.norm", "blocks.1", "head"])
    assert seen[0].modules == ("embed",)
    assert seen[3].modules == ("head",)
    check_ownership(model, seen)


def test_no_repeated_block_is_one_block():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    table = find_blocks(model)
    assert kinds(table) == ["whole"]
    assert table[0].modules == ("",)
    assert table[0].parameters == ("0.weight", "0.bias", "2.weight", "2.bias")


def test_sequential_with_embedding_and_head():
    model = nn.Sequential(nn.Embedding(11, 67), ResidualMLP(), ResidualMLP(), ResidualMLP(), nn.Linear(67, 11))
    table = find_blocks(model)
    assert kinds(table) == ["embedding", "block", "block", "block", "head"]
    check_ownership(model, table)


def test_norm_between_the_elements_of_a_sequential_is_a_block_of_its_own():
    model = nn.Sequential(ResidualMLP(), nn.LayerNorm(67), ResidualMLP())
    table = find_blocks(model)
    assert kinds(table) == ["block", "rest", "block"]
    check_ownership(model, table)


def test_list_of_lists():
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([ResidualMLP(), ResidualMLP(67, 50)]) for _ in range(3))

    table = find_blocks(Pairs())
    assert [block.name for block in table] == [f"layers.{outer}.{inner}" for outer in range(3) for inner in range(2)]
    assert [block.class_name for block in table] == ["ResidualMLP", "ResidualMLP.1"] * 3


def test_stages_of_sequentials():
    model = nn.Sequential(*(nn.Sequential(ResidualMLP(), ResidualMLP()) for _ in range(2)))
    assert [block.name for block in find_blocks(model)] == ["0.0", "0.1", "1.0", "1.1"]


def test_attribute_siblings_are_found_when_there_is_no_list():
    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 67)
            self.first = ResidualMLP()
            self.second = ResidualMLP()

    assert kinds(find_blocks(Siblings())) == ["embedding", "block", "block"]


def test_experts_are_not_blocks():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(67, 4)
            self.experts = nn.ModuleList(ResidualMLP() for _ in range(4))

    model = nn.Sequential(Layer(), Layer())
    assert [block.name for block in find_blocks(model)] == ["0", "1"]


def test_small_lists_do_not_count():
    model = TinyLM()
    model.adapters = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    assert [block.name for block in find_blocks(model).repeated] == ["blocks.0", "blocks.1", "blocks.2"]


def test_odd_parameters_all_have_an_owner():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.conv = weight_norm(nn.Conv1d(3, 3, 1))
            self.blocks = nn.ModuleList(Packed() for _ in range(3))
            self.empty = nn.Module()
            self.out = nn.Linear(32, 1)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 32, 32))

    model = Odd()
    table = find_blocks(model)
    assert kinds(table) == ["embedding", "block", "block", "block", "head"]
    assert "scale" in table[0].parameters
    check_ownership(model, table)


def test_classes_split_by_trainability_dtype_and_settings():
    model = TinyLM(depth=6)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].norm.double()
    model.blocks[3].drop.p = 0.5
    names = [block.class_name for block in find_blocks(model).repeated]
    assert names == ["ResidualMLP", "ResidualMLP.1", "ResidualMLP.2", "ResidualMLP.3", "ResidualMLP.1", "ResidualMLP.1"]


def test_a_drop_rate_that_grows_with_depth_does_not_split():
    model = TinyLM(depth=4)
    for depth, block in enumerate(model.blocks):
        block.drop.p = depth / 10
        block.layer_idx = depth
    assert len({block.class_name for block in find_blocks(model).repeated}) == 1


def test_sliding_and_full_attention_are_different_classes():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = Gemma2ForCausalLM(config)
    names = [block.class_name for block in find_blocks(model).repeated]
    assert names == ["Gemma2DecoderLayer", "Gemma2DecoderLayer.1"] * 2


def test_override_by_glob():
    model = TinyLM(depth=3)
    table = find_blocks(model, "blocks.[01]")
    assert [block.name for block in table.repeated] == ["blocks.0", "blocks.1"]
    assert table[3].kind == "head"
    assert table[3].modules == ("blocks.2", "norm", "head")
    assert [block.name for block in find_blocks(model, ["**.up"]).repeated] == [f"blocks.{i}.up" for i in range(3)]
    check_ownership(model, table)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("layers.*", r'"layers\.\*" matches no module of TinyLM; it has "blocks\.\*"'), ("blocks", "has no forward")],
)
def test_override_that_cannot_work_is_refused(pattern, message):
    with pytest.raises(ConfigError, match=message):
        find_blocks(TinyLM(), pattern)


def test_model_without_parameters_is_refused():
    with pytest.raises(UnsupportedError, match="no parameters"):
        find_blocks(nn.Sequential(nn.ReLU()))


def test_meta_model_gives_the_same_table():
    with torch.device("meta"):
        abstract = TinyLM(tied=True)
    assert find_blocks(abstract) == find_blocks(TinyLM(tied=True))


def test_partitioned_parameters_use_their_full_shape():
    """As `zero.Init` leaves them: empty data, the true shape in `ds_shape` and `ds_numel`."""
    model, whole = TinyLM(depth=3), TinyLM(depth=3)
    expected = find_blocks(whole)
    for parameter in model.parameters():
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.data = torch.empty(0)
    assert find_blocks(model) == expected
