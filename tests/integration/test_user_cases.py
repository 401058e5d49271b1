"""What real users run into (the numbers are the project's list of cases). Models that misbehave: test_zoo.py."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import ConfigError
from tests.integration.training import (
    ADAMW,
    Result,
    config,
    engine_of,
    gpt,
    llama,
    loss_of,
    plan_block,
    rule_block,
    run,
    tokens,
    train,
)
from tests.integration.zoo import LENGTH, WIDTH, Lora, Stack, features
from tests.runtime.zero3 import full_parameters, one_process_group

PLANS = ["keep_all", "megatrain"]


def one_step(engine: Any, call: dict[str, Any], seed: int = 3) -> torch.Tensor:
    torch.manual_seed(seed)
    loss = loss_of(engine(**call))
    engine.backward(loss)
    engine.step()
    return loss.detach().clone()


# -- U33 -----------------------------------------------------------------------------------------------------------
def test_u33_every_key_may_be_auto():
    block = dict.fromkeys(set(LazyTrainConfig.model_fields), "auto")
    block.update(micro_batch="keep", state_precision="fp32", planner="auto", profile="auto")
    run(Stack, config({**block, "sequence_length": "auto"}), features(2)).assert_identical(
        run(Stack, config(rule_block("keep_all")), features(2))
    )


# -- U45 -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", PLANS)
def test_u45_generation_and_evaluation_of_other_shapes_between_steps(rule):
    with engine_of(llama(), config(rule_block(rule))) as engine:
        for step, call in enumerate(tokens(3)):
            one_step(engine, call)
            engine.eval()
            prompt = call["input_ids"][:1, : 5 + step]
            with torch.no_grad():
                for rows in (1, 3, 2):
                    engine(input_ids=call["input_ids"][:1].repeat(rows, 1))
                written = engine.module.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
            assert written.shape == (1, 9 + step)
            engine.train()
        assert engine.global_steps == 3


# -- U49 -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [lambda: gpt(tied=True), lambda: llama(tied=True)], ids=["gpt", "llama"])
def test_u49_a_tied_weight_is_one_copy_with_one_gradient(make):
    torch.manual_seed(0)
    model = make()
    numel = sum(parameter.numel() for parameter in model.parameters())
    with engine_of(model, config(rule_block("megatrain"))) as engine:
        assert engine.lazytrain_instance.parameter_count == numel
        assert sum(flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat) == numel
        call = tokens(1)[0]
        torch.manual_seed(3)
        engine.backward(loss_of(engine(**call)))
        embedding = next(model.parameters())
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(embedding).clone()
        engine.step()
        names = set(engine._zero3_consolidated_16bit_state_dict())
        assert set(make().state_dict()) <= names
    torch.manual_seed(0)
    plain = make().train()
    torch.manual_seed(3)
    loss_of(plain(**call)).backward()
    torch.testing.assert_close(gradient, next(plain.parameters()).grad, rtol=1e-5, atol=1e-7)


# -- U51 -----------------------------------------------------------------------------------------------------------
class MixedBlock(Stack.block):
    """A normalisation that computes in fp32 whatever it gets, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(WIDTH).flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x.float(), (WIDTH,), self.norm.weight.float(), self.norm.bias.float())
        return x + self.down(torch.relu(self.up(y[..., self.order].to(self.up.weight.dtype)))).to(x.dtype)


class Mixed(Stack):
    block = MixedBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.entry.weight.dtype)).float()


MIXED = {
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


@pytest.mark.parametrize("precision", MIXED)
def test_u51_fp32_norms_and_integer_buffers_beside_bf16(precision):
    """DeepSpeed itself makes all parameters one dtype; inside, models mix them."""
    kept = run(Mixed, config(rule_block("keep_all"), **MIXED[precision]), features(3))
    expected = {"bf16": torch.bfloat16, "autocast": torch.float32}[precision]
    assert {weight.dtype for weight in kept.weights.values()} == {expected}
    for rule in ("checkpoint_all_host", "megatrain"):
        run(Mixed, config(rule_block(rule), **MIXED[precision]), features(3)).assert_identical(kept)
    stock = run(Mixed, config(None, **MIXED[precision]), features(3))
    torch.testing.assert_close(torch.stack(kept.losses), torch.stack(stock.losses), rtol=1e-3, atol=0.0)


# -- U53 -----------------------------------------------------------------------------------------------------------
def interleaved_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups in interleaved order, one of them empty, with rates of their own."""
    parameters = list(model.parameters())
    return [
        {"params": parameters[::2], "lr": 1e-3, "weight_decay": 0.1},
        {"params": [], "lr": 1.0},
        {"params": parameters[1::2], "lr": 3e-3, "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("rule", PLANS)
def test_u53_several_parameter_groups_each_with_its_own_rate(rule):
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(interleaved_groups(model), betas=(0.9, 0.95), eps=1e-5)

    torch.manual_seed(0)
    model = Stack()
    settings = config(rule_block(rule), gradient_clipping=0.0)
    del settings["optimizer"]
    with engine_of(model, settings, optimizer=optimizer(model)) as engine:
        torch.manual_seed(7)
        ours = train(engine, features(4))
    torch.manual_seed(0)
    plain = Stack().train()
    plain_optimizer = optimizer(plain)
    torch.manual_seed(7)
    result = Result()
    for call in features(4):
        loss = plain(**call)
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        result.losses.append(loss.detach())
    result.weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    result.assert_close(ours)


# -- U73 -----------------------------------------------------------------------------------------------------------
def test_u73_activation_checkpointing_needs_no_code_and_an_inert_section_is_named(capsys):
    held = {}
    for rule in ("keep_all", "checkpoint_all"):
        section = {"partition_activations": False, "cpu_checkpointing": True}
        with engine_of(Stack(), config(rule_block(rule), activation_checkpointing=section)) as engine:
            one_step(engine, features(1)[0])
            torch.manual_seed(3)
            loss = engine(**features(1)[0])
            counters = engine._lt_activations.counters
            instance = engine.lazytrain_instance
            held[rule] = [counters.held_saved_bytes.get(block, 0) for block in range(1, 5)]
            engine.backward(loss)
        assert capsys.readouterr().out.count('the section "activation_checkpointing" does nothing by itself') == 1
    menus = [instance.costs(block, 2).menu for block in range(1, 5)]
    assert held["keep_all"] == pytest.approx([menu[0].kept_bytes for menu in menus], rel=0.02)
    assert held["checkpoint_all"] == [0, 0, 0, 0]


# -- U75 -----------------------------------------------------------------------------------------------------------
class HalfUsed(Lora):
    """A branch that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("rule", PLANS)
def test_u75_frozen_entry_with_lora_trains_and_parameters_without_gradient_are_named(rule, capsys):
    torch.manual_seed(0)
    model = HalfUsed()
    with engine_of(model, config(rule_block(rule))) as engine:
        before = full_parameters(engine)
        for call in features(3):
            one_step(engine, call)
        after = full_parameters(engine)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == trained - {"unused.weight", "unused.bias"}
    said = [line for line in capsys.readouterr().out.splitlines() if "no gradient in the first step" in line]
    assert len(said) == 1 and "for unused.weight, unused.bias;" in said[0]


# -- U79 -----------------------------------------------------------------------------------------------------------
class Fails(Stack):
    """Raises in the middle of its forward, or in the middle of its backward, when told to."""

    where = ""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2 and self.where == "forward":
                raise torch.OutOfMemoryError("out of memory, says the test")
            if number == 2 and self.where == "backward":
                x.register_hook(self._raise)
        return x

    def _raise(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.where == "backward":
            raise torch.OutOfMemoryError("out of memory, says the test")
        return gradient


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("rule", ["keep_all", "checkpoint_all_host", "megatrain"])
def test_u79_an_exception_that_the_user_catches_leaves_nothing_behind(rule, where):
    calls = features(3)
    with engine_of(Fails(), config(rule_block(rule))) as engine:
        ledger = engine._lt_book.device.ledger
        one_step(engine, calls[0])
        between = ledger.live_bytes
        engine.module.where = where
        with pytest.raises(torch.OutOfMemoryError):
            one_step(engine, calls[1])
        engine.module.where = ""
        engine.optimizer.drain()
        engine.optimizer._lt_store.trim_slots()  # idle ones stay until the next visit of a block; nothing else does
        assert ledger.live_bytes <= between
        assert engine._lt_activations.mover.bytes_in_use == {"host": 0, "staging": 0}
        losses = [one_step(engine, call) for call in calls[1:]]
        assert ledger.live_bytes <= between
        weights = full_parameters(engine)
    assert all(torch.isfinite(loss) for loss in losses)
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize("rule", ["checkpoint_all_host", "megatrain"])
def test_u79_a_caught_exception_in_forward_changes_no_later_step(rule):
    def go(fails: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        with engine_of(Fails(), config(rule_block(rule))) as engine:
            calls = features(3)
            losses = [one_step(engine, calls[0])]
            if fails:
                engine.module.where = "forward"
                with pytest.raises(torch.OutOfMemoryError):
                    engine(**calls[1])
                engine.module.where = ""
            losses += [one_step(engine, call) for call in calls[1:]]
            return losses, full_parameters(engine)

    (losses, weights), (expected, expected_weights) = go(True), go(False)
    assert all(map(torch.equal, losses, expected))
    assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())


class PlainEngine:
    """The engine's interface over plain PyTorch."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), **ADAMW["params"])

    def __call__(self, **call: Any) -> torch.Tensor:
        return self.module(**call)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()


def in_other_ways(engine: Any) -> list[torch.Tensor]:
    """Two forwards then one backward of their sum, two forwards then two backwards in either order, one forward with
    two backwards, the user's own `backward`, and a forward in evaluation mode with a backward."""
    calls = features(9)
    losses = []
    torch.manual_seed(3)

    def stepped(*those: torch.Tensor) -> None:
        engine.step()
        losses.extend(loss.detach().clone() for loss in those)

    loss = engine(**calls[0]) + engine(**calls[1])
    engine.backward(loss)
    stepped(loss)

    for order in (1, -1):
        pair = [engine(**call) for call in calls[2:4]]
        for loss in pair[::order]:
            engine.backward(loss)
        stepped(*pair)

    loss = engine(**calls[6])
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    stepped(loss)

    loss = engine(**calls[7])
    loss.backward()
    stepped(loss)

    engine.eval()
    loss = engine(**calls[8])
    engine.backward(loss)
    stepped(loss)
    engine.train()
    return losses


def test_u79_other_orders_of_forward_and_backward():
    """As plain PyTorch adds up gradients, under every plan. (Stock ZeRO-3 keeps the last of two backwards and cannot
    walk a retained graph again.)"""
    results = []
    for rule in ("keep_all", "checkpoint_all_host", "megatrain"):
        torch.manual_seed(0)
        with engine_of(Stack(), config(rule_block(rule))) as engine:
            losses = in_other_ways(engine)
            results.append(Result(losses, [], full_parameters(engine)))
            assert engine._lt_activations.mover.bytes_in_use == {"host": 0, "staging": 0}
    results[1].assert_identical(results[0])
    results[2].assert_identical(results[0])
    torch.manual_seed(0)
    plain = PlainEngine(Stack())
    losses = in_other_ways(plain)
    weights = {name: parameter.detach() for name, parameter in plain.module.named_parameters()}
    Result(losses, [], weights).assert_close(results[0])


# -- batches of other sizes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["checkpoint_all_host", "megatrain"])
def test_larger_and_smaller_batches_come_and_go(rule, capsys):
    """A larger one is planned anew, a smaller one is not; both are exact."""
    shapes = [(2, LENGTH), (1, LENGTH // 2), (2, 2 * LENGTH), (2, LENGTH), (3, LENGTH)]
    calls = [features(1, rows, length)[0] for rows, length in shapes]
    kept = run(Stack, config(rule_block("keep_all")), calls)
    capsys.readouterr()
    run(Stack, config(rule_block(rule)), calls).assert_identical(kept)
    assert capsys.readouterr().out.count("plan (activations)") == 2


# -- the same seed, the same dropout -------------------------------------------------------------------------------
def test_u80_dropout_masks_are_replayed():
    def make() -> Any:
        return gpt(dropout=0.3, blocks=4)

    kept = run(make, config(rule_block("keep_all")), tokens(2))
    for rule in ("checkpoint_all", "megatrain"):
        run(make, config(rule_block(rule)), tokens(2)).assert_identical(kept)


# -- files ---------------------------------------------------------------------------------------------------------
def test_plan_and_instance_are_left_in_the_report_directory_and_can_be_given_back(tmp_path):
    from lazytrain_ds.planning.instance import Instance
    from lazytrain_ds.planning.plan import Plan

    directory = tmp_path / "reports" / "run"
    seen: list[Any] = []
    settings = config({**rule_block("megatrain"), "report_dir": str(directory)})
    first = run(Stack, settings, features(2), check=lambda e: seen.extend((e.lazytrain_plan, e.lazytrain_instance)))
    plan = Plan.from_json((directory / "plan.json").read_bytes())
    assert [plan, Instance.from_json((directory / "instance.json").read_bytes())] == seen
    assert os.stat(directory).st_mode & 0o777 == 0o700
    again = run(Stack, config({"plan_file": str(directory / "plan.json")}), features(2))
    again.assert_identical(first)


def test_a_plan_file_runs_where_todays_times_would_leave_other_choices_on_the_menus(tmp_path, monkeypatch):
    from lazytrain_ds.workload import menu

    seen: list[Any] = []
    with engine_of(gpt(), config(rule_block("keep_all"))) as engine:
        loss_of(engine(**tokens(1)[0]))
        seen += (engine.lazytrain_plan, engine.lazytrain_instance)
    plan, instance = seen
    names = [choice.name for choice in instance.costs(2, plan.micro_batch).menu]
    assert len(names) > 2
    blocks = [
        replace(block, choice=names[1 + index % (len(names) - 1)], saved_tier="device", boundary="device")
        if 0 < index < plan.block_count - 1
        else block
        for index, block in enumerate(plan.blocks)
    ]
    settings = config(plan_block(replace(plan, blocks=tuple(blocks)), tmp_path))
    monkeypatch.setattr(menu, "_efficient", lambda candidates, keep, last: ())
    torch.manual_seed(0)
    with engine_of(gpt(), settings) as engine:
        torch.manual_seed(7)
        again = train(engine, tokens(2))
        assert [block.choice for block in engine.lazytrain_plan.blocks] == [block.choice for block in blocks]
    torch.manual_seed(0)
    with engine_of(gpt(), config(rule_block("keep_all"))) as engine:
        torch.manual_seed(7)
        again.assert_identical(train(engine, tokens(2)))


def test_a_plan_file_that_is_not_there_or_of_another_model_is_refused(tmp_path):
    from lazytrain_ds.errors import PlanError

    one_process_group()
    with pytest.raises(ConfigError, match="there is no file"), engine_of(Stack(), config({"plan_file": "nowhere"})):
        pass
    run(Stack, config({"report_dir": str(tmp_path)}), features(1))
    other = config({"plan_file": str(tmp_path / "plan.json")})
    with pytest.raises(PlanError, match="has 6 blocks, the model has 7"), engine_of(gpt(), other):
        pass


# -- random numbers ------------------------------------------------------------------------------------------------
def test_planning_draws_no_random_number():
    """Tracing runs the model's code; Python's and torch's generators are where the user's script left them."""

    class Draws(Stack):
        def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
            return super().run_blocks(x * (1 + random.random()) + 0.1 * torch.randn(WIDTH))

    seen: list[Any] = []
    for block in (rule_block("keep_all"), None):
        torch.manual_seed(0)
        model = Draws()
        random.seed(11)
        with engine_of(model, config(block)) as engine:
            torch.manual_seed(7)
            seen.append((one_step(engine, features(1)[0], seed=7), random.random(), torch.get_rng_state()))
    (ours, mine, state), (stock, theirs, other) = seen
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=0.0)
    assert mine == theirs and torch.equal(state, other)
