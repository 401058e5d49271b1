"""The device runs out of memory in the middle of a micro-batch: the run goes on under a safer plan, bit for bit.

Injected failures on the plain CPU (torch's own error, in any block, forward or backward), and the emulated device's
cap. The model draws from Python's, numpy's and torch's generators and changes buffers in its forward.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import weakref
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lazytrain_ds.errors import DeviceMemoryError
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.simulator import Simulator
from lazytrain_ds.runtime import ladder
from lazytrain_ds.runtime.ladder import changes, safer_plans
from tests.integration.training import Result, config, engine_of, plan_block, rule_block, train

WIDTH, LENGTH, ROWS = 32, 256, 2
STEPS = 3


class Block(nn.Module):
    def __init__(self, owner: list, index: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.owner, self.index = owner, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        model = self.owner[0]
        inside = self.norm(x.transpose(1, 2)).transpose(1, 2) * (0.5 + random.random() + numpy.random.random())
        y = x + F.dropout(self.down(F.gelu(self.up(inside))), 0.1, self.training)
        model.fail("forward", self.index)
        if y.requires_grad:
            y.register_hook(lambda gradient: model.fail("backward", self.index))
        return y


class Model(nn.Module):
    """`failures`: (micro-step, "forward" or "backward", block, how often that was reached before).

    `micro_step` and `engine` are set by the test: planning runs the forward as well, and does not fail.
    """

    def __init__(self, failures: list[tuple[int, str, int, int]] | None = None) -> None:
        super().__init__()
        self.failures = list(failures or [])
        self.reached: dict[tuple[int, str, int], int] = {}
        self.micro_step = 0
        self.engine: list[Any] = []
        self.entry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        owner = [self]
        self.blocks = nn.ModuleList(Block(owner, index) for index in range(5))
        self.register_buffer("seen", torch.zeros(1))

    @property
    def runs(self) -> bool:
        return bool(self.engine) and self.engine[0]()._lt_micro_step_open

    def fail(self, phase: str, block: int) -> None:
        if not self.runs or torch.is_grad_enabled() != (phase == "forward"):
            return  # planning, or a forward that is re-run for a dropped boundary
        place = (self.micro_step, phase, block)
        times = self.reached.get(place, 0)
        self.reached[place] = times + 1
        if (*place, times) in self.failures:
            self.failures.remove((*place, times))
            raise torch.OutOfMemoryError("injected")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.mean()
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@contextlib.contextmanager
def engine_with(model, accumulation=1, **block):
    block = {"sequence_length": LENGTH, "replan": False, **block}
    with engine_of(model, config(block, "fp32", accumulation)) as engine:
        model.engine.append(weakref.ref(engine))
        yield engine
        model.engine.clear()


def keep_all(directory):
    return {"report_dir": str(directory), **rule_block("keep_all")}


def calls(count):
    generators = [torch.Generator().manual_seed(step) for step in range(count)]
    return [{"x": torch.randn(ROWS, LENGTH, WIDTH, generator=generator)} for generator in generators]


def run(block, accumulation=1, failures=None, look=None, steps=STEPS):
    """(result, buffers at the end, what all generators say next)."""
    torch.manual_seed(0)
    model = Model(failures)
    with engine_with(model, accumulation, **block) as engine:
        torch.manual_seed(7)
        random.seed(8)
        numpy.random.seed(9)
        parts = []
        for number, call in enumerate(calls(steps * accumulation)):
            model.micro_step = number
            parts.append(train(engine, [call]))
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if look is not None:
            look(engine)
    result = Result([p.losses[0] for p in parts], [g for p in parts for g in p.gradients], parts[-1].weights)
    assert not model.failures
    return result, buffers, (random.random(), numpy.random.random(), torch.rand(1).item())


_references: dict[int, tuple] = {}


def reference(accumulation):
    if accumulation not in _references:
        _references[accumulation] = run(rule_block("keep_all"), accumulation)
    return _references[accumulation]


def assert_same(one, other):
    one[0].assert_identical(other[0])
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    assert one[2] == other[2]


CASES = {
    "forward": [(0, "forward", 2, 0)],
    "forward, twice": [(1, "forward", 0, 0), (1, "forward", 4, 0)],
    "backward": [(0, "backward", 4, 0)],
    "backward, nearly over": [(1, "backward", 0, 0)],
    "backward, its second forward, a later forward": [
        (1, "backward", 2, 0),
        (1, "forward", 2, 1),
        (2, "forward", 1, 0),
    ],
    "backward, twice": [(1, "backward", 3, 0), (1, "backward", 1, 0)],
}


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("case", list(CASES))
def test_a_micro_batch_that_ran_out_of_memory_runs_again_exactly(case, accumulation, capsys):
    expected = reference(accumulation)
    plans = []
    got = run(
        rule_block("keep_all"), accumulation, CASES[case], look=lambda engine: plans.append(engine.lazytrain_plan)
    )
    assert_same(got, expected)
    lines = [line for line in capsys.readouterr().out.splitlines() if "out of device memory" in line]
    assert len(lines) == len(CASES[case]) and all("runs again under a safer plan (ladder" in line for line in lines)
    assert all(" -> " in line.partition("): block")[2] for line in lines), lines
    assert plans[0].origin.startswith("ladder")


def test_the_second_attempt_may_keep_parameters_that_the_first_one_streamed(monkeypatch):
    """No update has come in between: what a block's new slot gets is copied all the same."""

    def residents(instance, plan):
        return [replace(plan, blocks=tuple(replace(block, parameter_tier="device") for block in plan.blocks))]

    monkeypatch.setattr(ladder, "safer_plans", residents)
    streamed = rule_block("megatrain")
    plans = []
    got = run(streamed, 1, [(0, "backward", 1, 0)], look=lambda engine: plans.append(engine.lazytrain_plan))
    assert {block.parameter_tier for block in plans[0].blocks} == {"device"}
    assert_same(got, run(streamed))


