"""What goes wrong while updates are hidden, and steps that must leave no trace, with everything on NVMe."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from lazytrain_ds.errors import SwapError, WorkerError
from lazytrain_ds.optim.fused_adamw import FusedAdamW
from lazytrain_ds.runtime.swap import NvmeStore
from tests.runtime.test_stage3 import Tower, features, train
from tests.runtime.zero3 import engine_for, full_parameters, zero3_config


def engine_on(store, make=Tower, step="hidden", tier="nvme", accumulation=1, **changes):
    torch.manual_seed(0)
    model = make()
    optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return engine_for(
        model,
        zero3_config(accumulation=accumulation, clip=0.05, **changes),
        1,
        optimizer=optimizer,
        tiers=(tier,),
        states=(tier,),
        nvme=store,
        arrange=lambda plan: replace(plan, optimizer_step=step),
    )


def call(step, scale=1.0):
    return ((features(step) * scale,), {})


def fail_at(engine, block: int, error: Exception) -> None:
    update = engine.optimizer._lt_update_block

    def failing(which, updates):
        if which == block:
            raise error
        update(which, updates)

    engine.optimizer._lt_update_block = failing


def test_a_failed_update_is_raised_at_the_next_call_with_its_cause(tmp_path):
    with NvmeStore(tmp_path) as store:
        engine = engine_on(store)
        train(engine, [call(0)])
        cause = ArithmeticError("a bad sector")
        fail_at(engine, 2, cause)
        train(engine, [call(1)])
        with pytest.raises(WorkerError, match="a bad sector") as caught:
            engine(features(2))
        assert caught.value.__cause__ is cause
        for again in (lambda: engine.optimizer.state_dict(), lambda: engine.optimizer.step()):
            with pytest.raises(WorkerError, match="restart from the last checkpoint") as caught:
                again()
            assert caught.value.__cause__ is cause
        optimizer = engine.optimizer
        with pytest.raises(WorkerError, match="a bad sector"):
            engine.destroy()
        assert optimizer._lt_worker._thread is None, "its thread has ended all the same"
        assert optimizer.lazytrain.device.ledger.live_bytes == 0


def test_a_failed_write_of_states_is_raised_with_path_and_errno(tmp_path):
    with NvmeStore(tmp_path) as store:
        engine = engine_on(store)
        train(engine, [call(0)])
        engine.optimizer.drain()
        write = store.write

        def full(key, tensor):
            if key.startswith("states/3"):
                raise SwapError("NVMe store: no space left, 0 bytes free")
            return write(key, tensor)

        store.write = full
        train(engine, [call(1)])
        with pytest.raises(WorkerError, match="no space left") as caught:
            engine.optimizer.drain()
        assert isinstance(caught.value.__cause__, SwapError)
        with pytest.raises(WorkerError):
            engine.destroy()


@pytest.mark.parametrize("kind", ["states", "parameters"])
def test_a_write_that_fails_behind_its_update_stays_known(tmp_path, monkeypatch, kind):
    """The disk's error comes after the update has ended; whoever looks at the states gets it, each time."""
    with NvmeStore(tmp_path) as store:
        engine = engine_on(store)
        train(engine, [call(0)])
        optimizer = engine.optimizer
        optimizer.drain()
        index = optimizer._lt_layout.sub_groups[-1].index
        key = f"states/{index}" if kind == "states" else optimizer._lt_layout.sub_groups[-1].part.key
        write = store.write

        def short_of_space(key_written, tensor):
            with monkeypatch.context() as patch:
                if key_written == key:
                    patch.setattr(store._backend, "open", lambda *arguments: 1 / 0)
                    ticket = write(key_written, tensor)
                    ticket._finished.wait(30)
                    return ticket
                return write(key_written, tensor)

        store.write = short_of_space
        train(engine, [call(1)])
        for _ in range(2):
            with pytest.raises(WorkerError, match="division by zero"):
                optimizer.drain()
        with pytest.raises(WorkerError):
            engine.destroy()


@pytest.mark.parametrize("step", ["hidden", "serial"])
def test_weights_go_home_ahead_of_the_states_and_two_buffers_do(tmp_path, step):
    """The order that the simulator plays: what the next forward fetches is written first; two staging buffers each."""
    with NvmeStore(tmp_path) as store:
        engine = engine_on(store, step=step)
        train(engine, [call(0)])
        optimizer = engine.optimizer
        optimizer.drain()
        order = []
        write = store.write
        store.write = lambda key, tensor: order.append((key, tensor.data_ptr())) or write(key, tensor)
        train(engine, [call(1)])
        optimizer.drain()
        homes = {group.part.key: f"states/{group.index}" for group in optimizer._lt_layout.sub_groups}
        keys = [key for key, _ in order]
        assert sorted(keys) == sorted([*homes, *homes.values()])
        assert all(keys.index(home) < keys.index(states) for home, states in homes.items())
        assert len({address for key, address in order if key not in homes}) <= 2
        sizes = {}
        for key, address in order:
            if key in homes:
                numel = next(g.part.numel for g in optimizer._lt_layout.sub_groups if g.part.key == key)
                sizes.setdefault(numel, set()).add(address)
        assert all(len(addresses) <= 2 for addresses in sizes.values()), "per size at most two buffers"
        engine.destroy()


