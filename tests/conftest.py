"""Settings every test needs before torch or DeepSpeed is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# DeepSpeed picks its accelerator at import; the suite runs on CPUs.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture
def child_environment() -> dict[str, str]:
    """Environment for child processes: this checkout importable, no launcher variables left over from other tests."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK"}
    environment = {key: value for key, value in os.environ.items() if key not in launcher}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The `deepspeed` launcher and ninja live beside the interpreter.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return environment


@pytest.fixture(autouse=True)
def no_times_of_other_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block times that earlier runs on this machine measured do not enter the plans of tests.

    They would make plans depend on how busy the machine was then. A test that names a cache directory uses it.
    """
    if not {"runtime", "integration"} & set(Path(request.path).parts):
        return
    from lazytrain_ds.hardware.probe import cache_directory
    from lazytrain_ds.workload.measure import MeasuredCache

    for name, nothing in (("load", None), ("store", False)):
        original = getattr(MeasuredCache, name)

        def asked(self, *arguments, original=original, nothing=nothing):
            return nothing if self.directory == cache_directory() else original(self, *arguments)

        monkeypatch.setattr(MeasuredCache, name, asked)


@pytest.fixture(autouse=True, scope="module")
def plain_functional_linear():
    """Each test file begins with torch's own `torch.nn.functional.linear`.

    `zero.Init` and ZeRO-3 put their own in its place and leave it there, which changes what every later test of the
    same process saves for backward.
    """
    from torch.nn import functional

    linear = functional.linear
    yield
    functional.linear = linear
