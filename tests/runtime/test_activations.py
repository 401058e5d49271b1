"""The activation runtime under plain PyTorch: exactness of every choice, bytes held, FLOPs, nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lazytrain_ds.errors import PlanError
from tests.runtime.activation_tools import (
    ATTENTION,
    BOUNDARY,
    DROPPED,
    GPT,
    KEEP,
    MATMULS,
    action,
    assert_nothing_left,
    language_step,
    no_garbage_collection,
    random_actions,
    run_pass,
    running,
    segments,
)

DEPTH = 6
STEP = language_step()


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(DEPTH)


@pytest.fixture(scope="module")
def reference(model):
    return run_pass(model, STEP)


def everywhere(one) -> list:
    return [one] * DEPTH


CHOICES = {
    "keep": everywhere(KEEP),
    "boundary": everywhere(BOUNDARY),
    "boundary host": everywhere(action("boundary", "host")),
    "boundary nvme": everywhere(action("boundary", "nvme", lead=2)),
    "segments of 2": segments(DEPTH, 2),
    "segments of 3": segments(DEPTH, 3),
    "segments of 4": segments(DEPTH, 4),
    "segments of 3, host": segments(DEPTH, 3, "host", lead=0),
    "segments of 3, nvme": segments(DEPTH, 3, "nvme", lead=2),
    "saved host": everywhere(action("keep", "host", "host")),
    "saved host, boundary device": everywhere(action("keep", "device", "host", lead=0)),
    "saved nvme": everywhere(action("keep", "nvme", "nvme", lead=3)),
    "selective nothing": everywhere(action("selective", ops=())),
    "selective matmuls": everywhere(action("selective")),
    "selective attention": everywhere(action("selective", ops=ATTENTION)),
    "selective both, host": everywhere(action("selective", "host", "host", ops=MATMULS + ATTENTION)),
    "selective both, nvme": everywhere(action("selective", "nvme", "nvme", ops=MATMULS + ATTENTION)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_exact_and_leaves_nothing(model, reference, name):
    with running(model, list(model.blocks), CHOICES[name]) as runtime, no_garbage_collection():
        run_pass(model, STEP, runtime).assert_equal(reference)
        assert_nothing_left(runtime)


@pytest.mark.parametrize("seed", range(20))
def test_random_mixes_are_exact(model, reference, seed):
    with running(model, list(model.blocks), random_actions(DEPTH, seed)) as runtime:
        run_pass(model, STEP, runtime).assert_equal(reference)
        assert_nothing_left(runtime)


def test_install_and_remove_restore_the_model_exactly(model):
    before = [dict(block.__dict__) for block in model.blocks]
    with running(model, list(model.blocks), everywhere(BOUNDARY)):
        assert all("forward" in block.__dict__ for block in model.blocks)
    assert [dict(block.__dict__) for block in model.blocks] == before


def block_flops(model, actions) -> float:
    """Matmul FLOPs of the blocks per parameter and token, forward and backward; attention is not counted."""
    tokens = 2 * 16
    weights = sum(p.numel() for block in model.blocks for p in block.parameters() if p.dim() == 2)
    head = 6 * model.head.weight.numel() * tokens
    with running(model, list(model.blocks), actions) as runtime:
        runtime.micro_step_begins()
        with FlopCounterMode(display=False) as counter:
            with runtime.outer_context():
                loss = STEP(model, 0)
            loss.backward()
        runtime.micro_step_ends()
    counts = counter.get_flop_counts()["Global"]
    matmuls = sum(count for op, count in counts.items() if "attention" not in str(op))
    return (matmuls - head) / (weights * tokens)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("keep", 6.0),
        ("boundary", 8.0),
        ("segments of 2", 6 + 2 * 3 / 2),
        ("segments of 3", 6 + 2 * 5 / 3),
        ("segments of 4", 6 + 2 * (7 + 3) / 6),
        ("selective nothing", 8.0),
        ("selective matmuls", 6.0),
        ("saved host", 6.0),
    ],
)
def test_counted_flops_are_those_of_the_plan(model, name, expected):
    # Early stop: the last matmul of a block's second run is needed by the dropout behind it, so nothing is saved.
    assert block_flops(model, CHOICES[name]) == pytest.approx(expected, abs=1e-9)


def test_counters_count_reruns_and_recomputes(model):
    with running(model, list(model.blocks), segments(DEPTH, 3)) as runtime:
        run_pass(model, STEP, runtime, micro_steps=1)
        assert (runtime.counters.reruns, runtime.counters.recomputes) == (4, 6)


def boundary_bytes() -> int:
    return 2 * 16 * 32 * 4


def test_held_boundaries_are_those_that_were_kept(model):
    with running(model, list(model.blocks), segments(DEPTH, 3)) as runtime:
        run_pass(model, STEP, runtime, micro_steps=1)
        assert runtime.counters.held_boundary_bytes == {0: boundary_bytes(), 3: boundary_bytes()}
        assert set(runtime.counters.held_saved_bytes) == {-1}


def test_offloaded_boundaries_leave_the_device_and_are_counted_once(model):
    with running(model, list(model.blocks), everywhere(action("boundary", "host"))) as runtime:
        run_pass(model, STEP, runtime, micro_steps=1)
        assert sum(runtime.counters.held_boundary_bytes.values()) == 0
        assert runtime.counters.offloaded_bytes == {"host": DEPTH * boundary_bytes()}
        assert runtime.counters.prefetched_bytes == DEPTH * boundary_bytes()


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ([KEEP] * 5, "5 actions for 6 blocks"),
        ([KEEP, DROPPED] + [KEEP] * 4, "block 1: a boundary may be dropped only"),
        ([DROPPED] + [BOUNDARY] * 5, "block 0: a boundary may be dropped only"),
        ([action("selective", ops=("aten.no_such.default",))] * 6, "no operator"),
        ([action("selective", ops=("aten.view.default",))] * 6, "returns a view"),
        ([action("selective", ops=("aten.add_.Tensor",))] * 6, "writes in place"),
        ([action("boundary", lead=-1)] * 6, "lead must be at least 0"),
    ],
)
def test_wrong_plans_are_refused_by_block_and_reason(model, actions, reason):
    with running(model, list(model.blocks)) as runtime, pytest.raises(PlanError, match=reason):
        runtime.set_actions(actions)


def test_nvme_without_a_store_is_refused(model):
    with running(model, list(model.blocks), store=None) as runtime, pytest.raises(PlanError, match="no NVMe store"):
        runtime.set_actions(everywhere(action("boundary", "nvme")))
