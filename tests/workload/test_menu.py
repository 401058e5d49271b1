"""Menus: exact bytes, efficient entries, sound order."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lazytrain_ds.planning.instance import BlockCosts
from lazytrain_ds.runtime.activations.storages import Handle
from lazytrain_ds.runtime.selective import KeptOutputs, find_operators, selective_contexts
from lazytrain_ds.workload.blocks import find_blocks
from lazytrain_ds.workload.build import operator_seconds
from lazytrain_ds.workload.linear import zero3_linear
from lazytrain_ds.workload.menu import LARGEST_MENU, activation_menu, kept_storages
from lazytrain_ds.workload.trace import BlockTrace, trace_with_inputs
from tests.workload.machines import machine
from tests.workload.models import ResidualMLP, TinyLM, gpt2, llama, mixtral, qwen2
from tests.workload.test_trace import call


def menu_of(trace: BlockTrace, *, droppable: bool = True):
    seconds = functools.partial(operator_seconds, hardware=machine(), dtype="float32")
    return activation_menu(trace, seconds, droppable=droppable)


class Held(Handle):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def restore(self) -> torch.Tensor:
        return self.tensor


def really_kept(model, name: str, inputs, ops: tuple[str, ...], zero3: bool) -> tuple[int, int]:
    """(bytes, FLOPs of the recompute) of one block under the runtime's selective checkpoint."""
    block = model.get_submodule(name)
    forward = block.forward
    kept = KeptOutputs(find_operators(ops), lambda tensor: Held(tensor.detach()), torch.device("cpu"))
    counter = FlopCounterMode(display=False)

    def wrapped(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: selective_contexts(kept), **kwargs)

    block.forward = wrapped
    captured = []
    block.register_forward_hook(lambda module, args, output: captured.append(output))
    with zero3_linear(zero3):
        model(**inputs)
        held = [
            leaf
            for entry in kept.entries.values()
            for leaf in torch.utils._pytree.tree_leaves(entry.value)
            if isinstance(leaf, Held)
        ]
        seen = {leaf.tensor.untyped_storage()._cdata: leaf.tensor.untyped_storage().nbytes() for leaf in held}
        out = captured[0] if torch.is_tensor(captured[0]) else captured[0][0]
        with counter:
            out.backward(torch.ones_like(out), retain_graph=True)
    return sum(seen.values()), counter.get_total_flops()


MODELS = {
    "mlp-bf16": (TinyLM, torch.bfloat16),
    "mlp-fp32": (TinyLM, torch.float32),
    "gpt2-fp32": (lambda: gpt2(attn_pdrop=0.0), torch.float32),
    "llama-bf16": (llama, torch.bfloat16),
    "qwen2-bf16": (qwen2, torch.bfloat16),
    "mixtral-bf16": (mixtral, torch.bfloat16),
}


@pytest.mark.parametrize("name", MODELS)
def test_selective_bytes_are_what_the_runtime_keeps(name):
    build, dtype = MODELS[name]
    torch.manual_seed(0)
    model = build().to(dtype).train()
    table = find_blocks(model)
    block = table.repeated[0]
    for length in (16, 33, 64):
        inputs = call(2, length)
        trace = trace_with_inputs(model, table, (), inputs).blocks[block.index]
        entries = [choice for choice in menu_of(trace) if choice.ops]
        assert entries
        for choice in entries:
            kept, flops = really_kept(copy.deepcopy(model), block.name, inputs, choice.ops, True)
            assert kept == choice.kept_bytes
            if "attention" not in choice.name and name.startswith("mlp"):
                backward = sum(operator.flops for operator in trace.backward)
                assert flops - backward == choice.recompute_flops


@pytest.mark.parametrize("build", [TinyLM, llama, mixtral])
def test_entries_are_efficient_and_valid(build):
    model = build().bfloat16().train()
    table = find_blocks(model)
    trace = trace_with_inputs(model, table, (), call(2, 64)).blocks[1]
    menu = menu_of(trace)
    assert 3 <= len(menu) <= LARGEST_MENU
    assert (menu[0].kind, menu[-1].kind) == ("keep", "boundary")
    for larger, smaller in itertools.pairwise(menu):
        assert larger.kept_bytes > smaller.kept_bytes
        assert larger.recompute_seconds < smaller.recompute_seconds
    # what the Instance checks
    BlockCosts(1, 1, 1.0, 1.0, 1, 1, 1, menu)


def test_the_whole_recompute_costs_the_forward_up_to_the_last_saved_tensor():
    model = TinyLM().train()
    trace = trace_with_inputs(model, find_blocks(model), (), call(2, 64)).blocks[1]
    last = menu_of(trace)[-1]
    assert last.recompute_flops == trace.forward_flops
    assert last.needs_input


def test_a_kept_output_that_is_changed_in_place_is_not_counted():
    class InPlace(ResidualMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = torch.mm(self.norm(x), self.up.weight.t())
            wide += self.up.bias
            return x + torch.sin(torch.mm(torch.tanh(wide), self.down.weight.t()))

    model = torch.nn.Sequential(InPlace(), InPlace())
    trace = trace_with_inputs(model, find_blocks(model), (torch.zeros(32, 67),)).blocks[0]
    made = [operator.made_bytes for operator in trace.forward if operator.name == "aten.mm.default"]
    assert made == [(32 * 211 * 4,), (32 * 67 * 4,)]
    assert list(kept_storages(trace, ["aten.mm.default"]).values()) == [32 * 67 * 4]


def test_block_that_must_not_be_dropped_still_recomputes_everything():
    model = TinyLM().train()
    trace = trace_with_inputs(model, find_blocks(model), (), call(2, 64)).blocks[1]
    menu = menu_of(trace, droppable=False)
    assert menu[-1].kind == "selective"
    assert menu[-1].ops == ()
    assert menu[-1].kept_bytes == 0
    assert menu[-1].recompute_seconds == menu_of(trace)[-1].recompute_seconds


def test_small_storages_are_not_offloadable():
    model = llama().train()
    trace = trace_with_inputs(model, find_blocks(model), (), call(2, 64)).blocks[1]
    keep = menu_of(trace)[0]
    assert keep.offloadable_bytes == sum(size for size in trace.kept if size >= 65536)
    assert 0 < keep.offloadable_bytes < keep.kept_bytes


@pytest.mark.parametrize("make", [llama, gpt2, qwen2])
def test_choices_of_another_machines_plan_are_added_by_name(make):
    """What is worth an entry depends on times; what an entry keeps does not."""
    model = make()
    model = model.train()
    trace = trace_with_inputs(model, find_blocks(model), (), call(2, 64)).blocks[1]
    known = {choice.name: choice for choice in menu_of(trace) if choice.ops}
    few = activation_menu(trace, lambda operators: 0.0, droppable=True)
    assert len(known) >= 2 and not known.keys() & {choice.name for choice in few}
    many = activation_menu(trace, lambda operators: 0.0, droppable=True, also=["keep", "no such", *known])
    for name, choice in known.items():
        (same,) = [each for each in many if each.name == name]
        assert (same.ops, same.kept_bytes, same.recompute_flops) == (
            choice.ops,
            choice.kept_bytes,
            choice.recompute_flops,
        )
    assert [choice.name for choice in many if choice.name not in known] == [choice.name for choice in few]
    sizes = [choice.kept_bytes for choice in many]
    assert sizes == sorted(sizes, reverse=True)
