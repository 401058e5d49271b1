"""The directory's life: lock, take-over, and nothing left behind however a run ends."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lazytrain_ds.errors import SwapError
from lazytrain_ds.runtime.swap import NvmeStore, find_orphans, remove_orphans
from lazytrain_ds.runtime.swap.directory import SwapDirectory

ROOT = Path(__file__).parents[2]

PRELUDE = """
import logging, os, signal, sys, time
import torch
from lazytrain_ds.runtime.swap import NvmeStore
logging.basicConfig(level=logging.INFO)
store = NvmeStore(sys.argv[1])
for number in range(4):
    store.write(f"x{number}", torch.ones(300_000))
def ready():
    print("ready", flush=True)
"""


def child(directory: Path, code: str) -> subprocess.Popen[str]:
    """A run of its own that opens a store on `directory`, then does `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(directory)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        # Ctrl-C works in it: a shell's background jobs ignore it, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout.readline() == "ready\n", process.communicate()[1]


def crashed(directory: Path) -> int:
    """Leave what a killed run leaves. Returns its pid."""
    process = child(directory, "store.synchronize(); ready(); time.sleep(100)")
    wait_until_ready(process)
    process.kill()
    process.communicate()
    return process.pid


def test_layout_and_permissions(tmp_path):
    with NvmeStore(tmp_path, name="rank3") as store:
        store.write("x", torch.ones(3)).wait()
        assert store.directory.name == "lazytrain_swap_rank3"
        assert store.directory.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in store.directory.iterdir())
        owner = json.loads((store.directory / "owner.lock").read_text())
        assert owner["pid"] == os.getpid() and owner["host"] == os.uname().nodename and owner["started"]
    assert not any(tmp_path.iterdir())


def test_one_directory_per_rank(tmp_path):
    with NvmeStore(tmp_path, name="rank0") as first, NvmeStore(tmp_path, name="rank1") as second:
        assert first.directory != second.directory
    assert not any(tmp_path.iterdir())
    for name in ("", "a/b", "../x", "x" * 65):
        with pytest.raises(SwapError, match="swap directory name"):
            NvmeStore(tmp_path, name=name)


def test_a_second_store_of_this_process_is_refused(tmp_path):
    with NvmeStore(tmp_path):
        with pytest.raises(SwapError, match=rf"in use by process {os.getpid()} .*this same process"):
            NvmeStore(tmp_path)
        assert not find_orphans(tmp_path)
    with NvmeStore(tmp_path):
        pass


def test_a_second_live_run_is_refused_and_the_first_keeps_its_files(tmp_path):
    process = child(
        tmp_path,
        "ready(); sys.stdin.read\nwhile not os.path.exists(sys.argv[1] + '/go'): time.sleep(0.05)\n"
        "out = torch.zeros(300_000); store.read('x3', out).wait(); assert torch.equal(out, torch.ones(300_000))\n",
    )
    wait_until_ready(process)
    with pytest.raises(SwapError, match=rf"in use by process {process.pid} on {os.uname().nodename} \(started 20"):
        NvmeStore(tmp_path)
    assert find_orphans(tmp_path) == [] and remove_orphans(tmp_path) == []
    (tmp_path / "go").touch()
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 0, error
    assert [path.name for path in tmp_path.iterdir()] == ["go"]


def test_a_killed_run_is_taken_over_and_its_files_removed(tmp_path, caplog):
    pid = crashed(tmp_path / "new")
    root = tmp_path / "new" / "lazytrain_swap_rank0"
    assert len(list(root.glob("*.swap"))) == 4
    theirs = [root / "notes.txt", root / "lt_000000000000_00000001.swap", root / "x.swap"]
    for path in theirs:
        path.write_text("not ours")
    with caplog.at_level(logging.INFO), NvmeStore(tmp_path / "new") as store:
        assert sorted(store.directory.iterdir()) == sorted([*theirs, root / "owner.lock", root / "manifest.json"])
        store.write("x", torch.ones(3)).wait()
    said = [record.getMessage() for record in caplog.records if "took over" in record.getMessage()]
    assert len(said) == 1 and f"process {pid}" in said[0] and "removed 4 swap files, 4.8" in said[0]
    # The directory stays for their sake, and stays ours.
    assert sorted(root.iterdir()) == sorted([*theirs, root / "owner.lock", root / "manifest.json"])
    with NvmeStore(tmp_path / "new"):
        pass
    for path in theirs:
        path.unlink()
    with NvmeStore(tmp_path / "new"):
        pass
    assert not any(tmp_path.iterdir())


def test_a_file_that_cannot_be_removed_is_left_to_the_next_run(tmp_path, monkeypatch):
    real = os.unlink

    def busy(path, **named):
        if str(path).endswith(".swap"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        real(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", busy)
        with NvmeStore(tmp_path) as store:
            store.write("x", torch.ones(3)).wait()
    assert len(list(store.directory.glob("*.swap"))) == 1
    (orphan,) = find_orphans(tmp_path)
    assert orphan.files == 1
    with NvmeStore(tmp_path):
        pass
    assert not any(tmp_path.iterdir())


def test_at_exit_the_threads_stop_before_the_directory_is_given_up(tmp_path):
    """Another module's finalizer, made before our import, must not change the order."""
    code = """
import sys, weakref
class Earlier: pass
weakref.finalize(Earlier(), print)
keep = Earlier(); weakref.finalize(keep, print)
import lazytrain_ds.runtime.swap.directory as directory, lazytrain_ds.runtime.swap.transfers as transfers
for owner, name in ((transfers.Channel, "close"), (directory.SwapDirectory, "close")):
    def spy(self, real=getattr(owner, name), label=owner.__name__):
        if not getattr(self, "_closed", False):
            print(label, flush=True)
        real(self)
    setattr(owner, name, spy)
from lazytrain_ds.runtime.swap import NvmeStore
store = NvmeStore(sys.argv[1])
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.split() == ["Channel", "Channel", "SwapDirectory"], result.stderr


def test_directories_that_the_killed_run_created_go_with_its_successor(tmp_path):
    crashed(tmp_path / "a" / "b")
    with NvmeStore(tmp_path / "a" / "b"):
        pass
    assert not any(tmp_path.iterdir())


def test_orphans_are_found_and_removed(tmp_path):
    pid = crashed(tmp_path)
    (tmp_path / "lazytrain_swap_other").mkdir()
    (tmp_path / "lazytrain_swap_other" / "lt_000000000000_00000001.swap").write_text("no manifest: not ours")
    (found,) = find_orphans(tmp_path)
    assert found.path == tmp_path / "lazytrain_swap_rank0" and found.files == 4 and str(pid) in found.owner
    assert found.size_bytes == 4 * 1_200_128
    assert find_orphans(found.path) == [found]
    assert remove_orphans(tmp_path) == [found]
    assert [path.name for path in tmp_path.iterdir()] == ["lazytrain_swap_other"]
    assert find_orphans(tmp_path) == [] and find_orphans(tmp_path / "missing") == []


def test_a_directory_that_is_not_ours_is_not_touched(tmp_path):
    root = tmp_path / "lazytrain_swap_rank0"
    root.mkdir()
    (root / "lt_000000000000_00000001.swap").write_text("precious")
    with pytest.raises(SwapError, match=r"no manifest.json that we wrote"):
        NvmeStore(tmp_path)
    (root / "manifest.json").write_text("{broken")
    with pytest.raises(SwapError, match=r"no manifest.json that we wrote"):
        NvmeStore(tmp_path)
    assert remove_orphans(tmp_path) == []
    assert (root / "lt_000000000000_00000001.swap").read_text() == "precious"


def test_a_link_instead_of_the_directory_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "lazytrain_swap_rank0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SwapError, match="not a directory of ours"):
        NvmeStore(tmp_path / "nvme")


def test_an_interrupted_start_is_repaired(tmp_path):
    """Killed between mkdir and the manifest: an empty directory, perhaps with a lock file or half a manifest."""
    root = tmp_path / "lazytrain_swap_rank0"
    root.mkdir(mode=0o755)
    (root / "owner.lock").touch()
    (root / "manifest.json.new").write_text("{")
    with NvmeStore(tmp_path) as store:
        assert store.directory.stat().st_mode & 0o777 == 0o700
    assert not any(tmp_path.iterdir())


def test_a_lock_on_a_removed_file_is_not_taken_for_a_lock(tmp_path):
    """The old owner unlinks the lock file while a new run has it open: the new run must lock the new file."""
    first = SwapDirectory.open(tmp_path)
    first.close()
    second = SwapDirectory.open(tmp_path)
    with pytest.raises(SwapError, match="in use"):
        SwapDirectory.open(tmp_path)
    second.close()


ENDINGS = {
    "end": ("", 0),
    "ctrl-c": ("store.write('x0', torch.zeros(300_000)); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -2),
    "sigterm": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -15),
    # The launcher's SIGTERM finds the run removing its files after a Ctrl-C.
    "sigterm while closing": (
        "remove = os.unlink\n"
        "def unlink(path):\n"
        "    os.unlink = remove\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    remove(path)\n"
        "os.unlink = unlink\n"
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
        -15,
    ),
}
MORE_ENDINGS = {  # each takes a child of its own, seconds of imports
    "close": ("store.close()", 0),
    "exception": ("raise RuntimeError('the script fails')", 1),
    "exit": ("sys.exit(3)", 3),
    "sighup": ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(60)", -1),
    "own handler": ("signal.signal(15, lambda *_: sys.exit(7)); os.kill(os.getpid(), 15); time.sleep(60)", 7),
    "dropped": ("del store; time.sleep(0.1)", 0),
}


@pytest.mark.parametrize(
    ("ending", "status"),
    [pytest.param(*case, id=name) for name, case in ENDINGS.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in MORE_ENDINGS.items()],
)
def test_nothing_is_left_behind(tmp_path, ending, status):
    process = child(tmp_path / "nvme", f"ready()\n{ending}")
    error = process.communicate(timeout=120)[1]
    assert process.returncode == status, error
    assert "terminate called" not in error
    assert not any(tmp_path.iterdir())


def test_sigterm_while_a_ticket_is_awaited_and_the_throttle_blocks(tmp_path):
    process = child(
        tmp_path / "nvme",
        "store.synchronize(); store._ledger.throttle = lambda *a: time.sleep(60)\n"
        "ticket = store.write('x0', torch.zeros(300_000)); ready(); ticket.wait()",
    )
    wait_until_ready(process)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM and not any(tmp_path.iterdir())


@pytest.mark.slow
def test_ten_runs_with_transfers_in_flight_end_with_status_zero(tmp_path):
    code = """
ready()
out = [torch.empty(300_000) for _ in range(8)]
for step in range(20):
    tickets = [store.read(f"x{number % 4}", tensor) for number, tensor in enumerate(out)]
    for number in range(4):
        store.write(f"x{number}", out[number])
"""
    for _ in range(10):
        process = child(tmp_path / "nvme", code)
        error = process.communicate(timeout=120)[1]
        assert process.returncode == 0, error
        assert not any(tmp_path.iterdir())


def test_a_forked_child_leaves_the_parents_store_alone(tmp_path):
    with NvmeStore(tmp_path) as store:
        store.write("x", torch.ones(3)).wait()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                store.read("x", torch.empty(3))
            except SwapError as error:
                status = 0 if "is a fork of it" in str(error) else 2
            store.close()
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        out = torch.empty(3)
        store.read("x", out).wait()
        assert torch.equal(out, torch.ones(3))


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_parent(tmp_path):
    """Data-loader workers may outlive a killed run by seconds."""
    process = child(
        tmp_path,
        "pid = os.fork()\nif pid == 0:\n    time.sleep(60); os._exit(0)\nprint(pid, flush=True); time.sleep(100)",
    )
    worker = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        with NvmeStore(tmp_path) as store:
            store.write("x", torch.ones(3)).wait()
    finally:
        os.kill(worker, signal.SIGKILL)
    process.communicate()


def test_signal_handlers_are_ours_only_while_needed(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_DFL
    with NvmeStore(tmp_path, name="a"), NvmeStore(tmp_path, name="b"):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    mine = lambda *arguments: None
    signal.signal(signal.SIGTERM, mine)
    try:
        with NvmeStore(tmp_path):
            assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
