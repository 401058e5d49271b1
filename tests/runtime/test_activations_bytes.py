"""What is held and moved equals what the menu says, byte for byte."""

from __future__ import annotations

import pytest
import torch

from lazytrain_ds.runtime.policy import ActivationAction
from lazytrain_ds.workload.blocks import find_blocks
from lazytrain_ds.workload.menu import activation_menu
from lazytrain_ds.workload.trace import trace_with_inputs
from tests.runtime.activation_models import MODELS
from tests.runtime.activation_tools import run_pass, running

BATCH = dict(input_ids=torch.zeros(2, 16, dtype=torch.long), labels=torch.zeros(2, 16, dtype=torch.long))


def moved_bytes(operators) -> float:
    return float(sum(operator.bytes_moved + operator.flops for operator in operators))


def menus(model, zero3: bool):
    """(table, {block: (trace, menu)}) of the repeated blocks."""
    table = find_blocks(model)
    traces = trace_with_inputs(model, table, (), BATCH, zero3=zero3)
    return table, {
        block.index: (
            traces.blocks[block.index],
            activation_menu(traces.blocks[block.index], moved_bytes, droppable=True),
        )
        for block in table
        if block.kind == "block"
    }


def step(model, number):
    output = model(**BATCH)
    return output if torch.is_tensor(output) else output.loss


def act(choice, **where) -> ActivationAction:
    settings = dict(boundary="device", saved_tier="device", lead=1)
    return ActivationAction(kind=choice.kind, ops=choice.ops, **{**settings, **where})


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2 dropout", "frozen embedding and lora", "conv weight norm"])
def test_every_menu_entry_holds_exactly_its_bytes(name):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    table, found = menus(model, zero3=False)
    modules = dict(model.named_modules())
    blocks = [modules[block.modules[0]] if block.kind == "block" else None for block in table]
    longest = max(len(menu) for _, menu in found.values())
    assert longest >= 4
    with running(model, blocks) as runtime:
        for position in range(longest):
            actions: list[ActivationAction | None] = [None] * len(blocks)
            expected_saved, expected_boundary = {}, {}
            for index, (trace, menu) in found.items():
                choice = menu[min(position, len(menu) - 1)]
                actions[index] = act(choice)
                expected_saved[index] = choice.kept_bytes
                expected_boundary[index] = trace.boundary_bytes if choice.needs_input else 0
            runtime.set_actions(actions)
            run_pass(model, step, runtime, micro_steps=1)
            held = runtime.counters
            for index in found:
                what = (name, position, index, actions[index])
                assert held.held_saved_bytes.get(index, 0) == expected_saved[index], what
                assert held.held_boundary_bytes.get(index, 0) == expected_boundary[index], what


def test_offloading_moves_each_storage_once_and_leaves_nothing_on_the_device():
    torch.manual_seed(0)
    model = MODELS["gpt"][0]()
    table, found = menus(model, zero3=False)
    modules = dict(model.named_modules())
    blocks = [modules[block.modules[0]] if block.kind == "block" else None for block in table]
    with running(model, blocks) as runtime:
        runtime.set_actions(
            [
                act(found[i][1][0], boundary="host", saved_tier="nvme") if i in found else None
                for i in range(len(blocks))
            ]
        )
        run_pass(model, step, runtime, micro_steps=1)
        counters = runtime.counters
        assert counters.offloaded_bytes == {
            "host": sum(trace.boundary_bytes for trace, _ in found.values() if trace.needs_input),
            "nvme": sum(menu[0].kept_bytes for _, menu in found.values()),
        }
        assert counters.offloaded_storages == sum(len(trace.kept) + trace.needs_input for trace, _ in found.values())
        for index in found:
            assert counters.held_saved_bytes.get(index, 0) == counters.held_boundary_bytes.get(index, 0) == 0


def test_the_menu_is_efficient_and_short():
    torch.manual_seed(0)
    _, found = menus(MODELS["llama"][0](), zero3=True)
    for _, menu in found.values():
        assert 3 <= len(menu) <= 8
        assert [choice.kind for choice in menu] == ["keep", *["selective"] * (len(menu) - 2), "boundary"]
        bytes_kept = [choice.kept_bytes for choice in menu]
        seconds = [choice.recompute_seconds for choice in menu]
        assert bytes_kept == sorted(bytes_kept, reverse=True)
        assert seconds == sorted(seconds)
        assert len(set(bytes_kept)) == len(menu)
