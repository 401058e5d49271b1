"""Between training steps, forwards without gradient keep the blocks that fit, and give them back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.training import config, engine_of, gpt, llama, loss_of, run, tokens
from tests.runtime.zero3 import full_parameters


def emulated(memory: str) -> dict[str, Any]:
    """Parameters stream from host memory to an emulated device; slots given back are filled with NaN."""
    emulate = {"memory": memory, "h2d": "4GB/s", "d2h": "4GB/s", "debug": True}
    return {"parameters": "host", "activations": "device", "device": {"emulate": emulate}}


def one_step(engine: Any, call: dict[str, Any]) -> None:
    engine.backward(loss_of(engine(**call)))
    engine.step()


@torch.no_grad()
def evaluate(engine: Any, call: dict[str, Any], rounds: int = 3) -> tuple[list[torch.Tensor], list[int]]:
    """Losses of forwards in evaluation mode, and copies to the device of each."""
    engine.eval()
    store, losses, copies = engine._lt_setup.store, [], []
    for _ in range(rounds):
        before = store.copies
        losses.append(loss_of(engine(**call)).clone())
        copies.append(store.copies - before)
    engine.train()
    return losses, copies


def kept(engine: Any) -> list[int]:
    """Blocks that hold a slot although the plan does not say so."""
    return [block.index for block in engine._lt_setup.store.blocks if block.kept]


def test_blocks_that_fit_are_copied_once_and_trained_weights_are_seen():
    calls = tokens(3)
    with engine_of(gpt(), config(emulated("64MB"))) as engine:
        store = engine._lt_setup.store
        for call in calls:
            one_step(engine, call)
            assert not kept(engine)
            losses, copies = evaluate(engine, calls[0])
            assert copies[0] == len(store.blocks) and copies[1:] == [0, 0]
            assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])
            weights = full_parameters(engine)
            fresh = gpt()
            fresh.load_state_dict(weights)
            torch.testing.assert_close(losses[0], fresh.eval()(**calls[0]), rtol=1e-5, atol=0.0)


def test_evaluation_changes_no_training_step_and_stays_under_the_cap():
    evaluated = []

    def between(engine: Any, step: int) -> None:  # between a forward and its backward
        assert not kept(engine)
        evaluate(engine, tokens(1)[0], 2)
        evaluated.append(len(kept(engine)))

    def check(engine: Any) -> None:
        ledger = engine._lt_book.device.ledger
        assert ledger.peak_bytes <= ledger.cap_bytes

    plain = run(gpt, config(emulated("64MB")), tokens(3))
    run(gpt, config(emulated("64MB")), tokens(3), between, check).assert_identical(plain)
    assert min(evaluated) > 0


def test_where_memory_is_short_a_part_stays_and_always_the_same():
    with engine_of(gpt(blocks=12), config(emulated("64MB"))) as engine:
        one_step(engine, tokens(1)[0])
        store, policy = engine._lt_setup.store, engine._lt_setup.policy
        sizes = [block.byte_count for block in store.blocks]
        keeps = engine.optimizer.parameter_offload.param_coordinator._kept
        while store._trim():  # free slots of the training step count as in use
            pass
        # As if others held most of the device: room for what is prefetched and about a third of the blocks.
        spare = 6 * max(sizes) + sum(sizes) // 3
        held = keeps._free_bytes(policy) - spare
        store.device.ledger.charge(held, "somebody else")
        try:
            losses, copies = evaluate(engine, tokens(1)[0], 5)
            first = kept(engine)
            assert 0 < len(first) < len(store.blocks)
            assert copies == sorted(copies, reverse=True)
            assert copies[3] == copies[4] == len(store.blocks) - len(first)
            # Less memory still: blocks go.
            store.device.ledger.charge(spare, "somebody else")
            held += spare
            evaluate(engine, tokens(1)[0], 1)
            assert len(kept(engine)) < len(first) and set(kept(engine)) < set(first)
            assert all(torch.equal(loss, losses[0]) for loss in losses)
        finally:
            store.device.ledger.discharge(held, "somebody else")


def test_generation_copies_each_block_once_for_all_tokens():
    with engine_of(llama(), config(emulated("64MB"))) as engine:
        one_step(engine, tokens(1)[0])
        store = engine._lt_setup.store
        engine.eval()
        before = store.copies
        prompt = tokens(1)[0]["input_ids"][:1, :5]
        with torch.no_grad():
            written = engine.module.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=True)
        assert store.copies - before == len(store.blocks)
        weights = full_parameters(engine)
        engine.train()
        one_step(engine, tokens(1)[0])
        assert not kept(engine)
    fresh = llama()
    fresh.load_state_dict(weights, strict=False)
    expected = fresh.eval().generate(prompt, max_new_tokens=8, do_sample=False, use_cache=True)
    assert torch.equal(written, expected)


@pytest.mark.parametrize("stale", [False, True])
def test_a_kept_slot_is_evicted_where_a_fetch_needs_it(stale):
    with engine_of(gpt(), config(emulated("64MB"))) as engine:
        one_step(engine, tokens(1)[0])
        evaluate(engine, tokens(1)[0], 1)
        store = engine._lt_setup.store
        if stale:
            engine.optimizer.lazytrain_weights_changed()
        ledger = store.device.ledger
        block = kept(engine)[2]
        store.let_go(block)
        while store._trim():
            pass
        held = ledger.cap_bytes - ledger.live_bytes
        ledger.charge(held, "somebody else")
        try:
            before = len(kept(engine))
            store.need(block)
            assert len(kept(engine)) < before
        finally:
            ledger.discharge(held, "somebody else")
        one_step(engine, tokens(1)[0])
