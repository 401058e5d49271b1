"""Cases under ZeRO-3 beyond the matrix: native linears, early stop off, the model's own checkpointing, a real disk."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.zero import linear as zero_linear
from torch.utils.flop_counter import FlopCounterMode

from lazytrain_ds.runtime.swap import NvmeStore
from tests.runtime.activation_tools import KEEP, action, random_actions, segments
from tests.runtime.test_activations_zero3 import Trial, assert_same, choices


@pytest.fixture
def trial(request):
    made = []

    def make(*args, **kwargs):
        made.append(Trial(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("name", ["gpt", "llama", "frozen linears"])
def test_native_linears_save_views_of_reused_slots(trial, name):
    one = trial(name, 1, memory_efficient_linear=False)
    reference = one.run([KEEP] * one.count)
    views = []
    view_of = one.runtime.parameters.view_of
    one.runtime.parameters.view_of = lambda tensor: (found := view_of(tensor), views.append(found is not None))[0]
    for choice, actions in choices(one.count).items():
        assert_same(reference, one.run(actions), choice)
    assert any(views), "no view of a slot was saved: the trap is not there and this test shows nothing"


@pytest.mark.parametrize("name", ["gpt", "llama", "frozen embedding and lora"])
def test_early_stop_off(trial, name):
    one = trial(name, 1)
    reference = one.run([KEEP] * one.count)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        for choice in ("boundary", "segments of 3", "selective matmuls"):
            assert_same(reference, one.run(choices(one.count)[choice]), choice)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_enabled_in_the_model(trial, reentrant):
    one = trial("llama", 2)
    reference = one.run([KEEP] * one.count)
    one.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    before = one.runtime.counters.recomputes
    assert_same(reference, one.run([KEEP] * one.count), "keep")
    assert one.runtime.counters.recomputes == before
    for seed in range(4):
        assert_same(reference, one.run(random_actions(one.count, seed)), f"mix {seed}")


def test_activations_on_a_real_disk(trial, tmp_path):
    one = trial("gpt", 2)
    reference = one.run([KEEP] * one.count)
    with NvmeStore(tmp_path, create=True) as store:
        one.runtime.mover.store = store
        for actions in (
            [action("boundary", "nvme", lead=2)] * one.count,
            [action("keep", "nvme", "nvme", lead=1)] * one.count,
            [action("selective", "nvme", "nvme", lead=0)] * one.count,
            segments(one.count, 3, "nvme"),
        ):
            for _ in range(2):
                assert_same(reference, one.run(actions), "nvme")
        assert store.bytes_written == one.runtime.counters.offloaded_bytes["nvme"] > 0
        assert 0 < store.bytes_read <= store.bytes_written
        files = len(store.keys())
        one.run([action("boundary", "nvme", lead=2)] * one.count)
        assert len(store.keys()) == files


def test_zero3s_linear_is_the_original_outside_our_blocks_and_after_us(trial):
    function = zero_linear.LinearFunctionForZeroStage3
    before = function.__dict__["forward"]
    one = trial("gpt", 1)
    inputs = torch.randn(2, 3, 8), torch.randn(8, 8), torch.randn(8)
    expected = before.__func__(*inputs)
    seen = []
    original = torch.Tensor.__iadd__
    try:
        torch.Tensor.__iadd__ = lambda self, other: (seen.append(1), original(self, other))[1]
        assert torch.equal(function.forward(*inputs), expected)
    finally:
        torch.Tensor.__iadd__ = original
    assert seen, "a stock engine's linear still adds in place"
    one.runtime.remove()
    assert function.__dict__["forward"] is before
    one.runtime.install()


def test_out_of_place_bias_has_the_same_bits():
    from lazytrain_ds.runtime.selective import linear_installation, out_of_place_bias

    linear_installation.add()
    try:
        function = zero_linear.LinearFunctionForZeroStage3
        for dtypes in [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.bfloat16, torch.bfloat16, torch.float32)]:
            inputs = [torch.randn(shape).to(dtype) for shape, dtype in zip([(3, 5, 8), (7, 8), (7,)], dtypes)]  # noqa: B905
            expected = function.forward(*inputs)
            with out_of_place_bias():
                result = function.forward(*inputs)
            assert result.dtype == expected.dtype and torch.equal(result, expected)
    finally:
        linear_installation.remove()


def test_deepspeeds_own_offload_on_top_is_harmless_and_said_once(trial, caplog):
    from deepspeed.runtime.activation_checkpointing.offload_activations import (
        get_checkpoint_hidden_states_offloading_ctx_manager,
    )

    one = trial("llama", 1)
    reference = one.run([KEEP] * one.count)
    assert "hidden-states offload" not in caplog.text
    for _ in range(2):
        theirs = get_checkpoint_hidden_states_offloading_ctx_manager()
        with theirs:
            assert_same(reference, one.run([action("boundary", "host")] * one.count), "both")
            assert theirs.stats.offloaded_tensors == 0
    assert caplog.text.count("hidden-states offload context is on as well") == 1


def test_counted_flops_under_zero3(trial):
    """Early stop: what GPT's last dropout needs comes after every matmul, so a second run has all of them."""
    one = trial("gpt", 1)
    one.check_bytes = False  # the counter keeps tensors alive
    blocks = [one.setup.block_modules[place] for place in one.places]
    weights = sum(p.ds_numel for block in blocks for p in block.parameters() if len(p.ds_shape) == 2)
    head = one.model.head.weight.ds_numel
    tokens = 2 * 16

    def per_parameter_and_token(actions) -> float:
        with FlopCounterMode(display=False) as counter:
            one.run(actions)
        counts = counter.get_flop_counts()["Global"]
        matmuls = sum(count for operator, count in counts.items() if "attention" not in str(operator))
        return (matmuls - 6 * head * tokens) / (weights * tokens)

    count = one.count
    assert count == 5
    expected = {
        "keep": ([KEEP] * count, 6),
        "selective": ([action("selective")] * count, 6),
        "boundary": ([action("boundary")] * count, 8),
        # a segment of m blocks costs 6 + 2 (2m - 1) / m per block
        "segments of 2": (segments(count, 2), 6 + 2 * (3 + 3 + 1) / 5),
        "segments of 3": (segments(count, 3), 6 + 2 * (5 + 3) / 5),
        "segments of 4": (segments(count, 4), 6 + 2 * (7 + 1) / 5),
        "one segment": (segments(count, 5), 6 + 2 * 9 / 5),
    }
    for name, (actions, flops) in expected.items():
        assert per_parameter_and_token(actions) == pytest.approx(flops, abs=1e-9), name