@pytest.mark.parametrize("rule", ["checkpoint_all", "megatrain"])
def test_blocks_that_draw_from_pythons_and_numpys_generators_are_recomputed_exactly(rule):
    assert_same(run(rule_block(rule)), reference(1))


def test_the_failed_attempt_is_gone_when_the_second_one_begins():
    """Nothing may hold the first attempt's activations: the second one needs their place."""
    alive = []

    class Watching(Model):
        def forward(self, x):
            if self.runs:
                gc.collect()
                tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
                alive.append(sum(each.grad_fn is not None for each in tensors))
            return super().forward(x)

    torch.manual_seed(0)
    model = Watching([(1, "forward", 4, 0), (2, "backward", 0, 0)])
    with engine_with(model, **rule_block("keep_all")) as engine:
        for number, call in enumerate(calls(3)):
            model.micro_step = number
            loss = engine(**call)
            engine.backward(loss)
            engine.step()
            del loss
    assert len(alive) == 5
    # Of the interrupted backward the script's own loss is left; of the interrupted forward nothing.
    assert alive[2] <= alive[1] and alive[4] <= alive[3] + 3, alive


# -- the emulated device's cap -------------------------------------------------------------------------------------
EMULATED = {"emulate": {"memory": "1GB", "h2d": "2GB/s", "d2h": "2GB/s"}}


def emulated(memory: int) -> dict:
    return {"device": {"emulate": {**EMULATED["emulate"], "memory": memory}}}


def test_a_plan_forced_over_the_cap_recovers_by_the_ladder(tmp_path, capsys):
    seen = []

    def look(engine):
        seen.append((engine.lazytrain_plan, engine.lazytrain_instance, engine._lt_book.device.ledger.peak_bytes))

    expected = run({**rule_block("keep_all"), "device": EMULATED}, 2, look=look)
    plan, _, peak = seen[0]
    cap = peak // 2
    got = run(plan_block(plan, tmp_path, **emulated(cap)), 2, look=look)
    assert_same(got, expected)
    assert seen[1][2] <= cap
    assert "out of device memory in a forward" in capsys.readouterr().out


