"""Blocks as users write them: any arguments and outputs, shared, compiled, copied; nothing in the model is touched."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.runtime.activation_models import gpt2_dropout, llama
from tests.runtime.activation_tools import (
    BOUNDARY,
    GPT,
    KEEP,
    action,
    assert_nothing_left,
    language_step,
    no_garbage_collection,
    random_actions,
    run_pass,
    running,
    segments,
)

STEP = language_step()
WIDTH = 8


def dropout_linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))


def plans(count: int) -> dict[str, list]:
    return {
        "boundary": [BOUNDARY] * count,
        "dropped": segments(count, count, "host"),
        "offload": [action("keep", "host", "host", lead=2)] * count,
        "selective": [action("selective", "nvme", "nvme")] * count,
    }


def check(model: nn.Module, step: Any, blocks: list | None = None, actions: dict | None = None) -> dict[str, Any]:
    """Every plan is exact and leaves nothing; returns reruns by plan."""
    blocks = list(model.blocks) if blocks is None else blocks
    reference = run_pass(model, step)
    reruns = {}
    for name, plan in (actions or plans(len(blocks))).items():
        with running(model, blocks, plan) as runtime, no_garbage_collection():
            run_pass(model, step, runtime).assert_equal(reference)
            assert_nothing_left(runtime)
            reruns[name] = runtime.counters.reruns
    return reruns


def vector(number: int) -> torch.Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(number))


# -- arguments and outputs -----------------------------------------------------------------------------------------
class TupleBlock(nn.Module):
    """(hidden, residual) in, (hidden, residual, None, {"k": hidden}) out, a mask by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dropout_linear()

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, *, mask: torch.Tensor, scale: float) -> Any:
        residual = hidden if residual is None else hidden + residual
        out = self.inner(residual * mask) * scale
        return out, residual, None, {"k": out}


class TupleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual, total = None, 0.0
        mask = (torch.arange(WIDTH) % 3 > 0).to(x.dtype)
        for block in self.blocks:
            x, residual, nothing, extra = block(x, residual, mask=mask, scale=1.5)
            assert nothing is None
            total = total + extra["k"].mean()
        return (x + residual).square().mean() + total


def test_tuples_dicts_and_keywords_and_two_streams_between_blocks():
    torch.manual_seed(0)
    reruns = check(TupleModel(), lambda model, number: model(vector(number).requires_grad_()))
    assert reruns["dropped"] == 2 * 3


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    note: str


class DataclassBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dropout_linear()

    def forward(self, *, hidden_states: torch.Tensor, layer: int) -> Output:
        return Output(hidden_states + self.inner(hidden_states), f"layer {layer}")


class DataclassModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DataclassBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            output = block(hidden_states=x, layer=index)
            assert output.note == f"layer {index}"
            x = output.hidden
        return x.square().mean()


def test_dataclass_outputs_and_keyword_only_inputs():
    torch.manual_seed(0)
    reruns = check(DataclassModel(), lambda model, number: model(vector(number).requires_grad_()))
    assert reruns["dropped"] == 2 * 3


class SavesHostTensors(torch.autograd.Function):
    """Saves integers and something that is not on the compute device's dtype path."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, torch.arange(3), x)
        ctx.plain = "text"
        return x * index.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        index, counting, _ = ctx.saved_tensors
        assert counting.tolist() == [0, 1, 2] and ctx.plain == "text"
        return gradient * index.sum(), None


class IndexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dropout_linear()

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(SavesHostTensors.apply(x, index)), index


class IndexModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(IndexBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.tensor([1, 0, 1])
        for block in self.blocks:
            x, index = block(x, index)
        return x.square().mean()


def test_custom_functions_that_save_integers():
    torch.manual_seed(0)
    check(IndexModel(), lambda model, number: model(vector(number).requires_grad_()))


@pytest.mark.parametrize("build", [llama, gpt2_dropout])
def test_key_value_caches_are_filled_as_usual_and_a_second_run_sees_them_as_the_first(build):
    torch.manual_seed(0)
    model = build()

    def step(model: nn.Module, number: int) -> torch.Tensor:
        tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(number))
        output = model(input_ids=tokens, labels=tokens, use_cache=True)
        assert output.past_key_values.get_seq_length() == 16
        return output.loss

    blocks = list(model.model.layers if hasattr(model, "model") else model.transformer.h)
    check(model, step, blocks)


# -- which blocks can be planned -----------------------------------------------------------------------------------
class Glued(GPT):
    """Something between the blocks: a new tensor of the same shape, perhaps at the same address."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = (block(x) * 1.01).add(0.1)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def test_an_input_that_is_not_the_last_output_is_kept_and_said_once(caplog):
    torch.manual_seed(0)
    model = Glued(4)
    reruns = check(model, STEP, actions={"dropped": segments(4, 4)})
    assert reruns["dropped"] == 0
    said = [message for message in caplog.messages if "cannot be made again" in message]
    assert len(said) == 3 and len({message.split(":")[1] for message in said}) == 3


