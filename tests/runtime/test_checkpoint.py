"""Checkpoints: saved under one plan, resumed under another, bit-exactly; an interrupted save destroys nothing."""

from __future__ import annotations

import os

import pytest
import torch

from lazytrain_ds.runtime import checkpoint
from lazytrain_ds.runtime.swap import NvmeStore
from tests.runtime.test_nvme_tiers import Wide, calls, groups, train
from tests.runtime.zero3 import engine_for, full_parameters, zero3_config

pytest.importorskip("deepspeed")


def make_engine(seed, store, dtype="bf16", tiers=("host", "nvme", "device"), optimizer=None):
    torch.manual_seed(0)
    model = Wide()
    optimizer = optimizer or (lambda model: torch.optim.AdamW(groups(model), betas=(0.9, 0.95)))
    return engine_for(model, zero3_config(dtype), seed, optimizer=optimizer(model), nvme=store, tiers=tiers)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_resume_under_another_plan_is_bit_exact(tmp_path, dtype):
    with NvmeStore(tmp_path / "one") as store:
        engine = make_engine(1, store, dtype)
        train(engine, calls(3))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="three")
        rest = train(engine, calls(6)[3:])
        values = full_parameters(engine)
        engine.destroy()
    for seed in (2, 3):
        with NvmeStore(tmp_path / f"two{seed}") as store:
            engine = make_engine(seed, store, dtype)
            engine.load_checkpoint(str(tmp_path / "saved"))
            assert engine.global_steps == 3
            assert train(engine, calls(6)[3:]) == rest
            for name, value in full_parameters(engine).items():
                assert torch.equal(value, values[name]), name
            engine.destroy()


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
