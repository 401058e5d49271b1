"""inspect_swap_path: every kind of path a user may name, judged without leaving a trace."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain_ds.errors import SwapError
from lazytrain_ds.hardware import swap_path as paths_module
from lazytrain_ds.hardware.swap_path import absolute_path, inspect_swap_path
from lazytrain_ds.runtime.swap import NvmeStore


def test_a_good_directory(tmp_path):
    report = inspect_swap_path(tmp_path)
    assert report.problem is None and report.exists and report.writable
    assert report.free_bytes > 0 and report.file_system != "unknown"
    assert report.capacity_bytes == (0 if report.ram_backed else report.free_bytes)
    assert not any(tmp_path.iterdir())


def test_a_missing_directory_is_judged_by_its_parent_and_not_created(tmp_path):
    report = inspect_swap_path(tmp_path / "a" / "b")
    assert report.problem is None and not report.exists and report.writable
    assert report.direct_io == inspect_swap_path(tmp_path).direct_io
    assert not any(tmp_path.iterdir())
    assert "does not exist" in inspect_swap_path(tmp_path / "a", create=False).problem


def test_missing_parents_are_created_privately_and_removed_again(tmp_path):
    with NvmeStore(tmp_path / "a" / "b") as store:
        assert store.directory == tmp_path / "a" / "b" / "lazytrain_swap_rank0"
        for directory in (tmp_path / "a", tmp_path / "a" / "b", store.directory):
            assert directory.stat().st_mode & 0o777 == 0o700
    assert not any(tmp_path.iterdir())
    with pytest.raises(SwapError, match="does not exist"):
        NvmeStore(tmp_path / "a", create=False)


def test_a_directory_of_the_users_keeps_its_mode_and_files(tmp_path):
    (tmp_path / "theirs").write_text("keep")
    tmp_path.chmod(0o755)
    with NvmeStore(tmp_path):
        assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_path_that_is_a_file_or_below_one(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        report = inspect_swap_path(path)
        assert "is a file, not a directory" in report.problem and report.capacity_bytes == 0
        with pytest.raises(SwapError, match="is a file, not a directory"):
            NvmeStore(path)


def test_a_broken_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is a broken link" in inspect_swap_path(tmp_path / "link").problem


def test_proc_is_refused():
    for path in ("/proc/x", "/sys/x"):
        report = inspect_swap_path(path)
        assert "is not a disk" in report.problem
        with pytest.raises(SwapError, match="is not a disk"):
            NvmeStore(path)


@pytest.mark.parametrize("path", ["", "~no_such_user_here/x", "a\0b"])
def test_what_is_no_path(path):
    assert inspect_swap_path(path).problem
    with pytest.raises(SwapError, match="nvme_path"):
        NvmeStore(path)


def test_a_name_too_long(tmp_path):
    with pytest.raises(SwapError, match="ENAMETOOLONG"):
        NvmeStore(tmp_path / ("x" * 300))


def test_home_is_expanded_and_a_relative_path_is_fixed_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert absolute_path("~/swap") == tmp_path / "home" / "swap"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    store = NvmeStore("relative")
    os.chdir(tmp_path / "elsewhere")
    import torch

    with store:
        out = torch.empty(3)
        store.write("x", torch.ones(3))
        store.read("x", out).wait()
        assert store.directory.parent == tmp_path / "relative"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere"]


def test_a_directory_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *arguments: False)  # root may write anywhere
    assert f"not writable for user id {os.geteuid()}" in inspect_swap_path(tmp_path).problem
    with pytest.raises(SwapError, match="not writable"):
        NvmeStore(tmp_path)


def test_a_probe_that_fails_is_a_problem_with_errno(tmp_path, monkeypatch):
    def broken(*arguments, **named):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(paths_module, "_anonymous_file", broken)
    report = inspect_swap_path(tmp_path)
    assert "EDQUOT" in report.problem and not report.writable


def test_alignment_is_probed_not_assumed(tmp_path, monkeypatch):
    """A disk with 4 KiB blocks refuses 512-byte requests and 512-byte-aligned memory."""
    import ctypes

    real = os.pwritev

    def four_kib(descriptor, buffers, offset):
        for buffer in buffers:
            if len(buffer) % 4096 or ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % 4096:
                raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", four_kib)
    direct = inspect_swap_path(tmp_path).direct_io
    if not direct.supported:
        pytest.skip("needs O_DIRECT")
    assert (direct.memory_alignment_bytes, direct.length_alignment_bytes) == (4096, 4096)


def test_a_probe_without_o_tmpfile_leaves_nothing(tmp_path, monkeypatch):
    real = os.open

    def no_tmpfile(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **named)

    expected = inspect_swap_path(tmp_path).direct_io
    monkeypatch.setattr(os, "open", no_tmpfile)
    assert inspect_swap_path(tmp_path).direct_io == expected
    assert not any(tmp_path.iterdir())


def test_mount_lookup(monkeypatch, tmp_path):
    table = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:5 / /mnt/with\\040space rw shared:1 - xfs /dev/nvme0n1 rw\n"
        "3 1 0:6 / /mnt rw - nfs4 host:/x rw\n"
        "4 1 0:7 / /mnt/ram rw - tmpfs tmpfs rw\n"
        "5 1 0:8 / /mnt/ram rw - ext4 /dev/zram0 rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self: table)
    assert paths_module.file_system_of(Path("/home/x")) == ("ext4", "/dev/sda")
    assert paths_module.file_system_of(Path("/mnt/with space/y")) == ("xfs", "/dev/nvme0n1")
    assert paths_module.file_system_of(Path("/mnt/without")) == ("nfs4", "host:/x")
    assert paths_module.file_system_of(Path("/mnt/ram/x")) == ("ext4", "/dev/zram0")


def test_network_and_ram_file_systems_warn(monkeypatch, tmp_path):
    monkeypatch.setattr(paths_module, "file_system_of", lambda path: ("nfs4", "host:/x"))
    report = inspect_swap_path(tmp_path)
    assert report.network and any("network file system" in warning for warning in report.warnings)
    monkeypatch.setattr(paths_module, "file_system_of", lambda path: ("ext4", "/dev/zram0"))
    report = inspect_swap_path(tmp_path)
    assert report.ram_backed and report.capacity_bytes == 0


def in_private_mount(options: str, code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` with a tmpfs mounted on `directory` in a mount namespace of its own."""
    script = f'mount -t tmpfs -o {options} tmpfs "$1" && exec "$2" -c "$3"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(directory), sys.executable, code]
    try:
        probe = subprocess.run(["unshare", "-rm", "sh", "-c", 'mount -t tmpfs tmpfs "$1"', "sh", str(directory)],
                               capture_output=True)  # fmt: skip
    except FileNotFoundError:
        pytest.skip("no unshare")
    if probe.returncode:
        pytest.skip("user namespaces are not allowed here")
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])


