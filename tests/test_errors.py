"""What is typed in from a message must be enough."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lazytrain_ds.config import parse_size
from lazytrain_ds.errors import format_bytes, format_bytes_up


@given(st.integers(1, 9 * 10**14))
def test_rounded_up_it_is_enough_and_hardly_more(count: int) -> None:
    assert count <= parse_size(format_bytes_up(count)) <= count * 1.0101 + 1


def test_three_figures() -> None:
    assert (format_bytes(225_100_000), format_bytes_up(225_100_000)) == ("225 MB", "226 MB")
    assert format_bytes_up(225_000_000) == "225 MB"
    assert format_bytes_up(999_600_000) == "1 GB"
