"""Integer values are followed through a trace, and never further than is sound."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from lazytrain_ds.workload.operators import OperatorTrace, Storages
from lazytrain_ds.workload.values import KnownValues


@pytest.fixture
def traced():
    """(mode to work in, function that makes a fake tensor of a known value)."""
    values = KnownValues()
    mode = FakeTensorMode()

    def known(real: torch.Tensor) -> torch.Tensor:
        with mode:
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
        values.note(fake, real)
        return fake

    return mode, OperatorTrace(Storages(), values), known


def test_branches_on_values_are_those_of_the_real_tensors(traced):
    mode, trace, known = traced
    mask = known(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    with mode, trace:
        assert not bool((mask == 1).all())
        assert bool((mask[:, :2] == 1).all())
        assert int(mask.sum()) == 5
        assert int(torch.arange(7).cumsum(0)[-1]) == 21


def test_writes_are_followed_through_views(traced):
    mode, trace, known = traced
    mask = known(torch.zeros(4, dtype=torch.long))
    with mode, trace:
        mask[1:3].fill_(1)
        assert int(mask.sum()) == 2


def test_a_write_of_something_unknown_makes_every_alias_unknown(traced):
    mode, trace, known = traced
    mask = known(torch.zeros(4, dtype=torch.long))
    with mode, trace:
        view = mask[:2]
        view.copy_(torch.empty(2))
        with pytest.raises(DataDependentOutputException):
            int(mask.sum())


def test_floats_and_random_numbers_are_not_computed(traced):
    mode, trace, _ = traced
    before = torch.get_rng_state()
    with mode, trace:
        for tensor in (torch.ones(2), torch.randint(0, 5, (2,)), torch.randperm(3)):
            with pytest.raises(DataDependentOutputException):
                tensor.sum().item()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_callers_tensor_is_not_written(traced):
    mode, trace, known = traced
    real = torch.zeros(3, dtype=torch.long)
    fake = known(real)
    with mode, trace:
        fake.add_(1)
    assert real.tolist() == [0, 0, 0]
