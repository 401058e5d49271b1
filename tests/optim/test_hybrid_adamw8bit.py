"""HybridAdamW8bit: layouts, states, saving, and what it learns from models and flat tensors."""

import copy
import io
import logging

import pytest
import torch
from torch import nn

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.optim import kernels
from lazytrain_ds.optim.convert_state import adopt_state, fp32_moments
from lazytrain_ds.optim.fused_adamw import FusedAdamW, hyper_parameters
from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit
from lazytrain_ds.optim.layout import StateLayout


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(67, 211), nn.Linear(211, 67), nn.LayerNorm(67), nn.Linear(67, 211)).to(dtype)


def train(optimizer, net, steps, start=0):
    for step in range(start, start + steps):
        gen = torch.Generator().manual_seed(step)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=gen).to(p.dtype) * 0.1
        optimizer.step()


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def save_and_load(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def test_state_bytes_are_the_formula_and_embeddings_stay_fp32():
    net = model()
    optimizer = HybridAdamW8bit(net.parameters(), model=net)
    train(optimizer, net, 1)
    n8 = 67 * 211
    fp32 = 67 * 211 + 67 + 2 * 67 + 211
    assert optimizer.state_bytes() == {"held": 2 * (2 * n8 + 8 * -(-n8 // 256)) + 8 * fp32, "fp32": 8 * (2 * n8 + fp32)}
    held = sum(t.numel() * t.element_size() for s in optimizer.state.values() for k, t in s.items() if k != "step")
    assert held == optimizer.state_bytes()["held"]
    embedding, linear = optimizer.state[net[0].weight], optimizer.state[net[1].weight]
    assert embedding["exp_avg"].dtype == torch.float32 and linear["exp_avg_codes"].dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_load_continue_is_bit_equal_with_types_kept(dtype):
    a = model(dtype)
    first = HybridAdamW8bit(a.parameters(), lr=1e-2, model=a)
    train(first, a, 3)
    b = model(dtype)
    b.load_state_dict(a.state_dict())
    second = HybridAdamW8bit(b.parameters(), lr=5.0, model=b)
    second.load_state_dict(save_and_load(first.state_dict()))
    state = second.state[b[1].weight]
    assert state["exp_avg_codes"].dtype == torch.uint8 and state["exp_avg_absmax"].dtype == torch.float32
    assert second.param_groups[0]["lr"] == 1e-2
    train(first, a, 3, 3), train(second, b, 3, 3)
    assert equal(weights(a), weights(b))


def test_from_fp32_adamw_and_back():
    a, b, c = model(), model(), model()
    theirs = torch.optim.AdamW(a.parameters(), lr=1e-2)
    train(theirs, a, 4)
    ours = HybridAdamW8bit(b.parameters(), model=b)
    ours.load_state_dict(save_and_load(theirs.state_dict()))
    assert ours.state[b[0].weight]["exp_avg"].equal(theirs.state[a[0].weight]["exp_avg"])
    assert ours.state[b[1].weight]["step"] == 4
    moment = fp32_moments(ours.state[b[1].weight], 211 * 67)["exp_avg"].view(67, 211)
    torch.testing.assert_close(moment, theirs.state[a[1].weight]["exp_avg"], rtol=0.07, atol=1e-3)
    back = torch.optim.AdamW(c.parameters())
    back.load_state_dict(ours.fp32_state_dict())
    assert torch.equal(back.state[c[1].weight]["exp_avg"], moment) and back.param_groups[0]["lr"] == 1e-2
    train(back, c, 1)
    as_fp32 = HybridAdamW8bit(b.parameters(), model=b, state_dict_precision="fp32")
    as_fp32.load_state_dict(ours.state_dict())
    assert set(as_fp32.state_dict()["state"][1]) == {"step", "exp_avg", "exp_avg_sq"}
    fused = FusedAdamW(b.parameters())
    fused.load_state_dict(ours.state_dict())  # 8-bit to fp32 without a detour
    assert torch.equal(fused.state[b[1].weight]["exp_avg"], moment)


@pytest.mark.parametrize("wrapped", [True, False])
def test_from_bitsandbytes(wrapped):
    bnb = pytest.importorskip("bitsandbytes")
    a, b = model(), model()
    theirs = bnb.optim.AdamW8bit(a.parameters(), lr=1e-2, min_8bit_size=4096)
    train(theirs, a, 3)
    saved = theirs.state_dict()
    if not wrapped:
        for s in saved["state"].values():
            s.update(s.pop("__bnb_optimizer_quant_state__", {}))
    ours = HybridAdamW8bit(b.parameters(), model=b, fp32_parameters=["3.weight"])
    ours.load_state_dict(saved)
    s = ours.state[b[1].weight]
    assert torch.equal(s["exp_avg_codes"], theirs.state[a[1].weight]["state1"].view(-1)) and s["step"] == 3
    assert torch.equal(s["exp_avg_sq_absmax"], theirs.state[a[1].weight]["absmax2"])
    assert not ((s["exp_avg_sq_codes"] == 0) & (s["exp_avg_codes"] != 127)).any()
    # 8-bit there, fp32 here: dequantized
    want = kernels.dequantize(
        theirs.state[a[3].weight]["state1"].view(-1), theirs.state[a[3].weight]["absmax1"], True
    ).view(211, 67)
    assert torch.equal(ours.state[b[3].weight]["exp_avg"], want)
    train(ours, b, 2)
    broken = copy.deepcopy(saved)
    inner = broken["state"][1].get("__bnb_optimizer_quant_state__", broken["state"][1])
    inner["qmap1"] = torch.linspace(-1, 1, 256)
    with pytest.raises(ConfigError, match="not blockwise dynamic 8-bit"):
        ours.load_state_dict(broken)


def test_eight_bit_training_follows_fp32():
    """U66: the loss gap after 200 steps is small."""
    losses = {}
    for cls in (torch.optim.AdamW, HybridAdamW8bit):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        target = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        options = {"model": net} if cls is HybridAdamW8bit else {}
        optimizer = cls(net.parameters(), lr=2e-3, **options)
        for _ in range(200):
            x = torch.randn(64, 64)
            loss = (net(x) - target(x).detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        x = torch.randn(2048, 64)
        losses[cls] = (net(x) - target(x)).square().mean().item()
    assert losses[HybridAdamW8bit] <= 1.03 * losses[torch.optim.AdamW], losses


def test_rare_tokens_in_an_embedding_do_not_diverge():
    """U67: rows seen once in a while, beside rows seen always, move at most as far as with fp32."""
    far = {}
    for name, quantized in (("default", []), ("torch", None)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(512, 32))
        optimizer = (
            torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
            if quantized is None
            else HybridAdamW8bit(net.parameters(), lr=1e-2, weight_decay=0.0, model=net, quantized_parameters=quantized)
        )
        start = net[0].weight.detach().clone()
        for step in range(120):
            tokens = torch.randint(0, 64, (256,))
            if step % 40 == 39:
                tokens[0] = 300 + step
            scale = 100.0 if step % 40 == 39 else 1.0
            optimizer.zero_grad()
            (net(tokens).sum() * scale * 1e-2).backward()
            optimizer.step()
        far[name] = (net[0].weight.detach() - start).abs().amax().item()
    assert far["default"] <= 1.01 * far["torch"]


# --- flat tensors ---


def test_segments_of_a_flat_partition():
    torch.manual_seed(0)
    parts = [torch.randn(5000), torch.randn(40), torch.randn(6000)]
    flat = torch.nn.Parameter(torch.cat(parts))
    optimizer = HybridAdamW8bit([flat], lr=1e-2)
    layout = optimizer.set_segments(flat, [(0, 5000, "8bit"), (5000, 40, "fp32"), (5040, 6000, "8bit")])
    assert layout is optimizer.layout_of(flat) and layout.quantized_numel == 11_000
    separate = [torch.nn.Parameter(p.clone()) for p in parts]
    other = HybridAdamW8bit(separate, lr=1e-2)
    for step in range(3):
        g = torch.randn(11_040, generator=torch.Generator().manual_seed(step))
        flat.grad = g
        for p, piece in zip(separate, g.split([5000, 40, 6000]), strict=True):
            p.grad = piece.clone()
        optimizer.step(), other.step()
    assert torch.equal(flat.detach(), torch.cat([p.detach() for p in separate]))
    state = optimizer.state[flat]
    assert set(state) == {"step", "segments", *layout.shapes()} and state["segments"].tolist()[1] == [5000, 40, 0]
    # The same through update() with a low-precision copy
    state2, hyper = optimizer.new_state(flat), hyper_parameters(optimizer.param_groups[0])
    twin, out = torch.cat(parts), torch.zeros(11_040, dtype=torch.bfloat16)
    optimizer.set_segments(twin, layout.segments)
    for step in range(3):
        g = torch.randn(11_040, generator=torch.Generator().manual_seed(step))
        optimizer.update(twin, state2, g * 2, hyper, grad_scale=0.5, out=out)
    assert torch.equal(twin, flat.detach()) and torch.equal(out, twin.bfloat16())
    with pytest.raises(ConfigError, match="cover 10 elements"):
        optimizer.set_segments(flat, [(0, 10, "fp32")])


def test_a_state_of_other_segments_is_converted():
    flat = torch.nn.Parameter(torch.randn(9000))
    a = HybridAdamW8bit([flat])
    a.set_segments(flat, [(0, 5000, "8bit"), (5000, 4000, "fp32")])
    flat.grad = torch.randn(9000)
    a.step()
    b = HybridAdamW8bit([flat])
    b.set_segments(flat, [(0, 4500, "fp32"), (4500, 4500, "8bit")])
    b.load_state_dict(save_and_load(a.state_dict()))
    want, got = fp32_moments(a.state[flat], 9000), fp32_moments(b.state[flat], 9000)
    assert torch.equal(want["exp_avg"][:4500], got["exp_avg"][:4500])
    torch.testing.assert_close(want["exp_avg"], got["exp_avg"], rtol=0.07, atol=1e-3)
    assert torch.equal(a.fp32_state_dict()["state"][0]["exp_avg_sq"], want["exp_avg_sq"])


def test_a_state_put_there_by_a_loader_is_adopted():
    """DeepSpeed's universal checkpoint writes fp32 moments and one shared step into optimizer.state directly."""
    params = [torch.nn.Parameter(torch.randn(5000)) for _ in range(2)]
    optimizer = HybridAdamW8bit(params)
    step = torch.tensor(7.0)
    for p in params:
        optimizer.state[p] = {"step": step, "exp_avg": torch.randn(5000), "exp_avg_sq": torch.rand(5000)}
        p.grad = torch.randn(5000)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [8.0, 8.0] and step == 7.0
    assert (
        optimizer.state[params[0]]["exp_avg_codes"].dtype == torch.uint8 and "exp_avg" not in optimizer.state[params[0]]
    )


def test_without_a_model_sizes_decide_and_a_warning_says_so(caplog):
    net = model()
    optimizer = HybridAdamW8bit(net.parameters())
    with caplog.at_level(logging.WARNING):
        train(optimizer, net, 2)
    assert "exp_avg_codes" in optimizer.state[net[0].weight]
    assert len([r for r in caplog.records if "does not know" in r.message]) == 1
    named = HybridAdamW8bit(net.named_parameters(), fp32_parameters=["0.*"])
    train(named, net, 1)
    assert "exp_avg" in named.state[net[0].weight]


def test_deepcopy_keeps_the_policy():
    net = model()
    optimizer = copy.deepcopy(HybridAdamW8bit(net.parameters(), model=net))
    params = optimizer.param_groups[0]["params"]
    assert [optimizer.precision_of(p) for p in params] == ["fp32", "8bit", "fp32", "fp32", "fp32", "8bit", "fp32"]


def test_one_dimensional_and_empty_parameters():
    for shape in ((), (1,), (0,), (67 * 211,)):
        p = torch.nn.Parameter(torch.ones(shape))
        optimizer = HybridAdamW8bit([p], lr=0.1)
        p.grad = torch.ones(shape)
        optimizer.step()
        assert p.numel() == 0 or p.detach().flatten()[0] < 1
        again = HybridAdamW8bit([p], lr=0.1)
        again.load_state_dict(save_and_load(optimizer.state_dict()))


def test_adopting_keeps_a_copy():
    layout = StateLayout.whole(5000, "8bit")
    saved = {**layout.new_state(), "step": 3}
    got = adopt_state(saved, layout)
    saved["exp_avg_codes"].fill_(0)
    assert (got["exp_avg_codes"] == 127).all() and got["step"] == 3
    with pytest.raises(ConfigError, match="state_dict_precision"):
        HybridAdamW8bit([torch.nn.Parameter(torch.ones(3))], state_dict_precision="int4")
