"""Benchmarks that others rely on: stock's fetch under emulation is stock's, and the GPU script runs without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import executor
from benchmarks.stock_fetch import StockFetch
from lazytrain_ds.hardware.emulation import Emulation
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.workload.blocks import find_blocks

SETTING = replace(executor.SETTINGS[0], name="test", transfer=1.5, forward_seconds=0.020)


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> dict[str, Any]:
    return executor.measure(SETTING, "zero3_offload", "timed", 3, str(tmp_path_factory.mktemp("nvme")))


def losses_of(engine: Any, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(count):
        ids = torch.randint(0, executor.VOCABULARY, (SETTING.rows, executor.LENGTH), generator=generator)
        loss = engine(input_ids=ids, labels=ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained_by_stock() -> list[float]:
    """Checks stock's fetch under emulation; returns the emulated seconds of its steps."""
    steps = 3
    settings = executor.config(SETTING, "stock", "timed", "")
    with executor.engine_of(settings, recompute=True) as engine:
        plain = losses_of(engine, steps)
    # What the blocks cost: an instance of the same model and machine, as a run of ours leaves it.
    instance = executor.instance_of(SETTING, "timed")
    assert Instance.from_json(instance.to_json()) == instance
    emulation = Emulation.parse(SETTING.section("timed"))
    with executor.engine_of(settings, recompute=True) as engine:
        stock = StockFetch(engine, emulation, instance, find_blocks(engine.module))
        with stock.running():
            assert losses_of(engine, steps) == plain
            model_bytes = 4 * sum(parameter.ds_numel for parameter in engine.module.parameters())
            crossed = stock.gathers.moved_bytes / steps
            wall, seconds = executor.train(engine, SETTING.rows, 1, 2, stock.device)
    assert 2 * model_bytes <= crossed <= 3.01 * model_bytes
    compute = sum(
        instance.costs(block, SETTING.rows).forward_seconds + instance.costs(block, SETTING.rows).backward_seconds
        for block in range(instance.block_count)
    )
    assert min(seconds) >= max(compute, crossed / emulation.h2d)
    assert min(wall) >= 0.9 * min(seconds)
    return list(seconds)


def test_stock_fetch_under_emulation_is_stock_and_every_byte_crosses_the_link():
    trained_by_stock()


@pytest.mark.slow  # measures times within a few per cent: needs an idle machine
def test_a_contestant_is_measured_as_predicted_and_hides_no_less_than_stock(ours):
    assert min(trained_by_stock()) >= 0.97 * ours["played"]
    assert ours["played"] == pytest.approx(ours["predicted"], rel=0.1)
    assert ours["step"] >= 0.9 * ours["played"]
    assert ours["peak"] == pytest.approx(ours["predicted_peak"], rel=0.04)
    assert ours["peak"] <= ours["cap"]


def gpu(repository: Path, environment: dict[str, str], output: Path, *arguments: str) -> list[dict[str, Any]]:
    script = repository / "benchmarks" / "gpu.py"
    command = [sys.executable, str(script), "--dry-run", "--output", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.integration
def test_one_run_of_the_gpu_script_on_the_cpu(repository, child_environment, tmp_path):
    run = ["--nvme", str(tmp_path / "nvme"), "--child", "models", "llama-1b", "auto", "40MB"]
    (row,) = gpu(repository, child_environment, tmp_path / "gpu.jsonl", *run)
    assert row["ok"] and row["tokens_per_second"] > 0 and row["predicted_step_seconds"] > 0
    assert row["ledger_peak_bytes"] <= 40e6


@pytest.mark.slow
@pytest.mark.integration
def test_the_whole_gpu_script_on_the_cpu(repository, child_environment, tmp_path):
    rows = gpu(repository, child_environment, tmp_path / "gpu.jsonl")
    exact = {row["plan"]: row["ok"] for row in rows if row["stage"] == "exact" and "plan" in row}
    assert len(exact) >= 11 and all(exact.values())
    assert {row["contestant"] for row in rows if "contestant" in row} >= {"auto", "stock", "megatrain"}
    assert any("hardware" in row for row in rows) and any("versions" in row for row in rows)


@pytest.mark.integration
def test_a_stage_that_fails_is_a_line_and_the_others_go_on(repository, child_environment, tmp_path):
    output = tmp_path / "gpu.jsonl"
    script = repository / "benchmarks" / "gpu.py"
    command = [sys.executable, str(script), "--dry-run", "--output", str(output), "--stages", "kernels", "link"]
    command += ["--seconds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment, timeout=300)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert done.returncode == 1
    assert [row["stage"] for row in rows] == ["environment", "link", "kernels"]
    assert all("left out" in row["error"] for row in rows[1:])
