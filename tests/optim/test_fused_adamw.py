"""FusedAdamW as a torch optimizer and as an explicit update; skipped steps; saving."""

import copy
import pickle
import queue
import threading

import pytest
import torch

from lazytrain_ds.errors import ConfigError, OptimizerError
from lazytrain_ds.optim.fused_adamw import FusedAdamW, hyper_parameters


def train(optimizer, params, steps, seed=0, start=0):
    for step in range(start, start + steps):
        gen = torch.Generator().manual_seed(seed + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=gen).to(p.dtype)
        optimizer.step()


def make(cls=FusedAdamW, shapes=((33, 40), (7,)), dtype=torch.float32, **options):
    gen = torch.Generator().manual_seed(7)
    params = [torch.nn.Parameter(torch.randn(s, generator=gen).to(dtype)) for s in shapes]
    return cls(params, lr=1e-2, **options), params


@pytest.mark.parametrize(("adam_w_mode", "theirs"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_follows_torch(adam_w_mode, theirs):
    ours, p = make(adam_w_mode=adam_w_mode, weight_decay=0.1)
    reference, q = make(theirs, weight_decay=0.1)
    scheduler_a = torch.optim.lr_scheduler.LambdaLR(ours, lambda s: 1 / (s + 1))
    scheduler_b = torch.optim.lr_scheduler.LambdaLR(reference, lambda s: 1 / (s + 1))
    for step in range(20):
        train(ours, p, 1, start=step)
        train(reference, q, 1, start=step)
        scheduler_a.step(), scheduler_b.step()
    for a, b in zip(p, q, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_explicit_update_from_a_worker_thread_equals_step():
    """Hyper-parameters are captured when the step is asked for; the learning rate changes before the worker starts."""
    ours, p = make()
    other, q = make()
    train(ours, p, 1)
    jobs: queue.Queue = queue.Queue()
    states = [other.new_state(x) for x in q]
    outs = [torch.zeros(x.numel(), dtype=torch.bfloat16) for x in q]
    gen = torch.Generator().manual_seed(0)
    for x, s, out in zip(q, states, outs, strict=True):
        grad = torch.randn(x.shape, generator=gen) * 4
        jobs.put((x.data, s, grad, hyper_parameters(other.param_groups[0]), 0.25, out))
    other.param_groups[0]["lr"] = 99.0

    def work():
        while not jobs.empty():
            other_job = jobs.get()
            other.update(*other_job, num_threads=1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for a, b, s, out in zip(p, q, states, outs, strict=True):
        assert torch.equal(a, b) and torch.equal(out, b.detach().bfloat16().view(-1)) and s["step"].item() == 1
        assert torch.equal(s["exp_avg"], ours.state[a]["exp_avg"])


def test_state_keys_and_shapes_are_torchs():
    ours, p = make()
    train(ours, p, 2)
    state = ours.state[p[0]]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["exp_avg"].shape == p[0].shape
    theirs, q = make(torch.optim.AdamW)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.state[q[0]]["exp_avg"], state["exp_avg"]) and theirs.state[q[0]]["step"] == 2
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.state[p[0]]["exp_avg_sq"], theirs.state[q[0]]["exp_avg_sq"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_change_nothing_and_are_counted(bad):
    ours, p = make(max_skipped_steps=3)
    train(ours, p, 2)
    before = [x.detach().clone() for x in p], copy.deepcopy(ours.state_dict())
    p[1].grad[3] = bad
    ours.step()
    assert ours.last_step_skipped and ours.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before[0], p, strict=True))
    after = ours.state_dict()
    for k in before[1]["state"]:
        assert all(torch.equal(before[1]["state"][k][n], after["state"][k][n]) for n in after["state"][k])
    train(ours, p, 1)
    assert not ours.last_step_skipped and ours.skipped_in_a_row == 0
    p[0].grad[0, 0] = bad
    ours.step(), ours.step()
    with pytest.raises(OptimizerError, match="3 steps in a row had NaN or infinite gradients"):
        ours.step()
    assert ours.skipped_steps == 4
    never, q = make(max_skipped_steps=None)
    q[0].grad = torch.full_like(q[0], bad)
    for _ in range(6):
        never.step()
    assert never.skipped_steps == 6


def test_half_precision_and_strided_parameters():
    ours, p = make(dtype=torch.bfloat16)
    train(ours, p, 3)
    assert p[0].dtype == torch.bfloat16 and ours.state[p[0]]["exp_avg"].dtype == torch.float32
    base = torch.randn(6, 5)
    strided = torch.nn.Parameter(base.clone().t())
    dense = torch.nn.Parameter(base.t().contiguous())
    a, b = FusedAdamW([strided]), FusedAdamW([dense])
    strided.grad, dense.grad = torch.ones(5, 6).t().contiguous().t(), torch.ones(5, 6)
    a.step(), b.step()
    assert torch.equal(strided, dense)


def test_saving_and_continuing_is_bit_exact():
    for how in (lambda o: copy.deepcopy(o.state_dict()), lambda o: pickle.loads(pickle.dumps(o.state_dict()))):
        a, p = make()
        train(a, p, 3)
        b, q = make()
        b.load_state_dict(how(a))
        with torch.no_grad():
            for x, y in zip(q, p, strict=True):
                x.copy_(y)
        train(a, p, 3, start=3), train(b, q, 3, start=3)
        assert all(torch.equal(x, y) for x, y in zip(p, q, strict=True))


def test_deepcopy_of_the_optimizer():
    a, p = make(max_skipped_steps=5)
    train(a, p, 2)
    b = copy.deepcopy(a)
    assert b.max_skipped_steps == 5
    q = b.param_groups[0]["params"]
    train(a, p, 2, start=2), train(b, q, 2, start=2)
    assert all(torch.equal(x, y) for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lr=-1), "lr is -1"),
        (dict(lr=float("nan")), "lr is nan"),
        (dict(lr="auto"), "lr is 'auto'"),
        (dict(betas=(0.9,)), "two numbers"),
        (dict(betas=(0.9, 1.0)), "two numbers"),
        (dict(eps=-1e-8), "eps is -1e-08"),
        (dict(weight_decay=-0.1), "weight_decay is -0.1"),
        (dict(max_skipped_steps=0), "max_skipped_steps is 0"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        FusedAdamW([torch.nn.Parameter(torch.zeros(3))], **options)


def test_what_cannot_be_stepped_is_refused():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    p.grad = torch.zeros_like(p)
    with pytest.raises(ConfigError, match=r"a parameter is torch.float64"):
        FusedAdamW([p]).step()
    q = torch.nn.Parameter(torch.zeros(4, 2))
    q.grad = torch.zeros(4, 2).to_sparse()
    with pytest.raises(ConfigError, match="sparse gradients"):
        FusedAdamW([q]).step()


def test_loading_something_else_is_refused_before_anything_changes():
    a, p = make()
    train(a, p, 1)
    before = copy.deepcopy(a.state_dict())
    sgd = torch.optim.SGD(p, lr=1.0, momentum=0.9)
    sgd.step()
    with pytest.raises(ConfigError, match="momentum_buffer"):
        a.load_state_dict(sgd.state_dict())
    amsgrad = torch.optim.AdamW(p, amsgrad=True)
    amsgrad.step()
    with pytest.raises(ConfigError, match="AMSGrad"):
        a.load_state_dict(amsgrad.state_dict())
    fewer, q = make(shapes=((33, 40),))
    train(fewer, q, 1)
    with pytest.raises(ConfigError, match=r"groups of \[1\] parameters, this one has \[2\]"):
        a.load_state_dict(fewer.state_dict())
    smaller, q = make(shapes=((33, 39), (7,)))
    train(smaller, q, 1)
    with pytest.raises(ConfigError, match=r"is for \[1287\] elements, the parameter has 1320"):
        a.load_state_dict(smaller.state_dict())
    assert torch.equal(before["state"][0]["exp_avg"], a.state_dict()["state"][0]["exp_avg"])