def test_when_the_ladder_ends_need_and_have_are_named(tmp_path):
    plans = []
    run(
        {**rule_block("keep_all"), "device": EMULATED}, look=lambda engine: plans.append(engine.lazytrain_plan), steps=1
    )
    with pytest.raises(
        DeviceMemoryError, match=r"no safer plan is left: this one needs .*B by its .* 160 kB are there"
    ):
        run(plan_block(plans[0], tmp_path, **emulated(160_000)), steps=1)


# -- where it cannot run again -------------------------------------------------------------------------------------
def test_a_loss_made_outside_the_model_leaves_a_plan_for_the_restart(tmp_path):
    model = Model([(0, "backward", 3, 0)])
    with engine_with(model, **keep_all(tmp_path)) as engine:
        output = engine(**calls(1)[0])
        with pytest.raises(
            DeviceMemoryError, match="cannot be run again, because the loss was computed outside"
        ) as caught:
            engine.backward(output * 2)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        path = next(tmp_path.glob("safer-plan-*.json"))
        assert f'"plan_file": "{path}"' in str(caught.value)
        plan, before = Plan.from_json(path.read_text()), engine.lazytrain_plan
        simulator = Simulator(engine.lazytrain_instance)
        assert simulator.run(plan).peaks["device"] < simulator.run(before).peaks["device"]
        del output
    run({"plan_file": str(path)})


def test_arguments_that_were_overwritten_are_not_run_again(tmp_path):
    model = Model([(0, "backward", 3, 0)])
    with engine_with(model, **keep_all(tmp_path)) as engine:
        call = calls(1)[0]
        loss = engine(**call)
        call["x"].zero_()
        with pytest.raises(DeviceMemoryError, match="what was passed to the model has been overwritten"):
            engine.backward(loss)


def test_another_forward_that_waits_for_its_backward_would_be_lost(tmp_path):
    with engine_with(Model([(0, "backward", 3, 0)]), **keep_all(tmp_path)) as engine:
        first = engine(**calls(1)[0])
        with pytest.raises(DeviceMemoryError, match="an earlier forward still waits for its backward"):
            engine.backward(engine(**calls(2)[1]))
        del first


def test_a_forward_that_is_not_a_function_of_what_is_put_back_is_refused(tmp_path):
    class Counting(Model):
        count = 0

        def forward(self, x):
            self.count += 1
            return super().forward(x) * self.count

    refusal = pytest.raises(DeviceMemoryError, match=r"its loss is .* the second time, not .* depends on more than")
    with engine_with(Counting([(0, "backward", 3, 0)]), **keep_all(tmp_path)) as engine, refusal:
        engine.backward(engine(**calls(1)[0]))


def test_other_errors_pass_untouched(tmp_path):
    class Broken(Model):
        def forward(self, x):
            raise RuntimeError("mine")

    with engine_with(Broken(), **keep_all(tmp_path)) as engine, pytest.raises(RuntimeError, match=r"^mine$"):
        engine(**calls(1)[0])


# -- the ladder itself ---------------------------------------------------------------------------------------------
def test_every_rung_needs_less_and_says_what_changed():
    model = Model()
    with engine_with(model) as engine:
        engine.backward(engine(**calls(1)[0]))
        engine.step()
        instance, plan = engine.lazytrain_instance, engine.lazytrain_plan
    rungs = safer_plans(instance, plan)
    simulator = Simulator(instance)
    peaks = [simulator.run(each).peaks["device"] for each in (plan, *rungs)]
    assert len(rungs) >= 2 and peaks == sorted(set(peaks), reverse=True)
    for before, after in zip((plan, *rungs[:-1]), rungs, strict=True):
        after.check(instance)
        assert changes(before, after)
        for old, new in zip(before.blocks, after.blocks, strict=True):
            assert old.optimizer.precision == new.optimizer.precision
    assert changes(plan, plan) == ""
    assert json.loads(rungs[-1].to_json())["prediction"]