def test_the_serial_step_raises_at_once(tmp_path):
    with NvmeStore(tmp_path) as store:
        engine = engine_on(store, step="serial")
        fail_at(engine, 2, ArithmeticError("a bad sector"))
        with pytest.raises(ArithmeticError, match="a bad sector"):
            train(engine, [call(0)])
        engine.destroy()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("step", ["hidden", "serial"])
def test_skipped_steps_leave_states_files_and_schedule_untouched(tmp_path, step, bad):
    """Non-finite gradients in steps 2 and 3 of 6: the result is that of the four others."""
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}}

    def run(numbers):
        with NvmeStore(tmp_path) as store:
            engine = engine_on(store, step=step, accumulation=2, **schedule)
            for number in numbers:
                train(engine, [call(2 * number)])
                engine.optimizer.drain()
                before = (store.bytes_read, store.bytes_written), engine.get_lr()
                train(engine, [call(2 * number + 1, bad if number in (2, 3) else 1.0)])
                engine.optimizer.drain()
                after = (store.bytes_read, store.bytes_written), engine.get_lr()
                if number in (2, 3):
                    assert after[1] == before[1] and after[0][1] == before[0][1], "nothing is written"
                else:
                    assert after[0][1] > before[0][1]
            assert engine.skipped_steps == len({2, 3} & set(numbers))
            result = full_parameters(engine), engine.get_lr(), engine.global_steps - engine.skipped_steps
            engine.destroy()
            return result

    interrupted, clean = run(range(6)), run((0, 1, 4, 5))
    assert interrupted[1:] == clean[1:]
    for name, value in interrupted[0].items():
        assert torch.equal(value, clean[0][name]), name


class Adapted(Tower):
    """Frozen but for a small matrix in every block, as with adapters; one block has nothing to train at all."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.adapters = nn.ParameterList(nn.Parameter(torch.zeros(67)) for _ in range(3))
        for block in self.blocks[:2]:
            block[2].bias.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1 + sum(self.adapters)))


@pytest.mark.parametrize("step", ["hidden", "serial"])
def test_frozen_weights_on_nvme_have_no_state_and_are_never_written_back(tmp_path, step):
    results = []
    for tier in ("nvme", "host"):
        with NvmeStore(tmp_path) as store:
            engine = engine_on(store, Adapted, step, tier)
            optimizer = engine.optimizer
            trained = sum(p.ds_numel for p in engine.module.parameters() if p.requires_grad)
            if tier == "nvme":
                assert sum(place.numbers is not None for place in optimizer._lt_states._disk.values()) > 0
                states = sum(place.byte_count for place in optimizer._lt_states._disk.values())
                assert states <= 12 * trained + 3 * 64 * len(optimizer.fp16_groups)
            else:
                assert sum(m.numel() for m in optimizer.fp32_partitioned_groups_flat) == trained
            written = store.bytes_written
            train(engine, [call(0)])
            optimizer.drain()
            padding = 3 * 64 * len(optimizer.fp16_groups) + 256 * len(optimizer.fp16_groups)
            assert store.bytes_written - written <= (12 + 4) * trained + padding
            assert optimizer._lt_gradients.moved_bytes == 4 * trained
            train(engine, [call(1)])
            results.append(full_parameters(engine))
            engine.destroy()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_a_parameter_that_is_never_used_stays_as_it_is(tmp_path):
    class Spare(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(67, 67)

    with NvmeStore(tmp_path) as store:
        engine = engine_on(store, Spare)
        before = full_parameters(engine)
        train(engine, [call(step) for step in range(3)])
        after = full_parameters(engine)
        for name, value in after.items():
            assert torch.equal(value, before[name]) == name.startswith("spare."), name
        engine.destroy()


def test_every_parameter_frozen_but_one_of_one_element_in_a_directory_of_many_small_files(tmp_path):
    """400 parameters in one group: file names stay short (DeepSpeed joins the ids of a group into one name)."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.ones(1 + number % 3)) for number in range(400))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean() * sum(part.square().sum() for part in self.parts)

    results = []
    for tier in ("nvme", "host"):
        with NvmeStore(tmp_path) as store:
            engine = engine_on(store, Many, tier=tier)
            train(engine, [call(step) for step in range(3)])
            names = [name for _, _, files in os.walk(tmp_path) for name in files]
            assert max(map(len, names), default=0) < 40
            results.append(full_parameters(engine))
            engine.destroy()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
