"""The step, the norm and accumulation: against fp64, against torch, and independence of how the work is cut."""

import itertools
import math
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain_ds.errors import ConfigError, UnsupportedError
from lazytrain_ds.optim import kernels, quantization, reference
from lazytrain_ds.optim.layout import Segment, StateLayout

ISAS = kernels.available_isas()
HYPER = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)


def problem(n: int, seed: int = 0, layout: StateLayout | None = None, offset: int = 0):
    """Parameter, gradient and a plausible state of n elements, each starting `offset` elements into its storage."""
    g = torch.Generator().manual_seed(seed)

    def draw(scale):
        return (torch.randn(n + offset, generator=g) * scale)[offset:]

    param, grad, m, v = draw(0.02), draw(1e-3), draw(1e-4), draw(1e-3).square()
    if layout is None:
        return param, grad, {"exp_avg": m, "exp_avg_sq": v}
    state = layout.new_state()
    for s, (at, block) in zip(layout.segments, layout.places, strict=True):
        for key, moment, signed in (("exp_avg", m, True), ("exp_avg_sq", v, False)):
            part = moment[s.offset : s.offset + s.numel]
            if s.precision == "fp32":
                state[key][at : at + s.numel] = part
            else:
                codes, absmax = quantization.quantize_blockwise(part, signed)
                state[key + "_codes"][at : at + s.numel] = codes
                state[key + "_absmax"][block : block + absmax.numel()] = absmax
    return param, grad, state


def clone(problem_):
    p, g, s = problem_
    return p.clone(), g.clone(), {k: v.clone() for k, v in s.items()}


def same(a, b) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(a[2][k], b[2][k]) for k in a[2])


def adamw_fp64(p, g, m, v, *, lr, beta1, beta2, eps, weight_decay, step, grad_scale, decoupled):
    """An independent AdamW, as textbooks write it. Returns the new (p, m, v) and the update."""
    p, g, m, v = (t.double() for t in (p, g, m, v))
    g = g * grad_scale
    if not decoupled:
        g = g + weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    update = lr * (m / (1 - beta1**step)) / (torch.sqrt(v / (1 - beta2**step)) + eps)
    return (p * (1 - lr * weight_decay) if decoupled else p) - update, m, v, update


def ulp(x: torch.Tensor) -> torch.Tensor:
    x = x.abs().float()
    return torch.nextafter(x, torch.full_like(x, math.inf)).double() - x.double()


@pytest.mark.parametrize("isa", ISAS)
def test_fp32_states_within_two_ulps_of_fp64_over_lengths_and_offsets(isa):
    worst = 0.0
    lengths = range(1, 2001) if isa == ISAS[0] else [*range(1, 40), 255, 256, 257, 1000, 1999, 2000]
    for n in lengths:
        offset, decoupled = n % 16, bool(n % 3)
        p, g, s = problem(n, n, offset=offset)
        options = dict(HYPER, lr=10.0 ** -(n % 5), step=1 + n % 7, grad_scale=0.37, decoupled=decoupled)
        want, m, v, update = adamw_fp64(p, g, s["exp_avg"], s["exp_avg_sq"], **options)
        before = p.clone()
        kernels.adamw_step_(p, g, s["exp_avg"], s["exp_avg_sq"], isa=isa, **options)
        size = torch.maximum(before.abs().double(), update.abs())
        worst = max(worst, ((p.double() - want).abs() / ulp(size)).max().item())
        torch.testing.assert_close(s["exp_avg"], m.float(), rtol=2e-7, atol=0)
        torch.testing.assert_close(s["exp_avg_sq"], v.float(), rtol=2e-7, atol=0)
    assert worst <= 2.0, worst


@pytest.mark.parametrize("offset", range(16))
def test_fp32_states_at_every_offset(offset):
    p, g, s = problem(1500, offset, offset=offset)
    options = dict(HYPER, step=3, grad_scale=1.0, decoupled=True)
    want, _, _, update = adamw_fp64(p, g, s["exp_avg"], s["exp_avg_sq"], **options)
    size = torch.maximum(p.abs().double(), update.abs())
    kernels.adamw_step_(p, g, s["exp_avg"], s["exp_avg_sq"], **options)
    assert ((p.double() - want).abs() / ulp(size)).max() <= 2.0


