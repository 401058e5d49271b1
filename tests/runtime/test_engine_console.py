"""What a run says: the plan at its start, predicted against measured after five steps; and what it leaves behind."""

from __future__ import annotations

import re

import pytest
import torch

from tests.integration.training import config, engine_of, gpt, loss_of, rule_block, tokens


def steps(engine, count):
    for call in tokens(count):
        engine.backward(loss_of(engine(**call)))
        engine.step()


def said(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(("[lazytrain]", "  "))]


def test_the_plan_is_printed_at_the_start_one_line_per_class_of_blocks(capsys):
    torch.manual_seed(0)
    with engine_of(gpt(), config(rule_block("megatrain"))) as engine:
        lines = said(capsys)
        start = lines.index("[lazytrain] plan (placement) by megatrain:")
        blocks = [line for line in lines[start + 1 :] if line.startswith("  block")]
        assert [re.match(r"  block +(\S+)  (\S+) x(\d+): ", line).groups() for line in blocks] == [
            ("0", "embedding", "1"), ("1", "Block", "1"), ("2-4", "Block", "3"), ("5", "Block", "1"),
            ("6", "head", "1"),
        ]  # fmt: skip
        assert "activations boundary, boundary dropped, parameters host, states host fp32" in blocks[2]
        prediction = lines[start + 1 + len(blocks)]
        instance, predicted = engine.lazytrain_instance, engine.lazytrain_plan.prediction
        found = re.fullmatch(
            r"  predicted step (\S+) s \(1 x micro-batch 2, optimizer serial\), (\d+) % of bound; "
            r"peaks: device (.+) of (.+), host (.+) of (.+)",
            prediction,
        )
        assert float(found[1]) == pytest.approx(predicted.step_seconds, rel=0.01)
        assert int(found[2]) == round(predicted.percent_of_bound)
        from lazytrain_ds.errors import format_bytes

        for number, tier in ((3, "device"), (5, "host")):
            assert found[number] == format_bytes(predicted.peak_bytes(tier))
            assert found[number + 1] == format_bytes(instance.tier(tier).usable_bytes)
        assert not any("activations) by" in line for line in lines)
        steps(engine, 1)
        assert "[lazytrain] plan (activations) by megatrain:" in said(capsys)
        steps(engine, 1)
        assert said(capsys) == [], "a batch of the same size is not planned again, and nothing is said"


def test_predicted_against_measured_after_five_steps_and_only_then(capsys):
    torch.manual_seed(0)
    with engine_of(gpt(), config({}, accumulation=2)) as engine:
        steps(engine, 9)
        assert not any("measured" in line for line in said(capsys))
        steps(engine, 1)
        lines = said(capsys)
        assert lines[0] == "[lazytrain] predicted against measured after 5 steps:"
        step, device, host = lines[1:4]
        predicted, measured = map(float, re.match(r"  step +(\S+) s +(\S+) s", step).groups())
        assert predicted == pytest.approx(engine.lazytrain_plan.prediction.step_seconds, rel=0.01)
        assert 0 < measured < 60
        assert re.match(r"  device +\S+ [kMG]?B +\S+ [kMG]?B", device)
        assert re.match(r"  host +\S+ [kMG]?B +\S+ [kMG]?B \(process\)", host)
        steps(engine, 4)
        assert said(capsys) == []


def test_notes_are_said_once(capsys):
    """A model that names no length: which one the placement was planned for has to be said."""
    torch.manual_seed(0)
    settings = config({})
    del settings["lazytrain"]["sequence_length"]
    with engine_of(gpt(), settings) as engine:
        steps(engine, 2)
        notes = [line for line in said(capsys) if "no sequence length given" in line]
        assert len(notes) == 1 and '"lazytrain.sequence_length"' in notes[0]


def test_destroy_frees_everything_even_with_a_graph_still_alive():
    """Also after an error of the user's: the loss of a step that never had its backward."""
    import threading

    before = {thread.name for thread in threading.enumerate()}
    torch.manual_seed(0)
    with engine_of(gpt(), config(rule_block("keep_all"))) as engine:
        steps(engine, 1)
        loss = loss_of(engine(**tokens(1)[0]))
        ledger = engine._lt_book.device.ledger
        assert ledger.live_bytes > 0
    assert ledger.live_bytes == 0  # `engine_of` asserts it as well
    del loss
    left = {thread.name for thread in threading.enumerate()} - before
    assert not any("lazytrain" in name for name in left), left


def test_an_error_in_the_middle_of_destroy_still_closes_the_rest(monkeypatch):
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="upstream failed"), engine_of(gpt(), config({})) as engine:
        steps(engine, 1)
        closed = []
        monkeypatch.setattr(engine._lt_book, "close", lambda: closed.append(True))
        monkeypatch.setattr(
            type(engine).__mro__[1], "destroy", lambda self: (_ for _ in ()).throw(RuntimeError("upstream failed"))
        )
    assert closed == [True]
