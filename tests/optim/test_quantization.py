"""The dynamic map, the oracle, and every implementation of quantization against it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.optim import kernels, quantization

ISAS = kernels.available_isas()
N = 1 << 20


def distributions(signed: bool) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    normal, uniform = torch.randn(N, generator=g), torch.rand(N, generator=g)
    out = {
        "normal": normal,
        "uniform": uniform * 2 - 1,
        "lognormal": normal.sign() * torch.exp(torch.randn(N, generator=g) * 3),
        "log-uniform": normal.sign() * 10 ** (-9 * uniform),
        "gradient squares": normal**2 * torch.exp(torch.randn(N, generator=g) * 2),
        "half zeros": normal * (uniform > 0.5),
        "small": normal * 1e-36,
        "huge": normal * 6e37,
    }
    return out if signed else {k: v.abs() for k, v in out.items()}


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_one_of_bitsandbytes(signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed=signed)
    torch.testing.assert_close(quantization.dynamic_map(signed), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("signed", [True, False])
def test_dequantized_codes_are_the_map_times_absmax(signed, isa):
    codes = torch.arange(256, dtype=torch.uint8)
    table = quantization.dynamic_map(signed, torch.float64)
    for absmax in (1.0, 3.7e-5, 1e30):
        got = kernels.dequantize(codes, torch.tensor([absmax]), signed, isa=isa).double()
        torch.testing.assert_close(got, table * torch.tensor(absmax).double(), rtol=1e-6, atol=0)
    assert kernels.dequantize(codes, torch.ones(1), signed, isa=isa)[quantization.ZERO_CODE[signed]] == 0


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_of_the_map(signed):
    for name, x in distributions(signed).items():
        codes, absmax = kernels.quantize(x, signed)
        scaled = (x.view(-1, 256).double() / absmax.double()[:, None].clamp_min(1e-300)).view(-1)
        off = (codes.int() - quantization.nearest_codes(scaled, signed).int()).abs()
        assert off.max() <= 1, name
        assert (off != 0).double().mean() < 1e-5, name


def test_the_oracle_picks_the_smallest_distance():
    # Independent of boundaries: compare with every entry of the map.
    for signed in (True, False):
        table = quantization.dynamic_map(signed, torch.float64)
        x = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) ** 4
        x = torch.cat([x, -x]) if signed else x.clamp_min(1e-6)  # below, the rule for second moments counts
        distance = (x[:, None] - table[None]).abs()
        picked = distance.gather(1, quantization.nearest_codes(x, signed).long()[:, None])
        assert torch.equal(picked[:, 0], distance.amin(1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("signed", [True, False])
def test_every_implementation_gives_the_same_codes(signed, isa):
    for name, x in distributions(signed).items():
        x = x[: 4096 + 77]
        codes, absmax = kernels.quantize(x, signed, isa=isa)
        want_codes, want_absmax = quantization.quantize_blockwise(x, signed)
        assert torch.equal(codes, want_codes) and torch.equal(absmax, want_absmax), name
        back = kernels.dequantize(codes, absmax, signed, isa=isa)
        assert torch.equal(back, quantization.dequantize_blockwise(want_codes, want_absmax, signed)), name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("signed", [True, False])
def test_around_every_boundary(signed, isa):
    """All floats within 40 units of every boundary between codes, with absmax 1: tables in memory and in registers
    must change code at the same float."""
    table = quantization.dynamic_map(signed, torch.float64)
    table = table[table >= 0]
    middle = ((table[:-1] + table[1:]) / 2).float().view(torch.int32)
    x = (middle[:, None] + torch.arange(-40, 41, dtype=torch.int32)).view(torch.float32).clamp_max(1.0)
    blocks = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % 255)).view(-1, 255)
    x = torch.cat([blocks, torch.ones(blocks.shape[0], 1)], 1).reshape(-1)
    x = torch.cat([x, -x]) if signed else x
    codes, _ = kernels.quantize(x, signed, isa=isa)
    assert torch.equal(codes, quantization.quantize_blockwise(x, signed)[0])
    assert (codes.int() - quantization.nearest_codes(x, signed).int()).abs().max() <= 1


@pytest.mark.parametrize("isa", ISAS)
def test_a_second_moment_that_is_not_zero_never_gets_code_zero(isa):
    x = torch.zeros(512)
    x[0], x[1], x[2], x[300], x[301] = 1.0, 1e-30, 1e-45, 1e-45, 3e-45
    codes, absmax = kernels.quantize(x, False, isa=isa)
    assert codes[:4].tolist() == [255, 1, 1, 0] and codes[300] > 0 and codes[301] == 255
    assert absmax.tolist() == [1.0, x[301].item()]
    assert (codes[x == 0] == 0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("signed", [True, False])
def test_zero_blocks_and_lengths(signed, isa):
    assert kernels.quantize(torch.zeros(300), signed, isa=isa)[0].unique().tolist() == [quantization.ZERO_CODE[signed]]
    for n in (0, 1, 255, 256, 257, 513):
        x = torch.linspace(0, 1, n) if n else torch.zeros(0)
        codes, absmax = kernels.quantize(x, signed, isa=isa)
        assert codes.numel() == n and absmax.numel() == quantization.number_of_blocks(n)
        back = kernels.dequantize(codes, absmax, signed, isa=isa)
        assert back.numel() == n
        # The coarsest cell of the top decade is 0.9 / 64 wide (signed).
        assert n == 0 or (back - x).abs().max() <= 0.9 / 64


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=600),
    signed=st.booleans(),
)
def test_any_finite_values(values, signed):
    x = torch.tensor(values, dtype=torch.float32)
    x = x if signed else x.abs()
    want = quantization.quantize_blockwise(x, signed)
    for isa in ISAS:
        codes, absmax = kernels.quantize(x, signed, isa=isa)
        assert torch.equal(codes, want[0]) and torch.equal(absmax, want[1])
    if not signed:
        assert torch.equal(codes == 0, x == 0)


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="absmax has 1 values; 257 codes need 2"):
        kernels.dequantize(torch.zeros(257, dtype=torch.uint8), torch.zeros(1), True)
    with pytest.raises(ConfigError, match=r"x is torch.float64"):
        kernels.quantize(torch.zeros(3, dtype=torch.float64), True)