def test_agrees_with_torch_adamw_over_many_steps():
    for decoupled, cls in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        p = torch.randn(3000)
        q = torch.nn.Parameter(p.clone())
        m, v = torch.zeros(3000), torch.zeros(3000)
        theirs = cls([q], lr=1e-2, weight_decay=0.1)
        for step in range(1, 30):
            g = torch.randn(3000)
            q.grad = g.clone()
            theirs.step()
            kernels.adamw_step_(
                p, g, m, v, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=step, decoupled=decoupled
            )
        torch.testing.assert_close(p, q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["fp32", "8bit"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16])
def test_every_implementation_is_bit_identical_to_torch(isa, precision, grad_dtype, out_dtype):
    for n, decoupled, bias_correction in (
        (1, True, True),
        (255, False, True),
        (1287, True, False),
        (70001, False, False),
    ):
        layout = StateLayout.whole(n, precision)
        ours, theirs = problem(n, 5, layout), problem(n, 5, layout)
        outs = []
        for (p, g, s), which in ((ours, isa), (theirs, "torch")):
            out = None if out_dtype is None else torch.full((n,), -1.0, dtype=out_dtype)
            for step in (1, 2, 3):
                kernels.adamw_segments_step_(
                    p, g.to(grad_dtype), s, layout, **HYPER, step=step, grad_scale=0.7, decoupled=decoupled,
                    bias_correction=bias_correction, out=out, isa=which,
                )  # fmt: skip
            outs.append(out)
        assert same(ours, theirs)
        if out_dtype is not None:
            assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], ours[0].to(out_dtype))


@pytest.mark.parametrize("precision", ["fp32", "8bit"])
def test_threads_and_large_buffers_do_not_change_a_bit(precision):
    n = 4_300_001  # past the limit for non-temporal stores, several tasks, an odd tail
    layout = StateLayout.whole(n, precision)
    base = problem(n, 1, layout)
    results = []
    for threads, shift in ((1, 0), (2, 1), (5, 32)):
        p, g, s = clone(base)
        out = torch.zeros(n + shift, dtype=torch.bfloat16)[shift:]
        kernels.adamw_segments_step_(p, g.bfloat16(), s, layout, **HYPER, step=2, out=out, num_threads=threads)
        results.append((p, out, s))
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0]) and torch.equal(results[0][1], other[1])
        assert all(torch.equal(results[0][2][k], other[2][k]) for k in other[2])


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    precision=st.sampled_from(["fp32", "8bit"]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_cutting_a_buffer_at_blocks_does_not_change_a_bit(n, cuts, precision, threads, seed):
    layout = StateLayout.whole(n, precision)
    whole, parts = problem(n, seed, layout), problem(n, seed, layout)
    kernels.adamw_segments_step_(*whole, layout, **HYPER, step=4, num_threads=threads)
    edges = sorted({0, n, *(min(256 * c, n) for c in cuts)})
    p, g, s = parts
    for a, b in itertools.pairwise(edges):
        piece = {k: t[a // 256 : (b + 255) // 256] if k.endswith("absmax") else t[a:b] for k, t in s.items()}
        kernels.adamw_segments_step_(p[a:b], g[a:b], piece, StateLayout.whole(b - a, precision), **HYPER, step=4)
    assert same(whole, parts)


@pytest.mark.parametrize("isa", ISAS)
def test_segments_equal_their_tensors_one_by_one(isa):
    layout = StateLayout.of(
        2100, [(0, 700, "8bit"), (700, 3, "fp32"), (703, 97, "fp32"), (800, 1000, "8bit"), (1800, 300, "fp32")]
    )
    p, g, s = problem(2100, 2, layout)
    q, _, t = clone((p, g, s))
    out = torch.zeros(2100, dtype=torch.bfloat16)
    kernels.adamw_segments_step_(p, g, s, layout, **HYPER, step=1, out=out, isa=isa, num_threads=2)
    for seg, (at, block) in zip(layout.segments, layout.places, strict=True):
        a, n = seg.offset, seg.numel
        blocks = quantization.number_of_blocks(n)
        piece = {
            k: v[block : block + blocks] if k.endswith("absmax") else v[at : at + n]
            for k, v in t.items()
            if (k in ("exp_avg", "exp_avg_sq")) == (seg.precision == "fp32")
        }
        kernels.adamw_segments_step_(
            q[a : a + n], g[a : a + n], piece, StateLayout.whole(n, seg.precision), **HYPER, step=1
        )
    assert same((p, g, s), (q, g, t)) and torch.equal(out, p.bfloat16())


SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-38,
    1.2e-38,
    1e-20,
    1.0,
    -1.0,
    1e19,
    3e38,
    -3.4e38,
    math.inf,
    -math.inf,
    math.nan,
]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), n=st.integers(1, 600), decoupled=st.booleans(), eps=st.sampled_from([1e-8, 0.0, 1e-30]))
def test_special_values_fp32_states(data, n, decoupled, eps):
    """NaN, Inf, zeros, subnormals and huge values: all implementations agree on every element."""
    p, g, s = problem(n, 3)
    for t in (p, g, s["exp_avg"], s["exp_avg_sq"]):
        for i in data.draw(st.lists(st.integers(0, n - 1), max_size=6)):
            x = data.draw(st.sampled_from(SPECIAL))
            t[i] = abs(x) if t is s["exp_avg_sq"] else x
    results = []
    for isa in ISAS:
        q, h, r = clone((p, g, s))
        out = torch.zeros(n, dtype=torch.bfloat16)
        kernels.adamw_segments_step_(
            q, h, r, StateLayout.whole(n, "fp32"), **dict(HYPER, eps=eps), step=2, decoupled=decoupled, out=out, isa=isa
        )
        results.append([q, out.float(), r["exp_avg"], r["exp_avg_sq"]])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), n=st.integers(1, 900))
