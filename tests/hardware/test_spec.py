"""HardwareSpec, presets and the probe."""

from __future__ import annotations

import pytest
import torch

from lazytrain_ds.errors import ConfigError, SchemaError
from lazytrain_ds.hardware import probe as probing
from lazytrain_ds.hardware.presets import preset, preset_names, preset_sources
from lazytrain_ds.hardware.spec import HardwareSpec, OptimizerRate


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_complete_and_every_figure_has_a_source(name):
    spec = preset(name, host_memory_bytes=10**12)
    assert HardwareSpec.from_json(spec.to_json()) == spec
    assert spec.flops_bf16 > spec.flops_fp32 > 0
    assert spec.device_memory_bytes >= 24 * 2**30
    for key, (value, source) in preset_sources(name).items():
        assert value, key
        assert len(source) > 8, key


def test_preset_names_are_forgiving_and_typos_answered():
    assert preset("H800_80GB", host_memory_bytes=1).name == "H800"
    with pytest.raises(ConfigError, match='did you mean "rtx-4090"'):
        preset("rtx4090x", host_memory_bytes=1)


def test_optimizer_rate_is_the_measured_one_else_bandwidth():
    spec = preset("h200", host_memory_bytes=1)
    assert spec.optimizer_seconds("host", "fp32") == pytest.approx(30 / spec.host_bytes_per_second)
    assert spec.optimizer_seconds("host", "8bit") < spec.optimizer_seconds("host", "fp32")
    measured = HardwareSpec.from_json(
        spec.to_json().replace('"optimizer": []', '"optimizer": [{"step_device": "host", "precision": "fp32", '
                               '"seconds_per_parameter": 1e-9}]')
    )  # fmt: skip
    assert measured.optimizer == (OptimizerRate("host", "fp32", 1e-9),)
    assert measured.optimizer_seconds("host", "fp32") == 1e-9


def test_caps_replace_capacities():
    spec = preset("h200", host_memory_bytes=100).with_memory(device=5, nvme=7)
    assert (spec.device_memory_bytes, spec.host_memory_bytes, spec.nvme_bytes) == (5, 100, 7)
    with pytest.raises(ConfigError, match="must not be negative"):
        spec.with_memory(host=-1)


def test_a_spec_from_another_version_is_refused():
    text = preset("h200", host_memory_bytes=1).to_json()
    with pytest.raises(SchemaError, match="schema_version"):
        HardwareSpec.from_json(text.replace('"schema_version": 1', '"schema_version": 9'))


def test_probe_measures_caches_and_leaves_the_random_state(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = torch.get_rng_state()
    spec = probing.probe(cache_dir=tmp_path, budget_seconds=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert spec.kind == "cpu"
    assert spec.device_memory_bytes == spec.host_memory_bytes > 0
    assert spec.nvme_bytes == 0
    assert min(spec.flops_bf16, spec.flops_fp32, spec.device_bytes_per_second) > 0
    assert {rate.precision for rate in spec.optimizer} == {"fp32"}
    monkeypatch.setattr(probing, "_probe_cpu", None)  # a second measurement would fail
    again = probing.probe(cache_dir=tmp_path, budget_seconds=0.01)
    assert again.with_memory(device=1, host=1) == spec.with_memory(device=1, host=1)


def test_probe_takes_the_real_kernel_and_a_broken_cache_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def kernel(step_device: str, precision: str, budget: float) -> float | None:
        return {"fp32": 3e-9, "8bit": 2e-9}[precision] if step_device == "host" else None

    first = probing.probe(cache_dir=tmp_path, budget_seconds=0.01, optimizer=kernel)
    assert first.optimizer_seconds("host", "8bit") == 2e-9
    assert first.optimizer_seconds("host", "fp32") == 3e-9
    next(iter(tmp_path.glob("probe-*.json"))).write_text("{")
    again = probing.probe(cache_dir=tmp_path, budget_seconds=0.01, optimizer=kernel)
    assert again.optimizer_seconds("host", "8bit") == 2e-9


def test_probe_without_a_writable_cache_still_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert probing.probe(cache_dir=blocked, budget_seconds=0.01).kind == "cpu"