def test_a_read_only_mount(tmp_path):
    result = in_private_mount(
        "ro", f"from lazytrain_ds.runtime.swap import *; NvmeStore({str(tmp_path)!r} + '/x')", tmp_path
    )
    assert result.returncode == 1
    assert "SwapError" in result.stderr and "mounted read-only" in result.stderr


def test_a_file_system_of_one_megabyte_runs_full(tmp_path):
    """A real ENOSPC: first seen by statvfs, and, when another program takes the space meanwhile, by fallocate."""
    code = f"""
import torch
from lazytrain_ds.runtime.swap import *
store = NvmeStore({str(tmp_path)!r})
store.write("a", torch.ones(1000)).wait()
try:
    store.write("b", torch.ones(1 << 20))
except SwapError as error:
    print("1:", error)
store._directory.free_bytes = lambda: 1 << 40
try:
    store.write("b", torch.ones(1 << 20))
except SwapError as error:
    print("2:", error, error.errno)
out = torch.empty(1000)
store.read("a", out).wait()
print("intact", bool((out == 1).all()), "b" in store, len(list(store.directory.glob("*.swap"))))
store.write("b", torch.ones(1000)).wait()
store.close()
"""
    result = in_private_mount("size=1m", code, tmp_path)
    assert result.returncode == 0, result.stderr
    first, second, third = result.stdout.splitlines()
    assert first.startswith("1: NVMe store: 'b' need 4.19 MB") and " free" in first
    assert "ENOSPC (No space left on device)" in second and str(tmp_path) in second and second.endswith("28")
    assert third == "intact True False 1"