def test_special_finite_values_8bit_states(data, n):
    """Zeros, subnormals and huge values: finite results, equal everywhere, and a moment is zero only if it is zero."""
    layout = StateLayout.whole(n, "8bit")
    base = problem(n, 3, layout)
    for i in data.draw(st.lists(st.integers(0, n - 1), max_size=10)):
        base[1][i] = data.draw(st.sampled_from([x for x in SPECIAL if math.isfinite(x)]))
    results = []
    for isa in ISAS:
        p, g, s = clone(base)
        for step in (1, 2):
            kernels.adamw_segments_step_(p, g, s, layout, **HYPER, step=step, isa=isa)
        results.append((p, g, s))
    p, g, s = results[0]
    assert torch.isfinite(p).all() and all(torch.isfinite(s[k]).all() for k in s if k.endswith("absmax"))
    assert all(same(results[0], other) for other in results[1:])
    assert (s["exp_avg_sq_codes"][(g * g * 1e-3) > 0] >= 1).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_stays_in_its_block(isa):
    layout = StateLayout.whole(768, "8bit")
    clean, dirty = problem(768, 0, layout), problem(768, 0, layout)
    dirty[1][300] = math.nan
    for q in (clean, dirty):
        kernels.adamw_segments_step_(*q, layout, **HYPER, step=1, isa=isa)
    outside = torch.ones(768, dtype=torch.bool)
    outside[256:512] = False
    assert torch.equal(clean[0][outside], dirty[0][outside])
    assert torch.equal(clean[2]["exp_avg_codes"][outside], dirty[2]["exp_avg_codes"][outside])


@pytest.mark.parametrize("isa", [i for i in ISAS if i != "torch"])
def test_the_callers_flush_to_zero_mode_does_not_matter(isa):
    layout = StateLayout.whole(300, "8bit")
    results = []
    for flush in (False, True):
        p, g, s = problem(300, 0, layout)
        g[5:200] = 1e-40
        torch.set_flush_denormal(flush)
        try:
            kernels.adamw_segments_step_(p, g, s, layout, **HYPER, step=1, isa=isa)
        finally:
            torch.set_flush_denormal(False)
        results.append((p, g, s))
    assert same(*results)


