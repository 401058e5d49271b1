"""The optional back end: refused clearly when it cannot work, and checked by us because it does not check itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lazytrain_ds.errors import SwapError
from lazytrain_ds.hardware.swap_path import DirectIO
from lazytrain_ds.runtime.swap import NvmeStore, aio_problem, aligned_empty
from lazytrain_ds.runtime.swap import deepspeed_aio as aio_module
from lazytrain_ds.runtime.swap.backends import AioSettings, TransferError
from lazytrain_ds.runtime.swap.memory import memory_view

DIRECT = DirectIO(True, 512, 4096)
ROOT = Path(__file__).parents[2]


def built(directory: Path) -> None:
    """A directory that looks as after a complete build."""
    for name in ("pin_memory", "async_io"):
        (directory / name).mkdir(parents=True)
        (directory / name / f"{name}.so").touch()


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ext"))
    monkeypatch.setattr(aio_module, "_installed_ops", lambda: False)
    return tmp_path / "ext"


def test_importing_and_using_the_store_needs_no_deepspeed(tmp_path):
    code = f"""
import sys, torch
from lazytrain_ds.runtime.swap import NvmeStore
before = "deepspeed" in sys.modules
with NvmeStore({str(tmp_path)!r}, backend="auto", aio={{"block_size": 1048576, "queue_depth": 16}}) as store:
    store.write("x", torch.ones(3)).wait()
    print(store.backend, before or "deepspeed" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.stdout == "threads False\n", result.stderr


def test_aio_problem_names_what_is_missing(extensions):
    assert "not built yet (no pin_memory or async_io in" in aio_problem().message
    built(extensions)
    assert aio_problem() is None
    (extensions / "async_io" / "async_io.so").unlink()
    assert "not built yet (no async_io in" in aio_problem().message
    assert not aio_problem().locked


@pytest.mark.parametrize("name", ["async_io", "pin_memory"])
def test_a_stale_build_lock_is_named_within_seconds_instead_of_waiting_for_ever(extensions, tmp_path, name):
    built(extensions)
    lock = extensions / name / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    started = time.monotonic()
    with pytest.raises(SwapError, match=rf"there since 60 minutes.*rm {lock}.*\"threads\" back end"):
        NvmeStore(tmp_path / "nvme", backend="deepspeed_aio")
    assert time.monotonic() - started < 15
    assert lock.exists() and not (tmp_path / "nvme").exists()
    with NvmeStore(tmp_path / "nvme", backend="auto") as store:  # the default is not held up
        assert store.backend == "threads"


def test_a_build_lock_that_goes_away_is_waited_for(extensions, monkeypatch):
    built(extensions)
    lock = extensions / "async_io" / "lock"
    lock.touch()
    monkeypatch.setattr(time, "sleep", lambda seconds: lock.unlink())
    monkeypatch.setattr(aio_module, "_can_lock", lambda size: False)
    with pytest.raises(SwapError, match="ulimit -l"):  # the next check; so the lock was no obstacle
        aio_module._load_aio(True, 1 << 20)


def test_without_libaio_the_message_names_the_package(extensions, monkeypatch, tmp_path):
    builders = pytest.importorskip("deepspeed.ops.op_builder")
    monkeypatch.setattr(builders.AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    with pytest.raises(SwapError, match=r"libaio is missing.*apt install libaio-dev"):
        NvmeStore(tmp_path / "nvme", backend="deepspeed_aio")
    assert not (tmp_path / "nvme").exists()
    with NvmeStore(tmp_path / "nvme") as store:
        assert store.backend == "threads"


def test_without_o_direct_it_is_refused():
    with pytest.raises(SwapError, match=r"needs O_DIRECT.*EINVAL"):
        aio_module.DeepSpeedAioBackend(DirectIO(False, error="EINVAL (Invalid argument)"), AioSettings())


def test_settings_from_the_aio_block():
    assert AioSettings.from_deepspeed(None) == AioSettings.from_deepspeed({}) == AioSettings()
    settings = AioSettings.from_deepspeed({"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 2})
    assert (settings.request_bytes, settings.threads) == (8 << 20, 2)
    assert (settings.block_bytes, settings.queue_depth) == (262144, 32)
    assert AioSettings.from_deepspeed({"thread_count": 3}).threads == 3


class FakeHandle:
    """aio_handle as far as we use it, with its fault: it reports success whatever the disk did."""

    def __init__(self, skip: range = range(0), answer: int = 1) -> None:
        self.skip, self.answer = skip, answer  # bytes of each request that the "disk" loses

    def sync_pwrite(self, tensor, name, offset):
        descriptor = os.open(name, os.O_WRONLY)
        data = bytes(tensor.numpy())
        for start in range(0, len(data), 4096):
            if start not in self.skip:
                os.pwrite(descriptor, data[start : start + 4096], offset + start)
        os.close(descriptor)
        return self.answer

    def sync_pread(self, tensor, name, offset):
        descriptor = os.open(name, os.O_RDONLY)
        for start in range(0, tensor.numel(), 4096):
            if start not in self.skip:
                data = os.pread(descriptor, 4096, offset + start)
                tensor[start : start + 4096] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        os.close(descriptor)
        return self.answer


def transfer(kind: str, handle: FakeHandle, path: Path, size: int, offset: int = 0) -> torch.Tensor:
    tensor = aligned_empty(size, torch.uint8)
    if kind == "write":
        tensor.copy_(torch.arange(size) % 251)
    worker = aio_module._AioWorker(handle, 16384)
    file = aio_module._AioFile(str(path), os.open(path, os.O_RDONLY))
    try:
        worker.transfer(kind, file, [(tensor.data_ptr(), size)], offset)
    finally:
        os.close(file.descriptor)
    return tensor


def test_a_lost_block_is_noticed_in_both_directions(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(65536 + 8192))
    for block_end in (16384, 32768, 49152, 65536, 69632):  # requests of 16 KiB, the last one of 4 KiB
        lost = FakeHandle(range(block_end - 4096, block_end, 4096))
        with pytest.raises(TransferError, match=f"did not write the block that ends at {block_end + 4096}"):
            transfer("write", lost, path, 69632, 4096)
        path.write_bytes(bytes(65536 + 8192))
        with pytest.raises(TransferError, match=f"did not fill the block that ends at {block_end + 4096}"):
            transfer("read", lost, path, 69632, 4096)
    written = transfer("write", FakeHandle(), path, 69632, 4096)
    assert torch.equal(transfer("read", FakeHandle(), path, 69632, 4096), written)


def test_a_refusal_and_a_short_file_are_errors_not_aborts(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with pytest.raises(TransferError, match="refused the write"):
        transfer("write", FakeHandle(answer=-1), path, 4096)
    with pytest.raises(TransferError, match="refused the read"):
        transfer("read", FakeHandle(answer=-1), path, 4096)
    with pytest.raises(TransferError, match="ends early"):
        transfer("read", FakeHandle(), path, 12288)


def test_memory_view_is_writable_and_in_place():
    tensor = aligned_empty(8, torch.uint8)
    memory_view(tensor.data_ptr() + 2, 3)[:] = b"abc"
    assert bytes(tensor.numpy()) == b"\0\0abc\0\0\0"


@pytest.mark.slow
def test_the_real_back_end_in_a_run_of_its_own(tmp_path):
    """Odd sizes, any alignment, order, a failed start of nothing, status 0 with transfers in flight."""
    if (problem := aio_problem()) is not None and os.environ.get("LAZYTRAIN_BUILD_AIO") != "1":
        pytest.skip(f"DeepSpeed's async_io: {problem.message}; LAZYTRAIN_BUILD_AIO=1 builds it (minutes)")
    code = f"""
import torch
from lazytrain_ds.runtime.swap import NvmeStore, TensorSpec, aligned_empty
store = NvmeStore({str(tmp_path / "nvme")!r}, backend="deepspeed_aio", aio={{"block_size": 65536, "queue_depth": 4}})
for aligned in (True, False):
    for numel in (0, 1, 3, 511, 513, 67 * 211, 1_000_003):
        base = aligned_empty(numel + 1, torch.float32)
        tensor = base[:numel] if aligned else base[1:]
        tensor.copy_(torch.randn(numel))
        out = torch.empty(numel)
        store.write("x", tensor)
        store.read("x", out).wait()
        assert torch.equal(out, tensor), numel
store.export("x", {str(tmp_path / "out")!r})
store.load("y", {str(tmp_path / "out")!r}, TensorSpec(torch.float32, 1_000_003))
store.read("y", out).wait()
assert torch.equal(out, tensor)
print(store.backend)
for _ in range(10):
    store.read("x", out); store.write("y", tensor)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert result.returncode == 0, result.stderr
    assert "deepspeed_aio" in result.stdout and "terminate called" not in result.stderr
    (tmp_path / "out").unlink()
    assert list(tmp_path.rglob("*")) == []
