"""State layouts of flat parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.optim.layout import Segment, StateLayout


def test_neighbouring_fp32_segments_merge_and_quantized_ones_do_not():
    layout = StateLayout.of(30, [(0, 5, "fp32"), (5, 0, "8bit"), (5, 5, "fp32"), (10, 10, "8bit"), (20, 10, "8bit")])
    assert layout.segments == (Segment(0, 10, "fp32"), Segment(10, 10, "8bit"), Segment(20, 10, "8bit"))
    assert layout.places == ((0, 0), (0, 0), (10, 1))
    assert (layout.fp32_numel, layout.quantized_numel, layout.blocks) == (10, 20, 2)


@given(st.lists(st.tuples(st.integers(0, 2000), st.sampled_from(["fp32", "8bit"])), max_size=8))
def test_bytes_are_those_of_the_tensors(parts):
    entries, at = [], 0
    for numel, precision in parts:
        entries.append((at, numel, precision))
        at += numel
    layout = StateLayout.of(at, entries)
    state = layout.new_state()
    assert sum(t.numel() * t.element_size() for t in state.values()) == layout.state_bytes
    expected = sum(8 * n if p == "fp32" else 2 * n + 8 * -(-n // 256) for _, n, p in entries)
    assert layout.state_bytes == expected
    layout.check_state(state)


def test_bytes_per_parameter_of_a_quantized_subgroup():
    n = 10_000_019
    assert StateLayout.whole(n, "8bit").state_bytes / n <= 2.04


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, 5, "fp32")], "cover 5 elements, the parameter has 10"),
        ([(0, 5, "fp32"), (6, 4, "fp32")], "expected one at offset 5, got offset 6"),
        ([(0, 6, "8bit"), (5, 5, "fp32")], "expected one at offset 6, got offset 5"),
        ([(0, 10, "int4")], 'use "fp32" or "8bit"'),
    ],
)
def test_bad_segments_are_refused(segments, message):
    with pytest.raises(ConfigError, match=message):
        StateLayout.of(10, segments)


def test_a_state_of_another_layout_is_refused():
    state = StateLayout.whole(300, "fp32").new_state()
    with pytest.raises(ConfigError, match=r"'exp_avg_codes' is missing, the layout needs torch.uint8 with 300"):
        StateLayout.whole(300, "8bit").check_state(state)
    broken = StateLayout.whole(300, "8bit").new_state()
    broken["exp_avg_codes"] = broken["exp_avg_codes"].to(torch.float32)
    with pytest.raises(ConfigError, match=r"'exp_avg_codes' is torch.float32"):
        StateLayout.whole(300, "8bit").check_state(broken)
