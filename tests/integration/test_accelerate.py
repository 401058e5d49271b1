"""`accelerate launch` with a YAML file: the DeepSpeed JSON that it names carries the block."""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hugging_face import AUTO_CONFIG, with_block

pytestmark = pytest.mark.integration

# As docs/tested_configs.md shows it.
YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: {path}
  zero3_init_flag: false
num_machines: 1
num_processes: 1
machine_rank: 0
main_training_function: main
main_process_port: {port}
use_cpu: true
"""


def launched(folder: Path, config: dict[str, Any], repository: Path, environment: dict[str, str]) -> tuple[str, list]:
    """(engine's class, losses) of script_accelerate.py."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "ds.json").write_text(json.dumps(config))
    (folder / "accelerate.yaml").write_text(YAML.format(path=folder / "ds.json", port=port))
    launcher = Path(sys.executable).parent / "accelerate"
    script = repository / "tests" / "integration" / "script_accelerate.py"
    command = [str(launcher), "launch", "--config_file", str(folder / "accelerate.yaml"), str(script)]
    done = subprocess.run(
        [*command, str(folder / "saved")],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOSSES "))
    return tuple(json.loads(line.removeprefix("LOSSES ")))  # type: ignore[return-value]


@pytest.mark.parametrize("optimizer", ["named in the config", pytest.param("passed", marks=pytest.mark.slow)])
def test_accelerate_launch_with_a_yaml_file(optimizer, tmp_path, repository, child_environment):
    config = copy.deepcopy(AUTO_CONFIG)
    config["bf16"] = {"enabled": False}
    config["gradient_accumulation_steps"] = 2
    config["optimizer"]["params"].update(betas=[0.9, 0.999], eps=1e-5)  # accelerate fills in rate and decay only
    if optimizer == "passed":
        del config["optimizer"], config["scheduler"]
    ours = launched(tmp_path / "ours", with_block(config), repository, child_environment)
    stock = launched(tmp_path / "stock", config, repository, child_environment)
    assert (ours[0], stock[0]) == ("LazyTrainEngine", "DeepSpeedEngine")
    assert len(ours[1]) == 6
    assert ours[1] == pytest.approx(stock[1], rel=1e-5)


def test_the_documented_yaml_is_the_tested_one(repository):
    shown = YAML.format(path="ds.json", port=29500).replace("use_cpu: true\n", "")
    assert shown in (repository / "docs" / "tested_configs.md").read_text()
