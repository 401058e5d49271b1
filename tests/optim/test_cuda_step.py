"""The CUDA path against a stand-in for bitsandbytes' op: what it is called with, on which views of the state."""

import pytest
import torch

from lazytrain_ds.errors import UnsupportedError
from lazytrain_ds.optim import cuda_step, kernels
from lazytrain_ds.optim.layout import StateLayout

HYPER = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=3, grad_scale=0.25)


def test_segments_go_to_the_op_with_the_gradient_scale(monkeypatch):
    calls = []

    def op(name, g, p, c1, c2, b1, b2, b3, alpha, eps, step, lr, q1, q2, a1, a2, wd, scale, skip):
        calls.append((name, g.numel(), step, scale, skip))
        assert q1.shape == q2.shape == (256,) and q1[127] == 0 and q2[0] == 0
        # What the op computes, through our own kernel: shows that views of the state are passed in the right order.
        kernels.adamw8bit_step_(
            p, g, c1, a1, c2, a2, lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=wd, step=step, grad_scale=scale
        )

    monkeypatch.setattr(cuda_step, "_blockwise_op", lambda: op)
    layout = StateLayout.of(9000, [(0, 5000, "8bit"), (5000, 1000, "fp32"), (6000, 3000, "8bit")])
    torch.manual_seed(0)
    start, grad = torch.randn(9000), torch.randn(9000)
    p, q, s, t = start.clone(), start.clone(), layout.new_state(), layout.new_state()
    out = torch.zeros(9000, dtype=torch.bfloat16)
    cuda_step.cuda_segments_step_(p, grad, s, layout, out=out, **HYPER)
    kernels.adamw_segments_step_(q, grad, t, layout, **HYPER)
    assert calls == [("adam", 5000, 3, 0.25, False), ("adam", 3000, 3, 0.25, False)]
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert torch.equal(s["exp_avg_codes"], t["exp_avg_codes"]) and torch.equal(out, p.bfloat16())


def test_bitsandbytes_op_has_the_arguments_we_pass():
    pytest.importorskip("bitsandbytes")
    names = [a.name for a in cuda_step._blockwise_op().default._schema.arguments]
    assert names == [
        "optimizer_name", "g", "p", "state1", "state2", "beta1", "beta2", "beta3", "alpha", "eps", "step", "lr",
        "qmap1", "qmap2", "absmax1", "absmax2", "weight_decay", "gnorm_scale", "skip_zeros",
    ]  # fmt: skip


def test_bitsandbytes_own_cpu_op_takes_our_state():
    pytest.importorskip("bitsandbytes")
    layout = StateLayout.whole(2048, "8bit")
    p, s = torch.zeros(2048), layout.new_state()
    cuda_step.cuda_segments_step_(p, torch.ones(2048), s, layout, **{**HYPER, "step": 1})
    torch.testing.assert_close(p, torch.full((2048,), -1e-3), rtol=1e-2, atol=0)


def test_what_the_op_cannot_do_is_refused():
    layout, zeros = StateLayout.whole(10, "8bit"), torch.zeros(10)
    for change in (dict(decoupled=False, weight_decay=0.1), dict(bias_correction=False)):
        options = {**HYPER, **change}
        with pytest.raises(UnsupportedError, match="AdamW with bias correction only"):
            cuda_step.cuda_segments_step_(zeros, zeros.clone(), layout.new_state(), layout, **options)