class InPlaceGlue(GPT):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
            x += 0.1
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def test_an_output_changed_in_place_on_its_way_to_the_next_block_is_no_link():
    torch.manual_seed(0)
    assert check(InPlaceGlue(4), STEP, actions={"dropped": segments(4, 4)})["dropped"] == 0


class Silent(nn.Module):
    """Works by side effect and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, holder: dict[str, torch.Tensor]) -> None:
        holder["x"] = F.dropout(self.linear(holder["x"]).sin(), 0.1)


class SilentModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Silent() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        holder = {"x": x}
        for block in self.blocks:
            block(holder)
        return holder["x"].square().mean()


def test_a_block_that_returns_no_tensor_is_exact_and_kept_and_said_once(caplog):
    torch.manual_seed(0)
    check(SilentModel(), lambda model, number: model(vector(number).requires_grad_()),
          actions={"boundary": [BOUNDARY] * 3})  # fmt: skip
    said = [message for message in caplog.messages if "it returns no tensor" in message]
    assert len(said) == 3 and "blocks.0" in said[0]


def test_compiled_blocks_are_left_alone_and_said_once(caplog):
    torch.manual_seed(0)
    model = GPT(3)
    model.blocks[1].compile(backend="eager")
    with running(model, list(model.blocks), [BOUNDARY] * 3) as runtime:
        assert "forward" not in model.blocks[1].__dict__
        assert [m for m in caplog.messages if "blocks.1" in m and "it is compiled" in m]
        reference = run_pass(model, STEP, runtime)
        assert runtime.counters.recomputes == 2 * 2
    run_pass(model, STEP).assert_equal(reference)


def test_one_module_may_stand_for_several_blocks():
    torch.manual_seed(0)
    model = GPT(2)
    shared = [model.blocks[0]] * 3 + [model.blocks[1]]

    def step(model: nn.Module, number: int) -> torch.Tensor:
        tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(number))
        x = model.embed(tokens)
        for block in shared:
            x = block(x)
        return F.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())

    reruns = check(model, step, shared)
    assert reruns["dropped"] == 2 * 3
    for seed in range(5):
        check(model, step, shared, {"mix": random_actions(4, seed)})


def test_skipped_blocks_are_exact():
    torch.manual_seed(0)
    model = GPT(6)

    def step(model: nn.Module, number: int) -> torch.Tensor:
        tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(number))
        x = model.embed(tokens)
        for index, block in enumerate(model.blocks):
            if index != 2 + number:
                x = block(x)
        return F.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())

    check(model, step, actions={**plans(6), **{f"mix {seed}": random_actions(6, seed) for seed in range(5)}})


def test_groups_without_a_module_are_kept():
    torch.manual_seed(0)
    model = GPT(3)
    check(model, STEP, [None, *model.blocks, None], {"all": [None, *segments(3, 3), KEEP]})


# -- the model itself stays whole ----------------------------------------------------------------------------------
def test_a_copy_of_a_wrapped_model_computes_with_its_own_weights():
    torch.manual_seed(0)
    model = GPT(3, dropout=0.0)
    with running(model, list(model.blocks), [BOUNDARY] * 3):
        average = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        for twin in (average, loaded):
            assert "forward" not in twin.blocks[0].__dict__ or twin.blocks[0].forward.__self__ is twin.blocks[0]
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            assert STEP(twin, 0).item() == pytest.approx(torch.log(torch.tensor(61.0)).item())


def test_a_forward_that_was_patched_on_the_instance_is_wrapped_and_comes_back():
    torch.manual_seed(0)
    model = GPT(2)
    patched = model.blocks[0].forward
    model.blocks[0].forward = lambda x: patched(x) * 2
    mine = model.blocks[0].forward
    check(model, STEP)
    assert model.blocks[0].forward is mine
