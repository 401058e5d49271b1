"""The README's example as a user runs it: launcher or plain python, an unchanged script, a config with the block."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

TINY = ("--width", "64", "--heads", "4", "--blocks", "3", "--steps", "6")
RESULT = re.compile(r"validation bits per byte: ([\d.]+) before training, ([\d.]+) after (\d+) steps")


class Example:
    """Runs examples/train_lm.py with a variant of the quickstart config."""

    def __init__(self, repository: Path, environment: dict[str, str], folder: Path) -> None:
        self.repository, self.environment, self.folder = repository, environment, folder

    def config(self, **changes: Any) -> Path:
        config = json.loads((self.repository / "ds_configs" / "quickstart_cpu.json").read_text())
        path = self.folder / "ds.json"
        path.write_text(json.dumps({**config, **changes}))
        return path

    def launch(self, config: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = Path(sys.executable).parent / "deepspeed"
        return self._run([str(launcher), "--master_port", str(port), "--num_gpus", "1"], config, arguments, environment)

    def plain(self, config: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable], config, arguments, environment)

    def _run(self, start: list[str], config: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> Any:
        command = [*start, str(self.repository / "examples" / "train_lm.py"), "--deepspeed_config", str(config)]
        return subprocess.run(
            [*command, *arguments],
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )


@pytest.fixture
def example(repository: Path, child_environment: dict[str, str], tmp_path: Path) -> Example:
    return Example(repository, child_environment, tmp_path)


def result(done: subprocess.CompletedProcess[str]) -> tuple[float, float]:
    found = RESULT.search(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert found is not None, done.stdout[-3000:]
    return float(found[1]), float(found[2])


def test_example_knows_nothing_of_lazytrain(repository: Path) -> None:
    assert "lazytrain" not in (repository / "examples" / "train_lm.py").read_text().lower()


@pytest.mark.slow
def test_quickstart_learns(example: Example) -> None:
    done = example.launch(example.repository / "ds_configs" / "quickstart_cpu.json", OMP_NUM_THREADS="2")
    before, after = result(done)
    assert before - after >= 1.5
    assert "[lazytrain] plan" in done.stdout
    assert "predicted against measured" in done.stdout


@pytest.fixture
def busy_default_port() -> Iterator[None]:
    """Something else listens on DeepSpeed's default port, as a second job on the machine does."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", 29500))
            listener.listen()
        except OSError:
            pass  # it is busy already
        yield


def test_plain_python_needs_neither_launcher_nor_free_default_port(example: Example, busy_default_port: None) -> None:
    done = example.plain(example.config(), *TINY)
    before, after = result(done)
    assert after < before
    assert "[lazytrain] plan" in done.stdout
    asked = reports_of_the_readme(example)
    assert "What binds" in asked and "measured" in asked
    assert (example.folder / "timeline.png").is_file()


def reports_of_the_readme(example: Example) -> str:
    """What the README's commands about the finished run print."""
    readme = (example.repository / "README.md").read_text()
    found = re.search(r"<!-- test: quickstart -->\n```bash\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    done = subprocess.run(
        ["bash", "-euc", found[1]],
        cwd=example.folder,
        env=example.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_block_the_run_is_stock(example: Example) -> None:
    off = example.config(lazytrain=None)
    ours, stock = example.launch(off, *TINY), example.launch(off, *TINY, LAZYTRAIN_AUTOLOAD="0")
    assert result(ours) == result(stock)
    assert "[lazytrain]" not in ours.stdout + ours.stderr


def test_mistake_in_the_block_stops_the_run_with_one_line(example: Example) -> None:
    done = example.launch(example.config(lazytrain={"sequence_lenght": 128}), *TINY)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert 'ConfigError: "lazytrain.sequence_lenght" is not a key; did you mean "lazytrain.sequence_length"?' in output
    assert "During handling of the above exception" not in output


def test_deepspeeds_own_error_is_the_only_one(example: Example) -> None:
    done = example.launch(example.config(zero_optimization={"stage": 3, "aio": {"block_size": 1}}), *TINY)
    assert done.returncode != 0
    assert "Extra inputs are not permitted" in done.stderr
    assert "During handling of the above exception" not in done.stderr
    assert "lazytrain_ds.errors" not in done.stderr
