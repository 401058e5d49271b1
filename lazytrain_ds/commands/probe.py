"""`lazytrain probe`: measure this machine, or list the presets with the source of every figure."""

from __future__ import annotations

import json
from argparse import Namespace

from lazytrain_ds.errors import ConfigError, format_bytes
from lazytrain_ds.hardware.presets import preset_names, preset_sources
from lazytrain_ds.hardware.spec import HardwareSpec


def run(arguments: Namespace) -> int:
    """Print what was measured; 0."""
    from lazytrain_ds.report.screen import STDOUT, screen, write_json

    console = screen()
    console.soft_wrap = True
    console.quiet = arguments.json == STDOUT
    if arguments.list:
        sources = {name: preset_sources(name) for name in preset_names()}
        write_json(arguments.json, sources)
        for name, figures in sources.items():
            console.print(name, style="bold")
            for key, (value, source) in figures.items():
                shown = f"{value:.4g}" if isinstance(value, float) else str(value)
                console.print(f"  {key:<28} {shown:<14} {source}")
        return 0
    if not 0 < arguments.seconds <= 60:
        raise ConfigError(f"--seconds: {arguments.seconds:g} is not between 0 and 60")
    path = arguments.nvme_path
    if path is not None:
        from lazytrain_ds.hardware.nvme import check_nvme_path

        checked = check_nvme_path(path)
        for warning in checked.warnings:
            console.print(f"note: {warning}")
        path = str(checked.path if checked.path.is_dir() else checked.path.parent)

    from lazytrain_ds.hardware.probe import probe
    from lazytrain_ds.runtime.machine import update_seconds

    with console.status("measuring ..."):
        spec = probe(nvme_path=path, refresh=True, budget_seconds=arguments.seconds, optimizer=update_seconds)
    for line in spec_lines(spec, with_nvme=path is not None):
        console.print(line)
    write_json(arguments.json, json.loads(spec.to_json()))
    return 0


def spec_lines(spec: HardwareSpec, *, with_nvme: bool) -> list[str]:
    """A machine in words."""

    def rate(bytes_per_second: float) -> str:
        return f"{format_bytes(bytes_per_second)}/s"

    lines = [
        f"{spec.name} ({spec.kind}), {spec.cores} cores, {spec.instruction_set}",
        f"device memory free   {format_bytes(spec.device_memory_bytes)}",
        f"host memory free     {format_bytes(spec.host_memory_bytes)}",
        f"matmul               {spec.flops_bf16 / 1e12:.3g} TFLOPS bf16, {spec.flops_fp32 / 1e12:.3g} TFLOPS fp32",
        f"memory bandwidth     {rate(spec.device_bytes_per_second)} device, {rate(spec.host_bytes_per_second)} host",
        f"link, both ways busy {rate(spec.h2d.bytes_per_second)} up, {rate(spec.d2h.bytes_per_second)} down",
    ]
    if with_nvme:
        lines.append(
            f"SSD                  {rate(spec.nvme_read.bytes_per_second)} read, "
            f"{rate(spec.nvme_write.bytes_per_second)} write, {format_bytes(spec.nvme_bytes)} free"
        )
    for item in spec.optimizer:
        lines.append(
            f"AdamW on the {item.step_device:<6}  {item.seconds_per_parameter * 1e9:.3g} s per 1e9 parameters, "
            f"{item.precision} states"
        )
    return lines
