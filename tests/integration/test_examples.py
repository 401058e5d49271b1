"""The scripts of examples/: plain DeepSpeed and Hugging Face scripts, run as their docstrings say, with --smoke."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

SCRIPTS = ("train_lm.py", "finetune_hf.py", "lora_nvme.py", "math_accuracy.py")


class Scripts:
    """Runs a script of examples/ in a folder of the test, under the launcher or plain python."""

    def __init__(self, repository: Path, environment: dict[str, str], folder: Path) -> None:
        self.examples, self.environment, self.folder = repository / "examples", environment, folder

    def config(self, name: str, **changes: Any) -> str:
        """A config of examples/configs, changed and written into the folder."""
        config = {**json.loads((self.examples / "configs" / f"{name}.json").read_text()), **changes}
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        return str(path)

    def run(self, script: str, *arguments: str, launcher: bool = False) -> str:
        """Its standard output."""
        start = [sys.executable]
        if launcher:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            start = [str(Path(sys.executable).parent / "deepspeed"), "--master_port", port, "--num_gpus", "1"]
        done = subprocess.run(
            [*start, str(self.examples / script), *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


@pytest.fixture
def scripts(repository: Path, child_environment: dict[str, str], tmp_path: Path) -> Scripts:
    return Scripts(repository, child_environment, tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_examples_know_nothing_of_lazytrain(repository: Path, script: str) -> None:
    assert "lazytrain" not in (repository / "examples" / script).read_text().lower()


def test_every_example_is_listed_here(repository: Path) -> None:
    assert sorted(path.name for path in (repository / "examples").glob("*.py")) == sorted(SCRIPTS)


LOSSES = re.compile(r"evaluation loss: ([\d.]+) at step 3, ([\d.]+) at step 6")


def test_finetune_hf(scripts: Scripts) -> None:
    """From random weights; then from the weights that it saved."""
    text = scripts.folder / "text.txt"
    text.write_text("def main():\n    print('hello')\n" * 400)
    config = scripts.config("hf_auto")
    common = ["--deepspeed", config, "--smoke", "--text", str(text)]
    output = scripts.run("finetune_hf.py", *common, "--output", str(scripts.folder / "first"), launcher=True)
    before, after = map(float, LOSSES.search(output).groups())  # type: ignore[union-attr]
    assert after < before and "[lazytrain] plan" in output and "continued: " in output
    again = ["--model", str(scripts.folder / "first"), "--output", str(scripts.folder / "second"), "--rate", "1e-4"]
    output = scripts.run("finetune_hf.py", *common, *again)
    assert float(LOSSES.search(output)[1]) == pytest.approx(after, rel=0.05)  # type: ignore[index]


def test_lora_nvme(scripts: Scripts) -> None:
    output = scripts.run("lora_nvme.py", "--deepspeed_config", scripts.config("lora_nvme"), "--smoke", launcher=True)
    assert re.search(r"Layer .*\bnvme\b", output), "no row of the plan's table has parameters on NVMe"
    assert "saved adapter" in output
    assert not any((scripts.folder / "swap").rglob("*.swap")), "swap files are left"
    from safetensors.torch import load_file

    adapter = load_file(scripts.folder / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in name and value.numel() > 0 for name, value in adapter.items())
    assert any(bool(value.any()) for name, value in adapter.items() if "lora_B" in name), "nothing was trained"


def test_math_accuracy(scripts: Scripts) -> None:
    configs = [scripts.config(name) for name in ("math_fp32", "math_8bit")]
    output = scripts.run("math_accuracy.py", "--configs", *configs, "--smoke")
    found = re.findall(r"(math_\w+): ([\d.]+) % of 2000 problems solved, last loss ([\d.]+), (\d+) solved", output)
    assert [name for name, *_ in found] == ["math_fp32", "math_8bit"]
    assert found[0][3] == "0"
    losses = [float(loss) for _, _, loss, _ in found]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert max(losses) < 2.6
    assert re.search(r"\b(host|device) 8bit\b", output), "no row of the plan's table has 8-bit states"


@pytest.mark.slow  # minutes: both optimizers until they have learnt it
def test_math_accuracy_parity(scripts: Scripts) -> None:
    configs = [scripts.config(name) for name in ("math_fp32", "math_8bit")]
    output = scripts.run("math_accuracy.py", "--configs", *configs)
    accuracies = [float(value) for value in re.findall(r"math_\w+: ([\d.]+) %", output)]
    assert min(accuracies) > 95 and abs(accuracies[0] - accuracies[1]) < 2


def test_convergence_benchmark_shares_the_task(repository: Path, child_environment: dict[str, str]) -> None:
    """Imports the example's model and problems, and its math task runs."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import convergence; "
        "result = convergence.math_run('fp32', 0, 2); assert len(result['correct']) == 20000"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, env=child_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
