"""Traces against the truth: what hooks count in a real forward of the real module."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lazytrain_ds.workload.blocks import find_blocks
from lazytrain_ds.workload.linear import zero3_linear
from lazytrain_ds.workload.trace import ForwardTrace, TraceError, trace_with_inputs
from tests.workload.models import EncoderDecoder, ResidualMLP, TinyLM, gpt2, llama, mixtral, qwen2


def call(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 90, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


class Counter:
    """Counts, in a real forward, the unique storages that autograd packs inside each block."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.kept: dict[str, dict[int, int]] = {name: {} for name in names}
        self.needs_input = dict.fromkeys(names, False)
        self.fixed = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
        self.inputs: set[int] = set()
        self.boundary = 0
        self.current: str | None = None
        self.alive: list[torch.Tensor] = []
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda _, a, k, name=name: self.enter(name, a, k), with_kwargs=True)
            module.register_forward_hook(lambda *_: setattr(self, "current", None))

    def enter(self, name: str, args: tuple, kwargs: dict) -> None:
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        self.inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.boundary = next(t for t in tensors if t.is_floating_point()).untyped_storage().data_ptr()
        self.current = name

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.alive.append(tensor)  # so that no address is used twice
        key = tensor.untyped_storage().data_ptr()
        if self.current is not None:
            if key == self.boundary:
                self.needs_input[self.current] = True
            elif key not in self.fixed and key not in self.inputs:
                self.kept[self.current][key] = tensor.untyped_storage().nbytes()
        return tensor

    def run(self, model: nn.Module, inputs: dict[str, torch.Tensor], zero3: bool) -> None:
        with zero3_linear(zero3), torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            model(**inputs)


MODELS = {
    "mlp-bf16": (TinyLM, torch.bfloat16),
    "mlp-fp32": (TinyLM, torch.float32),
    "dropout-bf16": (lambda: gpt2(resid_pdrop=0.1, attn_pdrop=0.0), torch.bfloat16),
    "gpt2-bf16": (gpt2, torch.bfloat16),
    "gpt2-fp32": (gpt2, torch.float32),
    "llama-bf16": (llama, torch.bfloat16),
    "llama-fp32": (llama, torch.float32),
    "qwen2-bf16": (qwen2, torch.bfloat16),
    "mixtral-bf16": (mixtral, torch.bfloat16),
}


@pytest.mark.parametrize("zero3", [True, False], ids=["zero3", "plain"])
@pytest.mark.parametrize("name", MODELS)
def test_kept_bytes_are_what_hooks_count_in_a_real_forward(name, zero3):
    build, dtype = MODELS[name]
    torch.manual_seed(0)
    model = build().to(dtype).train()
    table = find_blocks(model)
    names = [block.name for block in table.repeated]
    for length in (16, 33, 64):
        inputs = call(2, length)
        trace = trace_with_inputs(model, table, (), inputs, zero3=zero3)
        real = copy.deepcopy(model)
        counter = Counter(real, names)
        counter.run(real, inputs, zero3)
        for block in table.repeated:
            assert sorted(trace.blocks[block.index].kept) == sorted(counter.kept[block.name].values())
            assert trace.blocks[block.index].needs_input == counter.needs_input[block.name]


@pytest.mark.parametrize("build", [TinyLM, lambda: gpt2(attn_pdrop=0.0), llama], ids=["mlp", "gpt2", "llama"])
def test_flops_are_those_of_torch(build):
    model = build().train()
    table = find_blocks(model)
    inputs = call(2, 24)
    trace = trace_with_inputs(model, table, (), inputs, zero3=False)
    with FlopCounterMode(display=False) as counter:
        output = model(**inputs)
        forward = counter.get_total_flops()
        (output if torch.is_tensor(output) else output.loss).backward()
    # The CPU's flash attention is the one thing that torch's counter leaves out.
    attention = sum(_attention_flops(block.forward) for block in trace.blocks)
    assert sum(block.forward_flops for block in trace.blocks) - attention == forward
    backward = sum(operator.flops for block in trace.blocks for operator in block.backward)
    back_attention = sum(_attention_flops(block.backward) for block in trace.blocks)
    assert backward - back_attention == counter.get_total_flops() - forward
    assert (attention > 0) == (not isinstance(model, TinyLM))


def _attention_flops(operators) -> int:
    return sum(operator.flops for operator in operators if "attention" in operator.name)


def test_the_model_and_the_random_state_are_untouched():
    model = gpt2().train()
    before = copy.deepcopy(model.state_dict())
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    linear, state = torch.nn.functional.linear, torch.get_rng_state()
    trace_with_inputs(model, find_blocks(model), (), call(2, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.nn.functional.linear is linear
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for name, module in model.named_modules():
        assert module.__dict__.keys() == attributes[name].keys()
        assert all(module.__dict__[key] is value for key, value in attributes[name].items())
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hooks_and_wrapped_forwards_of_the_real_model_are_not_run():
    model = TinyLM().train()
    expected = trace_with_inputs(model, find_blocks(model), (), call(2, 8))

    def fail(*_: object) -> None:
        raise AssertionError("a hook of the real model ran")

    for module in model.modules():
        module.register_forward_pre_hook(fail)
    model.blocks[0].forward = fail
    assert trace_with_inputs(model, find_blocks(model), (), call(2, 8)) == expected


def test_a_patched_forward_that_remembers_the_original_does_not_reach_the_real_model():
    """As TRL's fused head: bound to the model, with the forward it replaced in its closure."""
    model = TinyLM().train()
    expected = trace_with_inputs(model, find_blocks(model), (), call(2, 8))
    original, ran = model.forward, []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: ran.append(1))

    remembered = functools.partial(original)

    def through(*args: object, **kwargs: object) -> object:
        return remembered(*args, **kwargs)

    def patched(self: nn.Module, *args: object, fused: bool = False, **kwargs: object) -> object:
        assert not fused
        return through(*args, **kwargs)

    model.forward = types.MethodType(patched, model)
    assert trace_with_inputs(model, find_blocks(model), (), call(2, 8)) == expected
    assert not ran


@pytest.mark.skipif(torch.cuda.is_available(), reason="for builds without CUDA")
def test_planning_for_a_gpu_needs_no_gpu():
    model = TinyLM().train()
    table = find_blocks(model)
    assert trace_with_inputs(model, table, (), call(2, 8), device="cuda") == trace_with_inputs(
        model, table, (), call(2, 8)
    )


def test_partitioned_parameters_are_traced_at_their_full_shape():
    model = TinyLM().train()
    table = find_blocks(model)
    expected = trace_with_inputs(model, table, (), call(2, 8))
    for parameter in model.parameters():
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.data = torch.empty(0)
    assert trace_with_inputs(model, table, (), call(2, 8)) == expected


def test_a_recompute_stops_when_everything_is_there_again():
    """The last matmul of a block is not run again when the only thing it needs is its input (plain linear)."""
    model = TinyLM().train()
    table = find_blocks(model)
    plain = trace_with_inputs(model, table, (), call(2, 8), zero3=False).blocks[1]
    rerun = sum(operator.flops for operator in plain.forward[: plain.rerun_operators])
    assert rerun == plain.forward_flops // 2
    # ZeRO-3's linear saves its tensors after it has run
    zero3 = trace_with_inputs(model, table, (), call(2, 8), zero3=True).blocks[1]
    assert sum(operator.flops for operator in zero3.forward[: zero3.rerun_operators]) == zero3.forward_flops


def test_chained_says_whether_rerunning_the_previous_block_makes_the_input():
    model = EncoderDecoder().train()
    inputs = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    trace = trace_with_inputs(model, find_blocks(model), (), inputs)
    assert [block.chained for block in trace.blocks] == [False, False, True, False, False, True, True, False]


def test_an_in_place_change_between_blocks_breaks_the_chain():
    class Shifted(TinyLM):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x)
                x += 1
            return self.head(x)

    model = Shifted()
    trace = trace_with_inputs(model, find_blocks(model), (call(2, 8)["input_ids"],))
    assert not any(block.chained for block in trace.blocks)


