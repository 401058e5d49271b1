"""Phases that take long are said every so often; short ones never; no thread is left."""

from __future__ import annotations

import os
import re
import threading
import time

import pytest

from lazytrain_ds.runtime import progress
from lazytrain_ds.runtime.progress import in_first_step, in_phase, phase, starting


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.05)


def beating():
    return [thread for thread in threading.enumerate() if thread.name == "lazytrain-heartbeat"]


def test_a_long_phase_is_said_and_a_short_one_is_not(capsys):
    started = time.monotonic()
    with phase("loading"):
        time.sleep(0.2)
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= (time.monotonic() - started) / progress.HEARTBEAT_SECONDS
    told = re.compile(r"\[lazytrain\] loading: \d+ s so far, process memory [\d.]+ [kMG]B")
    assert all(told.fullmatch(line) for line in lines)
    with phase("loading"):
        pass
    time.sleep(0.1)
    assert capsys.readouterr().out == ""
    assert not beating()


def test_the_innermost_phase_speaks(capsys):
    with phase("outer"):
        with phase("inner"):
            time.sleep(0.08)
        told = capsys.readouterr().out
        assert "inner" in told and "outer" not in told
        time.sleep(0.12)
        told = capsys.readouterr().out
        assert "outer" in told and "inner" not in told
    assert not beating()


@pytest.fixture
def extensions(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("minutes", [None, 0, 63])
def test_u29_a_start_that_waits_for_a_kernel_says_for_what_and_which_file_to_remove(extensions, capsys, minutes):
    lock = extensions / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    if minutes:
        lock.touch()
        os.utime(lock, (time.time() - 60 * minutes, time.time() - 60 * minutes))
    with starting("deepspeed.initialize"):
        if minutes == 0:  # the run's own build
            lock.touch()
        with phase("inner"):
            time.sleep(0.12)
    told = capsys.readouterr().out
    assert "inner" in told
    assert ("building deepspeed_shm_comm" in told) == (minutes == 0)
    assert ("since 63 minutes" in told and f"rm {lock}\n" in told) == (minutes == 63)
    with phase("later"):
        time.sleep(0.12)
    told = capsys.readouterr().out
    assert "later" in told and "shm_comm" not in told


def test_an_error_ends_the_phase():
    with pytest.raises(ValueError), phase("x"):
        raise ValueError
    assert not beating()


def test_other_ranks_are_silent(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with phase("x"):
        assert not beating()
        time.sleep(0.08)
    assert capsys.readouterr().out == ""


def test_decorators(capsys):
    class Engine:
        global_steps = 0

        @in_first_step("first forward")
        def forward(self, value):
            return beating(), value

        @in_phase("saving")
        def save(self):
            return beating()

    engine = Engine()
    threads, value = engine.forward(3)
    assert threads and value == 3
    assert engine.save()
    engine.global_steps = 1
    assert engine.forward(value=4) == ([], 4)
    assert Engine.forward.__name__ == "forward"


def test_many_phases_in_a_row_and_from_two_threads():
    def work():
        for _ in range(50):
            with phase("a"):
                pass

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert not beating()
