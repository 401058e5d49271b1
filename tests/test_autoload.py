"""Activation without an edit: import order, switches, and hooks that fail without taking a run down.

Stand-ins for torch and DeepSpeed keep this fast and let the tests break the hooks; `test_real_*` use the real packages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

# torch loads the entry points of its group at the end of its own import (torch/__init__.py, _import_device_backends).
FAKE_TORCH = """
import os
from importlib.metadata import entry_points
if os.getenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    for point in entry_points(group="torch.backends"):
        if point.value.startswith("lazytrain_ds"):
            point.load()()
"""
FAKE_DEEPSPEED = """
import torch
import sys, types
def initialize(args=None, model=None, config=None, config_params=None):
    return "stock"
class Init:
    def __init__(self, module=None, config_dict_or_path=None, config=None):
        self.seen = config_dict_or_path
runtime = types.SimpleNamespace(zero=types.SimpleNamespace(partition_parameters=types.SimpleNamespace(Init=Init)))
"""
BROKEN_HOOK = "import sys; sys.modules['lazytrain_ds.runtime.hooks'] = None\n"
IS_HOOKED = "import deepspeed; print(hasattr(deepspeed.initialize, '__wrapped__'))"


@pytest.fixture
def fake_packages(tmp_path: Path, repository: Path) -> Path:
    """A directory with stand-ins for torch and deepspeed, and our entry points as an installed package has them."""
    for name, source in (("torch", FAKE_TORCH), ("deepspeed", FAKE_DEEPSPEED)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    lines = [
        f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in points.items())
        for group, points in project["entry-points"].items()
    ]
    metadata = tmp_path / "lazytrain_ds-0.0.0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lazytrain-ds\nVersion: 0.0.0\n")
    return tmp_path


@pytest.fixture
def python(fake_packages: Path, child_environment: dict[str, str]):
    """Run code with the stand-ins importable; returns (stdout, stderr) of a run that must exit with 0."""

    def run(code: str, *flags: str, **variables: str) -> tuple[str, str]:
        environment = {**child_environment, **variables}
        environment["PYTHONPATH"] = f"{fake_packages}:{environment['PYTHONPATH']}"
        done = subprocess.run([sys.executable, *flags, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr.strip()

    return run


@pytest.mark.parametrize(
    "first",
    [
        "import torch",
        "import deepspeed",  # imports torch in its first lines: our hook arrives halfway
        "import lazytrain_ds",
        "import deepspeed; import lazytrain_ds",
        "import importlib.util; importlib.util.find_spec('deepspeed')",
    ],
)
def test_every_import_order_ends_hooked(python, first: str) -> None:
    assert python(f"{first}\n{IS_HOOKED}") == ("True", "")


def test_names_imported_right_after_deepspeed_are_the_hooked_ones(python) -> None:
    out, _ = python(
        "from deepspeed import initialize; import deepspeed; print(initialize is deepspeed.initialize, "
        "hasattr(initialize, '__wrapped__'))"
    )
    assert out == "True True"


def test_spec_of_deepspeed_is_an_ordinary_one_afterwards(python) -> None:
    out, _ = python("import deepspeed; print(type(deepspeed.__spec__).__name__, deepspeed.__spec__._initializing)")
    assert out == "ModuleSpec False"


def test_explicit_import_works_without_the_entry_point(python) -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert python(IS_HOOKED, **off)[0] == "False"
    assert python(f"import lazytrain_ds\n{IS_HOOKED}", **off)[0] == "True"


@pytest.mark.parametrize("value", ["0", "false", "OFF"])
def test_switch_turns_everything_off(python, value: str) -> None:
    code = f"import torch, lazytrain_ds, sys\n{IS_HOOKED}; print('lazytrain_ds.runtime.hooks' in sys.modules)"
    assert python(code, LAZYTRAIN_AUTOLOAD=value) == ("False\nFalse", "")


def test_import_is_light_fast_and_clean(python) -> None:
    code = (
        "import time, sys; start = time.perf_counter(); import lazytrain_ds; spent = time.perf_counter() - start\n"
        "print(spent, sorted({'torch', 'deepspeed', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(3):  # the fastest counts: another process may have had the processor
        out, err = python(code, "-W", "error")
        spent, _, heavy = out.partition(" ")
        assert (heavy, err) == ("[]", "")
        seconds.append(float(spent))
    assert min(seconds) < 0.3


def test_deepspeed_that_fails_to_import_keeps_its_own_error_and_can_be_retried(python, fake_packages: Path) -> None:
    package = fake_packages / "deepspeed" / "__init__.py"
    package.write_text("import torch, os\nif 'FAIL' in os.environ: raise RuntimeError('theirs')\n" + FAKE_DEEPSPEED)
    code = (
        "import os; os.environ['FAIL'] = '1'\n"
        "try:\n    import deepspeed\nexcept RuntimeError as error:\n    print(error)\n"
        f"del os.environ['FAIL']\n{IS_HOOKED}"
    )
    assert python(code) == ("theirs\nTrue", "")


def test_broken_hook_breaks_no_import_and_no_run_without_the_block(python) -> None:
    code = BROKEN_HOOK + (
        "import torch, deepspeed\n"
        "for block in ({}, {'lazytrain': None}, {'lazytrain': False}, {'lazytrain': {'enabled': False}}):\n"
        "    print(deepspeed.initialize(config=block))\n"
        "print(deepspeed.initialize(config='/no/such/file'), deepspeed.initialize())"
    )
    out, err = python(code)
    assert out == "stock\n" * 4 + "stock stock"
    assert len(err.splitlines()) == 1
    assert "could not hook DeepSpeed" in err
    assert 'without a "lazytrain" block are not affected' in err


def test_broken_hook_refuses_every_way_to_pass_a_config_with_the_block(python, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    code = BROKEN_HOOK + (
        f"import deepspeed, json, types; path = {str(path)!r}\n"
        "for block in (True, {}, {'device_memory': '1GB'}, 'auto'):\n"
        "    config = {'lazytrain': block}\n"
        "    json.dump(config, open(path, 'w'))\n"
        "    args = types.SimpleNamespace(deepspeed_config=path)\n"
        "    ways = [dict(config=config), dict(config_params=config), dict(config=path), dict(args=args)]\n"
        "    for way in ways:\n"
        "        try: deepspeed.initialize(**way)\n"
        "        except Exception as error:\n"
        "            print(type(error).__name__, type(error.__cause__).__name__, 'not hook DeepSpeed' in str(error))"
    )
    assert python(code)[0].splitlines() == ["UnsupportedError ModuleNotFoundError True"] * 16


def test_failure_of_the_finder_itself_is_remembered(python) -> None:
    code = (
        "import lazytrain_ds.autoload as autoload\n"
        "def fail(spec): raise RuntimeError('boom')\n"
        "autoload._hook_when_loaded = fail\n"
        "import torch, deepspeed\n"
        "print(autoload.failure(), deepspeed.initialize(config={}))"
    )
    out, err = python(code)
    assert out == "boom stock"
    assert len(err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import torch", "import deepspeed", "import lazytrain_ds"])
def test_real_packages_are_hooked_in_every_import_order(child_environment: dict[str, str], first: str) -> None:
    code = (
        f"{first}\nimport lazytrain_ds, deepspeed\n"
        "hooked = [hasattr(f, '__wrapped__') for f in (deepspeed.initialize, deepspeed.zero.Init.__init__)]\n"
        "print('HOOKED', *hooked)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=child_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "HOOKED True True" in done.stdout
