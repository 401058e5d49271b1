"""Available memory under fake /proc and cgroup roots; what pinning costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazytrain_ds.errors import UnsupportedError
from lazytrain_ds.hardware.host_memory import (
    host_memory,
    pin_limit,
    pinned_cost_bytes,
    probe_pin_limit,
)

GIB = 1 << 30


def roots(tmp_path: Path, cgroup_line: str, files: dict[str, str], available_gib: int = 100) -> dict[str, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text(
        f"MemTotal:       {128 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable:   {available_gib * GIB // 1024} kB\n"
    )
    (proc / "version").write_text("Linux version 6.1")
    (proc / "self" / "cgroup").write_text(cgroup_line)
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"proc": proc, "cgroup": cgroup}


def test_without_cgroups_it_is_what_the_kernel_says_is_available(tmp_path):
    memory = host_memory(**roots(tmp_path, "", {}))
    assert (memory.total_bytes, memory.available_bytes) == (128 * GIB, 100 * GIB)
    assert memory.source == "physical memory"


def test_v2_limit_counts_inactive_page_cache_as_free(tmp_path):
    files = {
        "job/memory.max": str(32 * GIB),
        "job/memory.current": str(20 * GIB),
        "job/memory.stat": f"anon 5\ninactive_file {12 * GIB}\n",
    }
    memory = host_memory(**roots(tmp_path, "0::/job\n", files))
    assert memory.available_bytes == 24 * GIB
    assert memory.total_bytes == 32 * GIB
    assert memory.source.endswith("cgroup/job")


@pytest.mark.parametrize("text", ["max", "", "garbage"])
def test_v2_without_a_usable_limit(tmp_path, text):
    memory = host_memory(**roots(tmp_path, "0::/job\n", {"job/memory.max": text}))
    assert memory.available_bytes == 100 * GIB
    assert bool(memory.notes) == (text != "max")


def test_v2_ancestors_limit_too(tmp_path):
    files = {
        "a/memory.max": str(16 * GIB),
        "a/memory.current": "0",
        "a/b/memory.max": str(64 * GIB),
        "a/b/memory.current": "0",
        "a/b/c/memory.max": "max",
    }
    memory = host_memory(**roots(tmp_path, "0::/a/b/c\n", files))
    assert memory.available_bytes == 16 * GIB


def test_v2_high_mark_is_a_limit(tmp_path):
    files = {"job/memory.max": "max", "job/memory.high": str(8 * GIB), "job/memory.current": "0"}
    assert host_memory(**roots(tmp_path, "0::/job\n", files)).available_bytes == 8 * GIB


def test_container_whose_path_is_not_mounted_uses_the_mount(tmp_path):
    files = {"memory.max": str(4 * GIB), "memory.current": str(GIB)}
    assert host_memory(**roots(tmp_path, "0::/docker/abc\n", files)).available_bytes == 3 * GIB


def test_v1(tmp_path):
    files = {
        "memory/job/memory.limit_in_bytes": str(10 * GIB),
        "memory/job/memory.usage_in_bytes": str(6 * GIB),
        "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
        "memory/memory.limit_in_bytes": str(9223372036854771712),
    }
    lines = "12:cpu,cpuacct:/job\n7:memory:/job\n"
    assert host_memory(**roots(tmp_path, lines, files)).available_bytes == 6 * GIB


def test_a_limit_above_the_machine_changes_nothing(tmp_path):
    files = {"memory.max": str(999 * GIB), "memory.current": "0"}
    memory = host_memory(**roots(tmp_path, "0::/\n", files))
    assert (memory.available_bytes, memory.source) == (100 * GIB, "physical memory")


def test_usage_above_the_limit_leaves_nothing(tmp_path):
    files = {"memory.max": str(2 * GIB), "memory.current": str(3 * GIB)}
    assert host_memory(**roots(tmp_path, "0::/\n", files)).available_bytes == 0


def test_no_meminfo_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="set host_memory"):
        host_memory(proc=tmp_path, cgroup=tmp_path)


def test_this_machine():
    memory = host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_pinned_requests_are_rounded_to_a_power_of_two():
    assert pinned_cost_bytes(33 << 20) == 64 << 20
    assert pinned_cost_bytes(32 << 20) == 32 << 20
    assert pinned_cost_bytes((32 << 20) + 1) == 64 << 20
    assert [pinned_cost_bytes(count) for count in (0, 1, 2, 3)] == [0, 1, 2, 4]


def test_wsl_has_a_pin_limit(tmp_path):
    where = roots(tmp_path, "", {})
    assert pin_limit(proc=where["proc"]).limit_bytes is None
    (where["proc"] / "version").write_text("Linux version 5.15-microsoft-standard-WSL2")
    limit = pin_limit(proc=where["proc"])
    assert limit.limit_bytes == 64 * GIB
    assert "WSL2" in limit.reason


def test_pin_limit_is_found_by_trying():
    granted: list[int] = []

    def pin(size: int) -> object:
        if sum(granted) + size > 700:
            raise RuntimeError("CUDA error: out of memory")
        granted.append(size)
        return object()

    assert probe_pin_limit(pin, 10_000, step_bytes=200) == 600
    granted.clear()
    assert probe_pin_limit(pin, 500, step_bytes=200) == 500