@pytest.mark.parametrize(("spread", "limit"), [(0.5, 1.5), (1.0, 1.5), (2.0, 2.5), (3.0, 2.5)])
def test_wide_range_gradients_do_not_blow_up_updates(spread, limit):
    """Neighbours of one block with gradients of very different (lognormal) sizes: with plain nearest codes the small
    ones' second moments become 0 while their first moments do not, and single updates reach dozens of times fp32's."""
    n = 256 * 64
    gen = torch.Generator().manual_seed(0)
    scale = torch.exp(
        torch.randn(n // 256, 1, generator=gen) * 1.5 + torch.randn(n // 256, 256, generator=gen) * spread
    )
    layout8, layout32 = StateLayout.whole(n, "8bit"), StateLayout.whole(n, "fp32")
    p8, p32 = torch.zeros(n), torch.zeros(n)
    s8, s32 = layout8.new_state(), layout32.new_state()
    largest8 = largest32 = 0.0
    for step in range(1, 101):
        g = (torch.randn(n, generator=gen) + 0.2) * scale.view(-1) * 1e-3
        old8, old32 = p8.clone(), p32.clone()
        options = dict(HYPER, weight_decay=0.0, step=step)
        kernels.adamw_segments_step_(p8, g, s8, layout8, **options)
        kernels.adamw_segments_step_(p32, g, s32, layout32, **options)
        largest8 = max(largest8, (p8 - old8).abs().max().item())
        largest32 = max(largest32, (p32 - old32).abs().max().item())
    assert largest8 <= limit * largest32


# --- norm ---


def norm_by_hand(x: torch.Tensor) -> float:
    """The definition, element by element in Python on fp32 tensors of one element where rounding matters."""
    chunks = []
    for start in range(0, x.numel(), 4096):
        lanes = [torch.tensor(0.0)] * 64
        for i, value in enumerate(x[start : start + 4096].float()):
            lanes[i % 64] = lanes[i % 64] + value * value
        half = 32
        while half:
            lanes = [lanes[j] + lanes[j + half] for j in range(half)]
            half //= 2
        chunks.append(float(lanes[0]))
    while len(chunks) & (len(chunks) - 1):
        chunks.append(0.0)
    while len(chunks) > 1:
        half = len(chunks) // 2
        chunks = [chunks[j] + chunks[j + half] for j in range(half)]
    return chunks[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_the_defined_one(isa, dtype):
    for n in (1, 63, 64, 65, 4095, 4096, 4097, 3 * 4096 + 5):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        assert kernels.squared_norm(x, isa=isa) == (norm_by_hand(x), True)


def test_the_norm_does_not_depend_on_threads_or_implementation():
    x = torch.randn(1_000_003)
    values = {kernels.squared_norm(x, isa=isa, num_threads=t) for isa in ISAS for t in (1, 2, 3)}
    assert len(values) == 1
    total, finite = values.pop()
    assert finite and math.isclose(total, x.double().square().sum().item(), rel_tol=1e-6)
    as_tensor = kernels.squared_norm_tensors(x)
    assert as_tensor[0].dtype == torch.float64 and as_tensor[0].item() == total and as_tensor[1].item() is True
    assert reference.squared_norm(x)[0].item() == total
    assert kernels.squared_norm(torch.zeros(0)) == (0.0, True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_finite_check(isa, dtype):
    for n in (1, 70, 5000):
        for bad in (math.nan, math.inf, -math.inf):
            for at in {0, n // 2, n - 1}:
                x = torch.randn(n).to(dtype)
                x[at] = bad
                assert kernels.squared_norm(x, isa=isa)[1] is False
    if dtype != torch.float16:
        total, finite = kernels.squared_norm(torch.full((10,), 1e30).to(dtype), isa=isa)
        assert total == math.inf and finite is True


# --- accumulation ---


@pytest.mark.parametrize("isa", ISAS)
def test_accumulate(isa):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for d, s in itertools.product(dtypes, dtypes):
        for n in (0, 1, 31, 33, 1000, 66_000):
            dst, src = torch.randn(n).to(d), torch.randn(n).to(s)
            want = (dst.float() + src.float()).to(d)
            kernels.accumulate_(dst, src, isa=isa, num_threads=2)
            assert torch.equal(dst, want)


@pytest.mark.parametrize("isa", [i for i in ISAS if i != "torch"])
def test_half_conversions_equal_torch_for_every_half_and_many_floats(isa):
    halves = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = halves.view(dtype)
        dst = torch.zeros(x.numel())
        kernels.accumulate_(dst, x, isa=isa)
        torch.testing.assert_close(dst, x.float() + 0.0, rtol=0, atol=0, equal_nan=True)
        bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0))
        y = bits.to(torch.int32).view(torch.float32)
        out = torch.zeros(y.numel(), dtype=dtype)
        kernels.accumulate_(out, y, isa=isa)
        torch.testing.assert_close(out.float(), (y + 0.0).to(dtype).float(), rtol=0, atol=0, equal_nan=True)


# --- interface ---


def test_the_gil_is_released():
    n = 20_000_000
    p, g, m, v = (torch.zeros(n) for _ in range(4))
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.02)
    begin = time.perf_counter()
    for step in (1, 2, 3):
        kernels.adamw_step_(p, g, m, v, **HYPER, step=step, num_threads=1)
    end = time.perf_counter()
    stop.set()
    thread.join()
    during = [t for t in ticks if begin < t < end]
    # Held throughout a call, the other thread could run between calls only: at most a handful of times.
    assert len(during) > 10, (len(during), end - begin)


def test_wrong_arguments_are_refused():
    p, g, m, v = (torch.zeros(10) for _ in range(4))
    with pytest.raises(ConfigError, match="grad has 9 elements, param has 10"):
        kernels.adamw_step_(p, g[:9], m, v, **HYPER, step=1)
    with pytest.raises(ConfigError, match="grad is not contiguous"):
        kernels.adamw_step_(p, torch.zeros(20)[::2], m, v, **HYPER, step=1)
    with pytest.raises(ConfigError, match=r"param is torch.bfloat16"):
        kernels.adamw_step_(p.bfloat16(), g, m, v, **HYPER, step=1)
    with pytest.raises(ConfigError, match=r"grad is torch.float64"):
        kernels.adamw_step_(p, g.double(), m, v, **HYPER, step=1)
    with pytest.raises(ConfigError, match=r"out is torch.float32"):
        kernels.adamw_step_(p, g, m, v, **HYPER, step=1, out=torch.zeros(10))
    with pytest.raises(ConfigError, match="step is 0"):
        kernels.adamw_step_(p, g, m, v, **HYPER, step=0)
    with pytest.raises(ConfigError, match=r"'exp_avg' is torch.float32 with 5 elements"):
        kernels.adamw_step_(p, g, m[:5], v, **HYPER, step=1)
    with pytest.raises(ConfigError, match="instruction set 'mmx' is unknown"):
        kernels.adamw_step_(p, g, m, v, **HYPER, step=1, isa="mmx")
    with pytest.raises(ConfigError, match="src has 9 elements, dst has 10"):
        kernels.accumulate_(p, g[:9])


def test_an_instruction_set_the_processor_lacks_is_refused(monkeypatch):
    missing = [i for i in ("avx512", "avx2") if i not in ISAS]
    if not missing or ISAS == ("torch",):
        pytest.skip("this processor has them all")
    monkeypatch.setenv("LAZYTRAIN_CPU_ISA", missing[0])
    with pytest.raises(UnsupportedError, match=f"has no {missing[0]}"):
        kernels.squared_norm(torch.ones(4))


def test_empty_tensors():
    for precision in ("fp32", "8bit"):
        e, layout = torch.zeros(0), StateLayout.whole(0, precision)
        kernels.adamw_segments_step_(e, e, {}, layout, **HYPER, step=1, out=torch.zeros(0, dtype=torch.bfloat16))


def test_8bit_entry_point_and_shapes():
    p, g, s = problem(600, 1, StateLayout.whole(600, "8bit"))
    q, h, t = clone((p, g, s))
    kernels.adamw_segments_step_(p, g, s, StateLayout.whole(600, "8bit"), **HYPER, step=1)
    kernels.adamw8bit_step_(
        q.view(20, 30), h.view(20, 30), t["exp_avg_codes"].view(20, 30), t["exp_avg_absmax"],
        t["exp_avg_sq_codes"].view(20, 30), t["exp_avg_sq_absmax"], **HYPER, step=1,
    )  # fmt: skip
    assert same((p, g, s), (q, h, t))


def test_segment_kernel_table_layout():
    layout = StateLayout.of(10, [Segment(0, 4, "fp32"), Segment(4, 6, "8bit")])
    assert layout.kernel_table.tolist() == [[0, 4, 0, 0, 0], [4, 6, 1, 0, 0]]
