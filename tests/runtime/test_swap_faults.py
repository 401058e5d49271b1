"""Short transfers, ENOSPC and EIO: told with path, errno, bytes and free space, and never taken for data."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time

import pytest
import torch

from lazytrain_ds.errors import LazyTrainError, SwapError
from lazytrain_ds.runtime.swap import NvmeStore, TensorSpec, aligned_empty

AIO = {"block_size": 65536, "queue_depth": 1, "intra_op_parallelism": 2}


@pytest.fixture
def store(tmp_path):
    with NvmeStore(tmp_path / "nvme", aio=AIO) as it:
        if it.backend != "threads" or not it.report.o_direct:
            pytest.skip("needs O_DIRECT")
        yield it


def numbers(numel: int, start: float = 0.0) -> torch.Tensor:
    tensor = aligned_empty(numel, torch.float32)
    torch.arange(start, start + numel, out=tensor)
    return tensor


def fail_with(monkeypatch, name: str, number: int, *, after: int = 0) -> None:
    """`os.<name>` raises from its call `after` on."""
    real, calls, lock = getattr(os, name), [0], threading.Lock()

    def broken(*arguments):
        with lock:
            calls[0] += 1
            if calls[0] > after:
                raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, name, broken)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failed_write_tells_all_and_leaves_no_valid_content(store, monkeypatch, number):
    store.write("x", numbers(100_000)).wait()
    with monkeypatch.context() as patch:
        fail_with(patch, "pwritev", number, after=3)
        ticket = store.write("x", numbers(100_000, 5.0))
        with pytest.raises(SwapError) as caught:
            ticket.wait(30)
    error = caught.value
    assert error.errno == number and isinstance(error, OSError) and isinstance(error, LazyTrainError)
    assert error.path.parent == store.directory and str(error.path) in str(error)
    assert errno.errorcode[number] in str(error) and "write of 'x'" in str(error)
    assert error.wanted_bytes == 401_408 and 0 < error.done_bytes <= 3 * 65536
    assert error.free_bytes > 0 and f"{error.done_bytes} of 401408 bytes" in str(error) and "free" in str(error)
    # Neither the old content nor the mixture is handed out; a new write makes the key good again.
    with pytest.raises(SwapError, match="last write failed") as caught:
        store.read("x", torch.empty(100_000)).wait(30)
    assert caught.value.__cause__ is error
    with pytest.raises(SwapError, match="last write failed"):
        store.export("x", store.directory.parent / "out")
    assert not (store.directory.parent / "out").exists()
    store.write("x", numbers(100_000, 9.0))
    out = torch.empty(100_000)
    store.read("x", out).wait(30)
    assert torch.equal(out, numbers(100_000, 9.0))


def test_reads_queued_behind_a_failing_write_fail_too(store, monkeypatch):
    fail_with(monkeypatch, "pwritev", errno.EIO)
    store.write("x", numbers(1000))
    reads = [store.read("x", torch.empty(1000)) for _ in range(3)]
    for read in reads:
        with pytest.raises(SwapError, match="last write failed"):
            read.wait(30)
    with pytest.raises(SwapError, match="EIO"):
        store.synchronize()


def test_a_failed_read_leaves_the_content_valid(store, monkeypatch):
    tensor = numbers(100_000)
    store.write("x", tensor).wait()
    with monkeypatch.context() as patch:
        fail_with(patch, "preadv", errno.EIO, after=2)
        with pytest.raises(SwapError, match=r"read of 'x' failed with EIO \(Input/output error\)"):
            store.read("x", torch.empty(100_000)).wait(30)
    out = torch.empty(100_000)
    store.read("x", out).wait(30)
    assert torch.equal(out, tensor)


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
@pytest.mark.parametrize("numel", [100_000, 67 * 211, 1025])
def test_short_transfers_are_continued(store, monkeypatch, kind, numel):
    """The kernel may move less than asked, also an amount that O_DIRECT cannot resume from (not a whole block)."""
    real, calls = getattr(os, kind), []

    def short(descriptor, buffers, offset):
        first = buffers[0]
        calls.append(offset)
        if len(first) >= 3 * 4096:
            return real(descriptor, [first[: len(first) // 2 // 4096 * 4096 + 4096]], offset) - 512
        return real(descriptor, buffers, offset)

    tensor, out = numbers(numel), torch.zeros(numel)
    with monkeypatch.context() as patch:
        patch.setattr(os, kind, short)
        store.write("x", tensor)
        store.read("x", out).wait(30)
    assert torch.equal(out, tensor)
    requests = -(-store.padded_bytes(numel * 4) // 65536)
    assert len(calls) > requests or numel == 1025


@pytest.mark.parametrize("count", [0, 512])
def test_a_write_without_progress_is_an_error_not_a_loop(store, monkeypatch, count):
    monkeypatch.setattr(os, "pwritev", lambda *arguments: count)
    with pytest.raises(SwapError, match=rf"EIO .*a short write: the kernel took {count} bytes.*0 of 4096 bytes"):
        store.write("x", numbers(10)).wait(30)


def test_a_file_that_somebody_cut_off(store):
    store.write("x", numbers(100_000)).wait()
    (path,) = store.directory.glob("*.swap")
    os.truncate(path, 4096 * 7)
    with pytest.raises(SwapError, match=r"EIO .*the file ends early"):
        store.read("x", torch.empty(100_000)).wait(30)


def test_a_file_that_somebody_removed(store):
    store.write("x", numbers(10)).wait()
    (path,) = store.directory.glob("*.swap")
    path.unlink()
    with pytest.raises(SwapError, match="ENOENT"):
        store.read("x", torch.empty(10)).wait(30)
    with pytest.raises(SwapError, match="ENOENT"):
        store.write("x", numbers(10)).wait(30)


def test_a_disk_that_fills_up_while_a_file_is_allocated(store, monkeypatch):
    store.write("old", numbers(1000)).wait()

    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(SwapError, match=r"ENOSPC.*0 of 40960 bytes") as caught:
            store.write("new", numbers(10_000))
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(SwapError, match="ENOSPC"):  # growing an existing key: refused before it is touched
            store.write("old", numbers(10_000))
        with pytest.raises(SwapError, match="ENOSPC"):
            store.reserve({"a": TensorSpec(torch.float32, 10)})
    assert "new" not in store and len(list(store.directory.glob("*.swap"))) == 1
    out = torch.empty(1000)
    store.read("old", out).wait()
    assert torch.equal(out, numbers(1000))


def test_a_file_system_without_fallocate(store, monkeypatch):
    def unsupported(descriptor, offset, size):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    out = torch.empty(67 * 211)
    store.write("x", numbers(67 * 211))
    store.read("x", out).wait(30)
    assert torch.equal(out, numbers(67 * 211))


def test_a_failing_throttle_fails_the_transfer(tmp_path):
    with NvmeStore(tmp_path, throttle=lambda *arguments: 1 / 0) as store:
        with pytest.raises(SwapError, match="ZeroDivisionError") as caught:
            store.write("x", numbers(10)).wait(30)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_failure_that_nobody_waited_for_is_said_at_close(tmp_path, monkeypatch, caplog):
    store = NvmeStore(tmp_path)
    fail_with(monkeypatch, "pwritev", errno.EIO)
    ticket = store.write("x", numbers(10))
    while not ticket.done():
        time.sleep(0.001)
    with caplog.at_level(logging.WARNING):
        store.close()
    assert "nobody waited for" in caplog.text and "EIO" in caplog.text


# Export and load


def test_export_is_atomic(store, monkeypatch, tmp_path):
    store.write("x", numbers(100_000))
    target = tmp_path / "checkpoint.bin"
    target.write_bytes(b"previous")
    with monkeypatch.context() as patch:
        fail_with(patch, "pwrite", errno.ENOSPC, after=2)
        with pytest.raises(SwapError, match="export of 'x' failed with ENOSPC") as caught:
            store.export("x", target)
    assert caught.value.path == target and str(target) in str(caught.value)
    assert target.read_bytes() == b"previous" and {path.name for path in tmp_path.iterdir()} == {
        "checkpoint.bin", "nvme"
    }  # fmt: skip
    assert store.export("x", target) == 400_000
    assert target.read_bytes() == numbers(100_000).numpy().tobytes() and target.stat().st_mode & 0o777 == 0o600
    store.write("x", numbers(100_000, 1.0)).wait(30)  # the failed export did not block the key


def test_export_holds_off_later_writes_and_load_orders_like_a_write(store, tmp_path):
    store.write("x", numbers(100_000))
    store.export("x", tmp_path / "one")
    store.write("x", numbers(100_000, 1.0))
    store.load("x", tmp_path / "one", TensorSpec(torch.float32, 100_000))
    out = torch.empty(100_000)
    store.read("x", out).wait(30)
    assert torch.equal(out, numbers(100_000))
    for numel in (0, 1, 3, 511, 513):
        store.write("y", numbers(numel))
        store.export("y", tmp_path / "odd")
        store.load("z", tmp_path / "odd", TensorSpec(torch.float32, numel))
        out = torch.empty(numel)
        store.read("z", out).wait(30)
        assert torch.equal(out, numbers(numel))


def test_load_refuses_a_file_of_another_size(store, tmp_path):
    store.write("x", numbers(3)).wait()
    (tmp_path / "cut").write_bytes(b"12345678")
    with pytest.raises(SwapError, match=r"has 8 bytes, but 3 x torch\.float32 takes 12"):
        store.load("x", tmp_path / "cut", TensorSpec(torch.float32, 3))
    with pytest.raises(SwapError, match="ENOENT"):
        store.load("x", tmp_path / "none", TensorSpec(torch.float32, 3))
    out = torch.empty(3)
    store.read("x", out).wait(30)
    assert torch.equal(out, numbers(3))


def test_a_load_that_fails_half_way_invalidates_the_key(store, monkeypatch, tmp_path):
    store.write("x", numbers(100_000)).wait()
    store.export("x", tmp_path / "file")
    with monkeypatch.context() as patch:
        fail_with(patch, "preadv", errno.EIO, after=1)
        with pytest.raises(SwapError, match=r"reading .*file at 65536 failed: EIO"):
            store.load("x", tmp_path / "file", TensorSpec(torch.float32, 100_000))
    with pytest.raises(SwapError, match="last write failed"):
        store.read("x", torch.empty(100_000)).wait(30)


def test_export_interrupted_while_waiting_does_not_block_the_key(tmp_path, monkeypatch):
    gate = threading.Event()
    with NvmeStore(tmp_path, throttle=lambda *arguments: gate.wait(30) and None) as store:
        store.write("x", numbers(10))

        def interrupted(self, timeout=None):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(threading.Event, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.export("x", tmp_path / "out")
        later = store.write("x", numbers(10, 1.0))
        gate.set()
        later.wait(30)
        assert not (tmp_path / "out").exists()