def test_order_of_calls_corrects_the_table():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(67, 5)
            self.blocks = nn.ModuleList(ResidualMLP() for _ in range(2))
            self.enter = nn.Linear(3, 67)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Backwards()
    trace = trace_with_inputs(model, find_blocks(model), (torch.zeros(4, 3),))
    table = find_blocks(model, order=trace.order)
    assert table[0].modules == ("enter",)
    assert table[3].modules == ("head",)


def test_shared_inputs_are_counted_once():
    model = llama().train()
    trace = trace_with_inputs(model, find_blocks(model), (), call(2, 32))
    # cos and sin of (1, 32, 16) in fp32
    assert trace.shared_bytes >= 2 * 32 * 16 * 4
    more = llama(6).train()
    assert trace_with_inputs(more, find_blocks(more), (), call(2, 32)).shared_bytes == trace.shared_bytes


def test_frozen_blocks_have_no_parameter_gradients():
    model = TinyLM().train()
    model.blocks[1].requires_grad_(False)
    trace: ForwardTrace = trace_with_inputs(model, find_blocks(model), (), call(2, 8))
    flops = [sum(operator.flops for operator in trace.blocks[index].backward) for index in (1, 2)]
    assert flops[1] == flops[0] // 2


def test_frozen_front_needs_no_backward():
    model = TinyLM().train()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    trace = trace_with_inputs(model, find_blocks(model), (), call(2, 8))
    assert [bool(block.backward) for block in trace.blocks] == [False, False, False, False, True]
    assert trace.blocks[1].kept_bytes == 0


def test_outputs_other_than_tensors_pass_through():
    class Odd(ResidualMLP):
        def forward(self, x):
            y = super().forward(x)
            return y, None, {"k": x}

    class Model(TinyLM):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            for block in self.blocks:
                x, _, _ = block(x)
            return self.head(x)

    model = Model()
    model.blocks = nn.ModuleList(Odd() for _ in range(3))
    trace = trace_with_inputs(model, find_blocks(model), (call(2, 8)["input_ids"],))
    assert [block.chained for block in trace.blocks] == [False, False, True, True, False]


def test_data_dependent_code_is_a_trace_error():
    class Routed(TinyLM):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            if x.sum() > 0:
                x = self.blocks[0](x)
            return self.head(x)

    model = Routed()
    with pytest.raises(TraceError, match="Routed does not run on fake tensors"):
        trace_with_inputs(model, find_blocks(model), (call(2, 8)["input_ids"],))


def test_transient_bytes_bound_a_real_backward_and_forward():
    """A residual MLP by hand: norm output, up and gelu at once in forward, the widest three in backward."""
    width, hidden, tokens = 64, 256, 32
    model = nn.Sequential(*(ResidualMLP(width, hidden) for _ in range(2)))
    trace = trace_with_inputs(model, find_blocks(model), (torch.zeros(tokens, width),))
    block = trace.blocks[1]
    wide = tokens * hidden * 4
    assert 2 * wide <= block.transient_forward_bytes <= 3 * wide
    weights = 2 * width * hidden * 4
    assert 2 * wide <= block.transient_backward_bytes <= 3 * wide + weights


@pytest.mark.parametrize("length", [16, 40])
def test_kept_bytes_with_adapters_and_a_frozen_front(length):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    model = model.bfloat16().train()
    table = find_blocks(model)
    inputs = call(2, length)
    trace = trace_with_inputs(model, table, (), inputs)
    counter = Counter(model, [block.name for block in table.repeated])
    counter.run(model, inputs, zero3=True)
    for block in table.repeated:
        assert sorted(trace.blocks[block.index].kept) == sorted(counter.kept[block.name].values())
