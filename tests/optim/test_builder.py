"""Building the kernels: caching, two at once, killed, broken and absent compilers."""

import os
import signal
import stat
import subprocess
import sys
import time
import warnings

import pytest

from lazytrain_ds.optim import builder

COMPILER = builder.find_compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

RUN = """
import torch, sys
from lazytrain_ds.optim import kernels
p, g, m, v = torch.ones(300), torch.ones(300), torch.zeros(300), torch.zeros(300)
kernels.adamw_step_(p, g, m, v, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)
print(kernels.available_isas()[-1], kernels.available_isas()[0], round(p[0].item(), 4))
"""


def run(tmp_path, **env) -> subprocess.Popen:
    full = {**os.environ, "LAZYTRAIN_CACHE_DIR": str(tmp_path), **env}
    return subprocess.Popen(
        [sys.executable, "-c", RUN], env=full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def fake_compiler(tmp_path, compile_body: str, version: str = "1") -> str:
    """A shell script that answers --version, and else runs `compile_body` with $1 set to the output file."""
    path = tmp_path / "fake-compiler"
    find_output = 'while [ "$1" != -o ]; do shift; done; shift'
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) echo {version}; exit 0;; esac\n{find_output}\n{compile_body}\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@needs_compiler
@pytest.mark.slow
def test_two_processes_at_once_build_one_library(tmp_path):
    results = [(*p.communicate(timeout=300), p.returncode) for p in [run(tmp_path), run(tmp_path)]]
    for out, err, code in results:
        assert code == 0, err
        assert out.startswith("torch ") and out.split()[1] != "torch" and out.endswith("0.9\n")
    assert [f.suffix for f in tmp_path.iterdir()] == [".so"]


def test_the_second_call_only_looks_at_the_file(tmp_path):
    calls = tmp_path / "calls"
    compiler = fake_compiler(tmp_path, f'echo x >> {calls}; echo lib > "$1"')
    first = builder.build_library([compiler], tmp_path / "cache")
    assert builder.build_library([compiler], tmp_path / "cache") == first
    assert calls.read_text() == "x\n" and first.read_text() == "lib\n"


def test_another_compiler_version_builds_another_file(tmp_path):
    for version in ("1", "2"):
        compiler = fake_compiler(tmp_path, f'echo {version} > "$1"', version)
        assert builder.build_library([compiler], tmp_path / "cache").read_text() == f"{version}\n"
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_killed_build_leaves_nothing_that_is_loaded(tmp_path):
    slow = fake_compiler(tmp_path, 'echo half > "$1"; exec sleep 60')
    cache = tmp_path / "cache"
    process = run(cache, CXX=slow)
    deadline = time.monotonic() + 120
    while not (cache.exists() and any(f.stat().st_size for f in cache.iterdir())):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [f.suffix for f in cache.iterdir()] == [".tmp"]  # never a library under its final name


@pytest.mark.slow
def test_without_a_compiler_torch_does_it_with_one_warning(tmp_path):
    for env in ({"LAZYTRAIN_NO_COMPILER": "1"}, {"CXX": "/nonexistent/compiler"}):
        process = run(tmp_path, **env)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out == "torch torch 0.9\n"
        assert err.count("RuntimeWarning") == 1 and "no C++ compiler was found" in err


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    broken = fake_compiler(tmp_path, 'echo "error: no space left" >&2; exit 3')
    monkeypatch.setenv("CXX", broken)
    monkeypatch.setenv("LAZYTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    builder.load_library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="exit code 3") as caught:
            assert builder.load_library() is None
        assert "no space left" in str(caught[0].message)
        assert list((tmp_path / "cache").iterdir()) == []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert builder.load_library() is None  # one warning, not two
    finally:
        builder.load_library.cache_clear()


def test_an_unwritable_cache_falls_back_with_a_warning(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("LAZYTRAIN_CACHE_DIR", str(blocker / "below"))
    builder.load_library.cache_clear()
    try:
        if COMPILER is not None:
            with pytest.warns(RuntimeWarning, match="are not available"):
                assert builder.load_library() is None
    finally:
        builder.load_library.cache_clear()
