"""Swap directories: every refusal names the path and a way out, nothing is left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.hardware import nvme
from lazytrain_ds.hardware.nvme import check_nvme_path, free_bytes, measure_nvme, resolve


def test_a_usable_directory(tmp_path):
    checked = check_nvme_path(tmp_path, need_bytes=1)
    assert checked.path == tmp_path
    assert checked.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_fine_when_its_parent_exists_and_is_not_created(tmp_path):
    assert check_nvme_path(tmp_path / "swap").path == tmp_path / "swap"
    assert not (tmp_path / "swap").exists()


def test_a_missing_parent_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"neither does .*mkdir -p"):
        check_nvme_path(tmp_path / "not" / "mounted")


def test_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="is a file; name a directory"):
        check_nvme_path(file)
    with pytest.raises(ConfigError, match="not a directory"):
        check_nvme_path(file / "below")
    assert file.read_text() == "mine"


def test_proc_is_refused_with_its_errno():
    with pytest.raises(ConfigError, match=r"not writable.*errno"):
        check_nvme_path("/proc/swap")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not writable"):
        check_nvme_path(tmp_path)


def test_a_read_only_file_system_is_refused(tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(nvme.os, "open", refuse)
    with pytest.raises(ConfigError, match=r"Read-only file system \(errno 30\)"):
        check_nvme_path(tmp_path)


def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nvme.os, "write", full)
    with pytest.raises(ConfigError, match=r"No space left on device \(errno 28\)"):
        check_nvme_path(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_names_need_and_have(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 10**9))
    with pytest.raises(ConfigError, match=r"needs 5 GB, 3 GB are free; .*host_memory"):
        check_nvme_path(tmp_path, need_bytes=5 * 10**9)


def test_tmpfs_works_but_is_no_capacity(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nshm {tmp_path} tmpfs rw 0 0\n")
    checked = check_nvme_path(tmp_path, mounts=mounts)
    assert checked.in_memory
    assert "that is RAM" in checked.warnings[0]
    assert free_bytes(tmp_path, mounts=mounts) == 0
    with pytest.raises(ConfigError, match="none of it is disk"):
        check_nvme_path(tmp_path, need_bytes=1, mounts=mounts)


def test_no_o_direct_and_network_are_said(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/x {tmp_path} nfs4 rw 0 0\n")
    real = os.open

    def no_direct(path: object, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(nvme.os, "open", no_direct)
    checked = check_nvme_path(tmp_path, mounts=mounts)
    assert not checked.direct
    assert any("network" in warning for warning in checked.warnings)
    assert any("O_DIRECT" in warning for warning in checked.warnings)


def test_home_and_relative_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve("~/swap") == tmp_path / "swap"
    assert resolve("swap") == tmp_path / "swap"
    assert check_nvme_path("~").path == Path(tmp_path)


def test_measured_rates_are_positive_and_the_file_is_gone(tmp_path):
    rates = measure_nvme(tmp_path, 0.05, largest_bytes=32 << 20)
    assert rates.read_bytes_per_second > 0
    assert rates.write_bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []
