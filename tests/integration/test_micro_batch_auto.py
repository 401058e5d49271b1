"""`"micro_batch": "auto"`: another micro-batch, the same global batch, for loaders that follow; others are refused."""

from __future__ import annotations

import pytest
import torch

from lazytrain_ds.errors import ConfigError, InfeasibleError
from tests.integration.training import LENGTH, config, engine_of, gpt, loss_of, tokens
from tests.models import batch


def settings(**block):
    values = config({"micro_batch": "auto", "replan": False, "planner": {"time_limit": 0.1}, **block})
    del values["gradient_accumulation_steps"]
    return {**values, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}


def samples(count):
    return [dict.fromkeys(("input_ids", "labels"), batch(step, length=LENGTH, rows=1)[0]) for step in range(count)]


def test_training_data_is_loaded_in_the_chosen_size_and_the_global_batch_is_kept(capsys):
    torch.manual_seed(0)
    with engine_of(gpt(dropout=0.0), settings(), training_data=samples(16)) as engine:
        rows, rounds = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        assert engine.train_batch_size() == rows * rounds == 8 and rows > 1, "one row at a time is never the fastest"
        plan = engine.lazytrain_plan
        assert (plan.micro_batch, plan.rounds) == (rows, rounds)
        assert f'"micro_batch": "auto": {rows} samples x {rounds} accumulation steps, instead of 1 x 8' in (
            capsys.readouterr().out
        )
        sizes = []
        for call in engine.training_dataloader:
            sizes.append(len(call["input_ids"]))
            engine.backward(loss_of(engine(**call)))
            engine.step()
        assert set(sizes) == {rows} and len(sizes) == 16 // rows and engine.global_steps == 2
        assert engine.lazytrain_plan.micro_batch == rows


def test_the_result_is_that_of_the_same_micro_batch_given_by_hand():
    def execute(values):
        torch.manual_seed(0)
        losses = []
        with engine_of(gpt(), values) as engine:
            rows = engine.train_micro_batch_size_per_gpu()
            torch.manual_seed(7)
            for number in range(16 // rows):
                ids = batch(number, length=LENGTH, rows=rows)
                loss = engine(input_ids=ids, labels=ids)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        return rows, losses

    rows, losses = execute(settings())
    values = {**settings(), "train_micro_batch_size_per_gpu": rows}
    values["lazytrain"]["micro_batch"] = "keep"
    assert execute(values) == (rows, losses)


def test_a_small_device_gets_a_small_micro_batch():
    torch.manual_seed(0)
    with engine_of(gpt(), settings()) as engine:
        free = engine.lazytrain_plan
    need = free.prediction.peak_bytes("device")
    block = {"device_memory": need // 2, "activations": "keep_all"}
    with engine_of(gpt(), settings(**block)) as engine:
        assert engine.lazytrain_plan.micro_batch < free.micro_batch
        assert engine.train_batch_size() == 8


def test_a_loader_that_does_not_follow_is_refused_by_name():
    torch.manual_seed(0)
    with engine_of(gpt(), settings()) as engine:
        chosen = engine.train_micro_batch_size_per_gpu()
        assert chosen > 1
        ids = batch(0, length=LENGTH, rows=1)
        refusal = rf'micro_batch": "auto" chose {chosen} samples .* first batch has 1: .* set "micro_batch": "keep"'
        with pytest.raises(ConfigError, match=refusal):
            engine(input_ids=ids, labels=ids)


def test_where_no_size_fits_need_and_have_are_named():
    values = settings(device_memory=100_000, planner={"kind": "checkpoint_all"})
    with (
        pytest.raises(InfeasibleError, match=r"at micro-batch \d+: device: needs .*B, has .*B"),
        engine_of(gpt(), values),
    ):
        pass


def test_keep_keeps():
    values = settings()
    values["lazytrain"]["micro_batch"] = "keep"
    with engine_of(gpt(), values) as engine:
        assert engine.train_micro_batch_size_per_gpu() == 1 and engine.gradient_accumulation_steps() == 8
        engine.backward(loss_of(engine(**{name: each[:1] for name, each in tokens(1)[0].items()})))
        engine.step()
