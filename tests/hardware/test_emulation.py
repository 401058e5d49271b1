"""The `emulate` section: what it accepts, what it refuses and how, and the machine that it describes."""

from __future__ import annotations

import pytest

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.hardware.emulation import INSTANT, Emulation
from lazytrain_ds.hardware.presets import preset
from tests.workload.machines import machine

LINK = {"memory": "1GB", "h2d": "1GB/s", "d2h": "2GB/s"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"h2d": "fast"}, 'emulate.h2d": .fast. is not a rate'),
        ({"h2d": -1}, "h2d"),
        ({"memory": "lots"}, "emulate.memory"),
        ({"speed": 1}, "emulate.speed.*not a key.*compute"),
        ({"latency": -1.0}, "latency.*number of seconds"),
        ({"latency": True}, "latency"),
        ({"debug": 1}, "debug.*true or false"),
        ({"seed": "x"}, "seed.*whole number"),
        ({"compute": "fast"}, 'compute": .fast. is neither "real", a rate'),
        ({"compute": "3"}, "compute"),
        ({"compute": "-3GFLOPS"}, "compute"),
        ({"compute": 0}, "compute"),
        ({"compute": float("nan")}, "compute"),
        ({"compute": True}, "compute"),
        ({"scale": 0.5}, 'scale" needs a "preset"'),
        ({"preset": "rtx-409"}, "did you mean .rtx-4090"),
        ({"preset": 7}, "preset.*name of a machine"),
        ({"preset": "rtx-4090", "scale": 0}, "scale.*above 0"),
        ({"host": "many"}, "emulate.host"),
    ],
)
def test_a_bad_value_is_refused_with_its_key(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        Emulation.parse({**LINK, **changes})


@pytest.mark.parametrize("missing", ["memory", "h2d", "d2h"])
def test_memory_and_link_are_needed_unless_a_preset_gives_them(missing):
    section = {key: value for key, value in LINK.items() if key != missing}
    with pytest.raises(ConfigError, match=f"needs '{missing}'"):
        Emulation.parse(section)
    assert Emulation.parse({**section, "preset": "a100-40gb"}).memory_bytes > 0


@pytest.mark.parametrize(
    ("compute", "rate"),
    [("3GFLOPS", 3e9), ("2.5 TFLOP/s", 2.5e12), ("7e8 flops", 7e8), ("real", None)],
)
def test_a_rate_of_compute(compute, rate):
    emulation = Emulation.parse({**LINK, "compute": compute})
    assert (emulation.flops_bf16, emulation.flops_fp32, emulation.timed) == (rate, rate, rate is not None)
    played = emulation.apply(machine())
    assert (played.flops_fp32 == rate) is emulation.timed
    assert (played.device_bytes_per_second == INSTANT) is emulation.timed


def test_the_seconds_of_a_block_become_a_rate_once_its_flops_are_known():
    emulation = Emulation.parse({**LINK, "compute": 0.02})
    assert emulation.timed and emulation.apply(machine()).flops_fp32 == machine().flops_fp32
    assert emulation.with_block_flops(10**8).apply(machine()).flops_fp32 == pytest.approx(5e9)


def test_a_scaled_preset_keeps_its_proportions_and_single_keys_replace_its_figures():
    real = preset("rtx-4090", host_memory_bytes=1)
    played = Emulation.parse({"preset": "rtx-4090", "scale": 1e-4, "d2h": "1MB/s"}).apply(machine())
    assert played.device_memory_bytes == pytest.approx(real.device_memory_bytes * 1e-4, rel=1e-6)
    assert played.flops_bf16 / played.h2d.bytes_per_second == pytest.approx(real.flops_bf16 / real.h2d.bytes_per_second)
    assert played.nvme_read.bytes_per_second == pytest.approx(real.nvme_read.bytes_per_second * 1e-4)
    assert played.optimizer_seconds("host", "fp32") == pytest.approx(real.optimizer_seconds("host", "fp32") * 1e4)
    assert played.d2h.bytes_per_second == 1e6


def test_what_the_section_does_not_name_stays_this_machines():
    spec = machine()
    played = Emulation.parse(LINK).apply(spec)
    assert (played.h2d.bytes_per_second, played.d2h.bytes_per_second) == (1e9, 2e9)
    assert (played.nvme_read, played.nvme_write, played.flops_fp32) == (
        spec.nvme_read,
        spec.nvme_write,
        spec.flops_fp32,
    )
    assert played.host_bytes_per_second == spec.host_bytes_per_second
