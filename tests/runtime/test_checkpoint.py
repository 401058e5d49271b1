"""Checkpoints: saved under one plan, resumed under another, bit-exactly; an interrupted save destroys nothing."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from lazytrain_ds.runtime import checkpoint
from tests.integration.training import engine_of
from tests.runtime.checkpoint_tools import (
    PLANS,
    Partly,
    assert_equal,
    block_of,
    engine_under,
    everything,
    settings,
    steps,
    wide,
)

pytest.importorskip("deepspeed")


def save_and_go_on(tmp_path, plan, dtype, optimizer, make=wide):
    """Saves after step 3 under `plan`; returns the losses and state of the run that was not interrupted."""
    with engine_under(plan, tmp_path / f"first {plan}", dtype, optimizer, make) as engine:
        steps(engine, 0, 3, dtype)
        engine.save_checkpoint(str(tmp_path / "saved"), tag="three", client_state={"note": 7})
        return steps(engine, 3, 5, dtype), everything(engine)


def resume(tmp_path, plan, dtype, optimizer, make=wide):
    with engine_under(plan, tmp_path / f"then {plan}", dtype, optimizer, make) as engine:
        _, client_state = engine.load_checkpoint(str(tmp_path / "saved"))
        assert client_state["note"] == 7 and engine.global_steps == 3
        return steps(engine, 3, 5, dtype), everything(engine)


@pytest.mark.parametrize(
    ("saved_under", "dtype", "optimizer"),
    [("nvme", "bf16", "fp32"), ("mixed", "fp32", "8bit"), ("host", "bf16", "8bit")],
)
def test_a_resume_under_any_other_plan_is_bit_exact(tmp_path, saved_under, dtype, optimizer):
    losses, state = save_and_go_on(tmp_path, saved_under, dtype, optimizer)
    for plan in ("nvme", "mixed") if saved_under == "host" else ("host", "nvme"):
        again, resumed = resume(tmp_path, plan, dtype, optimizer)
        assert again == losses
        assert_equal(resumed, state)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["fp32", "8bit"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("saved_under", PLANS)
def test_every_pair_of_plans(tmp_path, saved_under, dtype, optimizer):
    losses, state = save_and_go_on(tmp_path, saved_under, dtype, optimizer)
    for plan in PLANS:
        again, resumed = resume(tmp_path, plan, dtype, optimizer)
        assert again == losses
        assert_equal(resumed, state)


def test_frozen_parameters_and_buffers_come_back(tmp_path):
    """Also those that lie on NVMe, in blocks with trained ones and in a block of their own."""
    losses, state = save_and_go_on(tmp_path, "nvme", "bf16", "fp32", Partly)

    def other() -> Partly:
        model = Partly()
        for parameter in model.parameters():
            parameter.data.normal_()
        model.offset.zero_()
        return model

    for plan in ("host", "nvme"):
        again, resumed = resume(tmp_path, plan, "bf16", "fp32", other)
        assert again == losses
        assert_equal(resumed, state)
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved"), "three")
    assert torch.equal(exported["offset"], torch.full((131,), 0.25).bfloat16().float())
    for name in ("entry.bias", "blocks.0.0.weight", "blocks.2.2.bias"):
        assert torch.equal(exported[name], state[f"weight {name}"].float()), name


# -- DeepSpeed's converters ----------------------------------------------------------------------------------------
def to_universal(source: Path, target: Path) -> None:
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    command = ["ds_to_universal", "--input_folder", str(source), "--output_folder", str(target), *workers]
    with mock.patch.object(sys, "argv", command):
        ds_to_universal.main(ds_to_universal.parse_arguments())


def tensors_below(directory: Path) -> dict[str, object]:
    return {
        str(path.relative_to(directory)): torch.load(path, weights_only=False)
        for path in sorted(directory.rglob("*.pt"))
    }


def assert_same_content(one, other, where=""):
    assert type(one) is type(other), where
    if torch.is_tensor(one):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_content(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same_content(a, b, f"{where}/{number}")
    elif type(one).__module__.startswith(("deepspeed", "lazytrain_ds")):
        assert_same_content(vars(one), vars(other), where)
    else:
        assert one == other, where


@pytest.mark.parametrize(("dtype", "optimizer"), [("bf16", "fp32"), ("fp32", "8bit saved as fp32")])
def test_converters_give_what_a_host_only_run_gives(tmp_path, dtype, optimizer):
    exported, universal = {}, {}
    for plan in ("host", "nvme"):
        with engine_under(plan, tmp_path / plan, dtype, optimizer) as engine:
            steps(engine, 0, 3, dtype)
            saved = tmp_path / f"saved {plan}"
            engine.save_checkpoint(str(saved), tag="three")
            state = everything(engine)
        exported[plan] = get_fp32_state_dict_from_zero_checkpoint(str(saved), "three")
        to_universal(saved / "three", saved / "three_universal")
        universal[plan] = tensors_below(saved / "three_universal" / "zero")
    assert_equal(exported["host"], exported["nvme"])
    for name, value in exported["nvme"].items():
        assert torch.equal(value, state[f"master {name}"]), name
    assert_same_content(universal["host"], universal["nvme"])
    moment = universal["nvme"]["blocks.1.0.weight/exp_avg.pt"]
    assert torch.equal(moment.view(131, 131), state["exp_avg blocks.1.0.weight"])


def test_a_universal_checkpoint_loads_under_any_plan(tmp_path):
    losses, state = save_and_go_on(tmp_path, "host", "fp32", "fp32")
    to_universal(tmp_path / "saved" / "three", tmp_path / "saved" / "universal")
    (tmp_path / "saved" / "latest_universal").write_text("universal")
    for plan in ("host", "nvme"):
        config = settings(block_of(plan, tmp_path, "fp32", "fp32"))
        config["checkpoint"] = {"load_universal": True}
        torch.manual_seed(5)
        with engine_of(wide(), config) as engine:
            engine.load_checkpoint(str(tmp_path / "saved"), tag="universal")
            assert steps(engine, 3, 5) == losses
            found = everything(engine)
            for name, value in state.items():
                if torch.is_tensor(value):
                    assert torch.equal(found[name], value), name


@pytest.mark.parametrize("plan", ["host", "nvme"])
def test_weights_alone_can_be_loaded(tmp_path, plan):
    save_and_go_on(tmp_path, "nvme", "fp32", "fp32")
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved"), "three")
    with engine_under(plan, tmp_path / "alone", "fp32", "fp32") as engine:
        steps(engine, 0, 1)
        before = everything(engine)
        engine.load_checkpoint(str(tmp_path / "saved"), load_optimizer_states=False)
        found = everything(engine)
        for name, value in exported.items():
            assert torch.equal(found[f"weight {name}"], value)
            assert torch.equal(found[f"master {name}"], value)
            assert torch.equal(found[f"exp_avg {name}"], before[f"exp_avg {name}"])


# -- the model's state_dict ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_saved_16bit_model_is_whole(tmp_path, dtype):
    files = {}
    for plan in ("host", "nvme"):
        with engine_under(plan, tmp_path / plan, dtype, make=Partly) as engine:
            steps(engine, 0, 2, dtype)
            engine.save_16bit_model(str(tmp_path / plan), "model.bin")
            weights = everything(engine)
        files[plan] = torch.load(tmp_path / plan / "model.bin")
    assert_equal(files["host"], files["nvme"])
    assert set(files["nvme"]) == set(Partly().state_dict())
    for name, value in files["nvme"].items():
        if name != "offset":
            assert torch.equal(value, weights[f"weight {name}"]), name


def test_the_whole_model_can_be_gathered_at_once(tmp_path):
    import deepspeed

    with engine_under("nvme", tmp_path, make=Partly) as engine:
        steps(engine, 0, 2)
        single = everything(engine)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            gathered = {name: value.clone() for name, value in engine.module.state_dict().items()}
        for name, value in gathered.items():
            assert value.numel(), name
            assert name == "offset" or torch.equal(value, single[f"weight {name}"]), name
        # and changed at once
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            for parameter in engine.module.parameters():
                parameter.data.fill_(0.125)
        for name, value in everything(engine).items():
            assert not name.startswith("weight") or bool((value == 0.125).all()), name


# -- interruptions -------------------------------------------------------------------------------------------------
def test_an_interrupted_save_leaves_the_checkpoint_before_it(tmp_path):
    directory = tmp_path / "saved"

    def save(content, fail=False):
        with checkpoint.committed(str(directory), "tag", True, lambda: None) as incomplete:
            (directory / incomplete).mkdir(parents=True)
            (directory / incomplete / "file").write_text(content)
            if fail:
                raise KeyboardInterrupt
        checkpoint.write_latest(str(directory), "tag")

    save("old")
    with pytest.raises(KeyboardInterrupt):
        save("new", fail=True)
    assert (directory / "tag" / "file").read_text() == "old"
    assert (directory / "latest").read_text() == "tag"
    # killed between the two renames
    os.rename(directory / "tag", directory / "tag.replaced")
    checkpoint.recover(str(directory))
    assert (directory / "tag" / "file").read_text() == "old"
    save("newer")
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "tag"]
    assert (directory / "tag" / "file").read_text() == "newer"


@pytest.mark.parametrize("plan", ["host", "nvme"])
def test_a_disk_that_fills_up_during_a_save_costs_nothing(tmp_path, plan, monkeypatch):
    """Saved twice under one tag; the second save fails half-way, training goes on, and the first one resumes."""
    with engine_under(plan, tmp_path / "run") as engine:
        steps(engine, 0, 3)
        engine.save_checkpoint(str(tmp_path / "saved"), tag="three", client_state={"note": 7})
        losses = steps(engine, 3, 4)
        original = torch.save

        def full(state, path, *args, **kwargs):
            if "optim_states" in str(path):
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return original(state, path, *args, **kwargs)

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space left"):
            engine.save_checkpoint(str(tmp_path / "saved"), tag="three", client_state={"note": 8})
        monkeypatch.undo()
        losses += steps(engine, 4, 5)
        state = everything(engine)
    with engine_under("host", tmp_path / "again") as engine:
        _, client_state = engine.load_checkpoint(str(tmp_path / "saved"))
        assert client_state["note"] == 7
        assert steps(engine, 3, 4) + steps(engine, 4, 5) == losses
        assert_equal(everything(engine), state)
        engine.save_checkpoint(str(tmp_path / "saved"), tag="three")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()) == ["three"]
