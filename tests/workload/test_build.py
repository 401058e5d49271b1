"""Instances built from models: valid, exact in what can be counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.workload.blocks import find_blocks
from lazytrain_ds.workload.build import Training, build_instance
from lazytrain_ds.workload.profile import profile_call, profile_model
from lazytrain_ds.workload.trace import TraceError, run_with_inputs
from tests.workload.machines import machine
from tests.workload.models import EncoderDecoder, ResidualMLP, TinyLM, llama, qwen2


def build(model: nn.Module, *, sizes=(1, 2), length: int = 16, dtype=None, **training: object) -> Instance:
    table = find_blocks(model)
    profile = profile_model(model, table, sizes, length, dtype=dtype)
    settings = {"global_batch": 4, "sequence_length": length, **training}
    return build_instance(model, table, profile, machine(), Training(**settings), dtype=dtype)


@pytest.mark.parametrize("make", [TinyLM, llama, qwen2, EncoderDecoder])
def test_instance_is_valid_and_round_trips(make):
    instance = build(make())
    assert Instance.from_json(instance.to_json()) == instance
    assert instance.micro_batches == (1, 2)
    assert instance.block_count == len(find_blocks(make()))


def test_parameters_are_counted_exactly_and_tied_ones_once():
    model = qwen2()
    instance = build(model, dtype=torch.bfloat16)
    assert instance.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert instance.borrows == ((instance.block_count - 1, 0),)
    layer = instance.block_class(1)
    count = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert layer.parameter_count == count
    assert layer.parameter_bytes == 2 * count
    assert layer.gradient_bytes == 4 * count
    assert layer.dtype == "bfloat16"


def test_frozen_parameters_have_no_gradient_and_no_state():
    model = TinyLM()
    model.blocks[0].requires_grad_(False)
    instance = build(model)
    assert instance.block_class(1).trainable_count == 0
    assert instance.block_class(1).gradient_bytes == 0
    assert instance.block_class(2).trainable_count == instance.block_class(2).parameter_count


def test_quantizable_parameters_are_counted():
    instance = build(TinyLM(), quantizable=lambda name, parameter: parameter.dim() == 2 and "embed" not in name)
    assert instance.block_class(0).quantizable_count == 0
    assert instance.block_class(1).quantizable_count == 2 * 67 * 211


def test_menu_of_a_block_and_of_a_group():
    instance = build(llama())
    embedding, layer, head = (instance.costs(block, 2) for block in (0, 1, 4))
    assert [len(costs.menu) for costs in (embedding, head)] == [1, 1]
    for costs in (embedding, head):  # what a group uses again in backward stays where it is: nothing of it is moved
        assert not costs.menu[0].needs_input and costs.menu[0].offloadable_bytes == 0
    assert head.boundary_bytes == 0 and head.menu[0].kept_bytes > 2 * 16 * 64 * 4
    assert layer.menu[0].kind == "keep"
    assert layer.recomputable
    assert layer.menu[-1].recompute_seconds <= layer.forward_seconds
    assert layer.boundary_bytes == 2 * 16 * 64 * 4


def test_a_block_that_does_not_follow_its_predecessor_cannot_have_its_input_dropped():
    class Shifted(TinyLM):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            for index, block in enumerate(self.blocks):
                x = block(x)
                if index == 0:
                    x = x * 2
            return self.head(x)

    instance = build(Shifted())
    assert instance.order[1:4] == ("ResidualMLP", "ResidualMLP~1", "ResidualMLP")
    last = instance.costs(2, 1).menu[-1]
    assert (last.kind, last.kept_bytes) == ("selective", 0)
    assert not instance.costs(2, 1).recomputable


def test_batches_that_do_not_divide_are_left_out_or_refused():
    assert build(TinyLM(), sizes=(1, 3), global_batch=4).micro_batches == (1,)
    with pytest.raises(ConfigError, match=r"none of \(3,\) times 1 rank\(s\) divides the global batch of 4"):
        build(TinyLM(), sizes=(3,), global_batch=4)


def test_times_follow_the_roofline():
    slow, fast = machine(flops_fp32=1e9), machine(flops_fp32=1e9, device_bytes_per_second=1e15)
    model = TinyLM()
    table = find_blocks(model)
    profile = profile_model(model, table, (1,), 16)
    training = Training(global_batch=1, sequence_length=16)
    costs = build_instance(model, table, profile, fast, training).costs(1, 1)
    assert costs.forward_seconds == pytest.approx(costs.forward_flops / 1e9, rel=0.01)
    assert costs.backward_seconds == pytest.approx(2 * costs.forward_flops / 1e9, rel=0.01)
    assert build_instance(model, table, profile, slow, training).costs(1, 1).forward_seconds > costs.forward_seconds


def test_model_that_takes_features():
    model = nn.Sequential(nn.Linear(5, 67), ResidualMLP(), ResidualMLP(), nn.Linear(67, 3))
    table = find_blocks(model)
    profile = profile_model(model, table, (2,), 7)
    assert profile.source == "traced"
    assert profile.traces[2].blocks[1].boundary_bytes == 2 * 7 * 67 * 4


def test_model_that_cannot_be_called_is_estimated_and_said():
    class Strange(TinyLM):
        def forward(self, a, b, c, d):  # type: ignore[override]
            raise AssertionError

    model = Strange()
    table = find_blocks(model)
    profile = profile_model(model, table, (1, 2), 16)
    assert profile.source == "estimated"
    assert "estimated from matrix shapes" in profile.notes[0]
    instance = build_instance(model, table, profile, machine(), Training(global_batch=2, sequence_length=16))
    assert instance.costs(1, 2).boundary_bytes == 2 * 16 * 67 * 4
    assert instance.costs(1, 2).menu[0].kept_bytes > 0


def test_real_call_gives_real_shapes():
    model = llama().train()
    table = find_blocks(model)
    ids = torch.zeros((2, 24), dtype=torch.long)
    profile = profile_call(model, table, (), {"input_ids": ids, "labels": ids}, micro_batch=1)
    instance = build_instance(model, table, profile, machine(), Training(global_batch=1, sequence_length=24))
    assert instance.costs(1, 1).boundary_bytes == 2 * 24 * 64 * 4


class Routed(ResidualMLP):
    """A toy mixture: tokens go to the expert that their own values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(67, 3)
        self.experts = nn.ModuleList(ResidualMLP() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        chosen = self.router(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, expert(flat[rows]))
        return x + out.view_as(x)


def routed_model() -> TinyLM:
    model = TinyLM(depth=3)
    model.blocks = nn.ModuleList(Routed() for _ in range(3))
    return model


def test_data_dependent_routing_is_measured_in_a_real_run_and_said():
    with torch.device("meta"):
        model = routed_model()
    table = find_blocks(model)
    state = torch.get_rng_state()
    profile = profile_model(model, table, (2, 4), 16)
    assert torch.equal(torch.get_rng_state(), state)
    assert profile.source == "measured"
    assert "was run once on a small batch" in profile.notes[0]
    small, large = (profile.traces[size].blocks[2] for size in (2, 4))
    assert small.boundary_bytes == 2 * 16 * 67 * 4
    assert large.kept_bytes == pytest.approx(2 * small.kept_bytes, rel=0.01)
    # every token went through one expert: up and down, forward; the router besides
    expected = 2 * 2 * 16 * (2 * 67 * 211 + 67 * 3)
    assert small.forward_flops == pytest.approx(expected, rel=0.01)


def test_a_real_call_with_routing_is_exact():
    """The figures of the block that ran are what hooks count, for the routing that its random weights made."""
    model = routed_model().train()
    table = find_blocks(model)
    ids = torch.randint(0, 90, (2, 24))
    profile = profile_call(model, table, (ids,), {"labels": ids}, micro_batch=2)
    assert profile.source == "measured"
    trace = profile.traces[2].blocks[1]
    tokens = 2 * 24
    # per token: norm output, up, gelu of its expert (floats); the input itself is kept as gathered rows
    assert trace.kept_bytes >= tokens * 4 * (67 + 211 + 211)
    assert trace.calls == 1


def test_real_run_refuses_to_allocate_more_than_allowed():
    model = TinyLM()
    with pytest.raises(TraceError, match="more than the 1 kB allowed"):
        run_with_inputs(model, find_blocks(model), (torch.zeros(1, 4, dtype=torch.long),), limit_bytes=1000)


def test_lora_trains_adapters_only():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    instance = build(model, dtype=torch.bfloat16)
    assert instance.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    layer = instance.block_class(2)
    # q: 64 -> 4 -> 64, v: 64 -> 4 -> 32
    assert layer.trainable_count == 4 * (64 + 64) + 4 * (64 + 32)
    assert instance.block_class(0).trainable_count == instance.block_class(4).trainable_count == 0
    # the frozen embedding's output needs no gradient, so the first layer keeps less than the others
    first, second, third = (instance.costs(block, 2) for block in (1, 2, 3))
    assert first.menu[0].kept_bytes < second.menu[0].kept_bytes == third.menu[0].kept_bytes
    assert first.backward_seconds < second.backward_seconds
    assert instance.order[1] != instance.order[2] == instance.order[3]
