"""Parameters and states on NVMe: bit-exact against all-host on a real file system, sizes that are not aligned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lazytrain_ds.optim.fused_adamw import FusedAdamW
from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit
from lazytrain_ds.runtime.swap import NvmeStore
from tests.runtime.test_stage3 import assert_same, train
from tests.runtime.zero3 import engine_for, full_parameters, zero3_config

pytest.importorskip("deepspeed")

WIDTH = 515  # 515 x 515 fp32 is 1.06 MB; neither a row nor a bias is a multiple of a disk block


class Wide(nn.Module):
    """Tensors of at least 1 MiB beside ones of 1, 3, 511, 513 and 67 x 211 elements; the first has one element."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))
        self.entry = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(3)
        )
        self.odd = nn.ParameterList(nn.Parameter(torch.full(shape, 0.1)) for shape in ((3,), (511,), (513,), (67, 211)))
        self.head = nn.Linear(width, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x.to(self.first.dtype) * self.first)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().square().mean() + sum(p.float().square().sum() for p in self.odd) * 1e-3


def calls(count: int):
    return [((torch.randn(3, 64, generator=torch.Generator().manual_seed(step)),), {}) for step in range(count)]


def groups(model: nn.Module):
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "weight_decay": 0.1, "lr": 1e-3}, {"params": parameters[1::2], "lr": 3e-3}]


def run(tmp_path, seed, dtype="fp32", accumulation=1, steps=4, optimizer_type=torch.optim.AdamW, **changes):
    torch.manual_seed(0)
    model = Wide()
    optimizer = optimizer_type(groups(model), betas=(0.9, 0.95))
    config = zero3_config(dtype, accumulation, clip=0.01)
    with NvmeStore(tmp_path / "nvme") as store:
        engine = engine_for(model, config, seed, optimizer=optimizer, nvme=store, **changes)
        try:
            losses = train(engine, calls(steps * accumulation))
            values = full_parameters(engine)
            with torch.no_grad():
                engine.eval()
                losses.append(engine(*calls(1)[0][0]).item())
            return losses, values
        finally:
            engine.destroy()


@pytest.mark.parametrize(("dtype", "accumulation"), [("fp32", 1), ("bf16", 4)])
def test_parameters_on_nvme_are_exact(tmp_path, dtype, accumulation):
    reference = run(tmp_path, 0, dtype, accumulation, tiers=("host",))
    for seed, tiers in ((1, ("nvme",)), (2, ("nvme", "host", "device")), (3, ("nvme", "host", "device"))):
        assert_same(run(tmp_path, seed, dtype, accumulation, tiers=tiers), reference)
    plain = run(tmp_path, None, dtype, accumulation)
    assert plain[0] == pytest.approx(reference[0], rel=1e-5 if dtype == "fp32" else 2e-2)


@pytest.mark.parametrize("optimizer_type", [FusedAdamW, HybridAdamW8bit])
@pytest.mark.parametrize(("dtype", "accumulation"), [("fp32", 1), ("bf16", 4)])
def test_states_on_nvme_are_exact(tmp_path, optimizer_type, dtype, accumulation):
    kind = {"optimizer_type": optimizer_type, "dtype": dtype, "accumulation": accumulation}
    reference = run(tmp_path, 0, tiers=("host",), states=("host",), **kind)
    for seed, states in ((1, ("nvme",)), (2, ("nvme", "host", "device")), (3, ("nvme", "host", "device"))):
        assert_same(run(tmp_path, seed, tiers=("nvme", "host"), states=states, **kind), reference)
    if optimizer_type is FusedAdamW and dtype == "fp32":
        plain = run(tmp_path, None, dtype, accumulation)
        assert plain[0] == pytest.approx(reference[0], rel=1e-5)


def test_bytes_through_nvme_per_parameter_and_step(tmp_path):
    torch.manual_seed(0)
    model = Wide()
    count = sum(p.numel() for p in model.parameters())
    with NvmeStore(tmp_path / "nvme") as store:
        optimizer = FusedAdamW(groups(model), betas=(0.9, 0.95))
        engine = engine_for(
            model, zero3_config(), 1, optimizer=optimizer, nvme=store, tiers=("host",), states=("nvme",)
        )
        train(engine, calls(1))
        engine.optimizer.drain()
        before = store.bytes_read + store.bytes_written
        train(engine, calls(3)[1:])
        engine.optimizer.drain()
        moved = store.bytes_read + store.bytes_written - before
        engine.destroy()
    assert moved / 2 / count <= 24 * 1.001


def test_a_changed_gathered_parameter_on_nvme_goes_home(tmp_path):
    import deepspeed

    torch.manual_seed(0)
    with NvmeStore(tmp_path / "nvme") as store:
        engine = engine_for(Wide(), zero3_config(), 1, tiers=("nvme",), nvme=store)
        weight = engine.module.blocks[1][0].weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.fill_(0.25)
        train(engine, calls(1)[:0])
        engine.eval()
        with torch.no_grad():
            engine(*calls(1)[0][0])
        assert torch.equal(full_parameters(engine)["blocks.1.0.weight"], torch.full((WIDTH, WIDTH), 0.25))
        engine.destroy()
