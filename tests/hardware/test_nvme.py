"""Swap directories: every refusal names the path and a way out, nothing is left behind."""

from __future__ import annotations

import os

import pytest

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.hardware import swap_path
from lazytrain_ds.hardware.nvme import check_nvme_path, free_bytes, measure_nvme


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


def test_what_cannot_be_used_is_refused_with_the_reason(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match="is a file, not a directory; name a directory"):
            check_nvme_path(path)
    assert file.read_text() == "mine"
    with pytest.raises(ConfigError, match="is not a disk; name a directory"):
        check_nvme_path("/proc/swap")


def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(swap_path.os, "pwritev", full)
    with pytest.raises(ConfigError, match=r"writing a test file .* ENOSPC \(No space left on device\)"):
        check_nvme_path(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_names_need_and_have(tmp_path):
    free = free_bytes(tmp_path)
    with pytest.raises(ConfigError, match=r"needs .*B, .*B are free; .*host_memory"):
        check_nvme_path(tmp_path, need_bytes=2 * free)


def test_tmpfs_works_but_is_no_capacity(tmp_path, monkeypatch):
    monkeypatch.setattr(swap_path, "file_system_of", lambda path: ("tmpfs", "shm"))
    assert "files are host memory" in check_nvme_path(tmp_path).warnings[0]
    assert free_bytes(tmp_path) == 0
    with pytest.raises(ConfigError, match="none of it is disk"):
        check_nvme_path(tmp_path, need_bytes=1)


def test_no_o_direct_and_network_are_said(tmp_path, monkeypatch):
    real = os.open

    def no_direct(path: object, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(swap_path, "file_system_of", lambda path: ("nfs4", "server:/x"))
    monkeypatch.setattr(swap_path.os, "open", no_direct)
    checked = check_nvme_path(tmp_path)
    assert not checked.o_direct
    assert any("network" in warning for warning in checked.warnings)
    assert any("O_DIRECT" in warning for warning in checked.warnings)


def test_measured_rates_are_positive_and_the_file_is_gone(tmp_path):
    rates = measure_nvme(tmp_path, 0.05, largest_bytes=32 << 20)
    assert rates.read_bytes_per_second > 0
    assert rates.write_bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []
