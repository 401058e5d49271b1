"""HostBufferPool: bounded, aligned, page-locked only where allowed and possible."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from lazytrain_ds.errors import HostMemoryError
from lazytrain_ds.runtime.host_buffers import CudaPageLock, HostBufferPool, PageLockError
from lazytrain_ds.runtime.swap import NvmeStore

MIB = 1 << 20


class FakePageLock:
    """A driver that locks up to `limit_bytes`, as WSL2's does."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.locked: dict[int, int] = {}
        self.calls = 0

    def register(self, address: int, size_bytes: int) -> None:
        self.calls += 1
        assert address % 4096 == 0 and size_bytes % 4096 == 0 and address not in self.locked
        if sum(self.locked.values()) + size_bytes > self.limit_bytes:
            raise PageLockError("cudaErrorMemoryAllocation")
        self.locked[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self.locked[address]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 3, 511, 513, 67 * 211])
def test_buffers_are_aligned_and_have_the_asked_size(numel, dtype):
    tensor = HostBufferPool().allocate(numel, dtype, "x")
    assert tensor.shape == (numel,) and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.untyped_storage().data_ptr() % 4096 == 0 and tensor.storage_offset() == 0


def test_the_cost_is_whole_pages_not_a_power_of_two():
    assert HostBufferPool.cost_bytes(33 * MIB, torch.uint8) == 33 * MIB
    assert HostBufferPool.cost_bytes(32 * MIB, torch.uint8) == 32 * MIB
    assert HostBufferPool.cost_bytes(33 * MIB // 4 + 1, torch.float32) == 33 * MIB + 4096
    assert HostBufferPool.cost_bytes(0, torch.float32) == 4096
    lock = FakePageLock()
    pool = HostBufferPool(34 * MIB, page_lock=lock)  # torch would need 64 MiB
    held = pool.allocate(33 * MIB, torch.uint8, "states")
    assert pool.page_locked_bytes == pool.total_bytes == sum(lock.locked.values()) == 33 * MIB
    pool.release(held)


def test_without_a_page_lock_nothing_is_locked(monkeypatch):
    """`pin_memory: false`: also torch is never asked for pinned memory."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda *a, **k: pytest.fail("pin_memory was called"))
    pool = HostBufferPool()
    tensor = pool.allocate(10, torch.float32, "x")
    assert pool.page_locked_bytes == 0 and not tensor.is_pinned()


def test_a_driver_that_refuses_is_told_once_and_not_asked_again(caplog):
    lock = FakePageLock(limit_bytes=2 * MIB)
    pool = HostBufferPool(page_lock=lock)
    with caplog.at_level(logging.WARNING):
        tensors = [pool.allocate(MIB, torch.uint8, "x") for _ in range(5)]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
    assert [int(tensor[-1]) for tensor in tensors] == [0, 1, 2, 3, 4]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "cudaErrorMemoryAllocation" in said[0] and "pageable" in said[0] and "2.1 MB" in said[0]
    assert lock.calls == 3 and pool.page_locked_bytes == 2 * MIB and pool.total_bytes == 5 * MIB
    for tensor in tensors:
        pool.release(tensor)
    pool.trim()  # what was locked before the refusal is still unlocked
    assert lock.locked == {} and pool.total_bytes == 0


def test_the_total_is_bounded_and_the_refusal_names_the_holders():
    pool = HostBufferPool(4 * MIB)
    pool.allocate(2 * MIB, torch.uint8, "parameters")
    pool.allocate(MIB, torch.uint8, "gradients")
    with pytest.raises(HostMemoryError, match=r"states needs 2.1 MB, 1.05 MB of 4.19 MB are free \(held: "
                                              r"gradients 1.05 MB, parameters 2.1 MB\).*host_memory"):  # fmt: skip
        pool.allocate(2 * MIB, torch.uint8, "states")
    assert pool.used_bytes == pool.total_bytes == 3 * MIB
    pool.allocate(MIB, torch.uint8, "states")  # exactly full


def test_spare_buffers_are_reused_when_they_fit_and_dropped_when_they_are_in_the_way():
    lock = FakePageLock()
    pool = HostBufferPool(4 * MIB, page_lock=lock)
    first = pool.allocate(2 * MIB, torch.uint8, "a")
    address = first.data_ptr()
    pool.release(first)
    again = pool.allocate(300_000, torch.float32, "b")  # 1.2 MB: more than half
    assert again.data_ptr() == address and lock.calls == 1 and pool.by_purpose() == {"b": 2 * MIB}
    pool.release(again)
    small = pool.allocate(10, torch.uint8, "c")  # would waste the large one
    assert small.data_ptr() != address and pool.total_bytes == 2 * MIB + 4096
    pool.allocate(3 * MIB, torch.uint8, "d")  # only fits without the spare one
    assert pool.total_bytes == 3 * MIB + 4096 and address not in lock.locked
    assert pool.peak_bytes == 3 * MIB + 4096


def test_only_a_tensor_in_use_can_be_released():
    pool = HostBufferPool()
    tensor = pool.allocate(8, torch.float32, "x")
    pool.release(tensor[4:].view(torch.int32))  # a view will do
    for wrong in (tensor, torch.empty(3)):
        with pytest.raises(ValueError, match=r"not .or no longer. one of this pool's"):
            pool.release(wrong)


@pytest.mark.parametrize("ending", ["close", "collected"])
def test_all_is_unlocked_at_the_end_and_tensors_stay_valid(ending):
    lock = FakePageLock()
    pool = HostBufferPool(page_lock=lock)
    used, spare = pool.allocate(MIB, torch.uint8, "x"), pool.allocate(MIB, torch.uint8, "x")
    pool.release(spare)
    used.fill_(5)
    assert len(lock.locked) == 2
    if ending == "close":
        pool.close()
        pool.close()
    else:
        del pool
        gc.collect()
    assert lock.locked == {} and bool((used == 5).all())


def test_memory_that_the_system_does_not_have(monkeypatch):
    import lazytrain_ds.runtime.host_buffers as module

    def nothing(*arguments):
        raise MemoryError("no memory for 1048576 bytes")

    monkeypatch.setattr(module, "aligned_empty", nothing)
    pool = HostBufferPool()
    with pytest.raises(HostMemoryError, match=r"no 1.05 MB for states"):
        pool.allocate(MIB, torch.uint8, "states")
    assert pool.total_bytes == 0


def test_buffers_go_to_nvme_without_a_bounce_copy(tmp_path):
    pool = HostBufferPool()
    with NvmeStore(tmp_path) as store:
        tensor, out = (pool.allocate(67 * 211, torch.float32, "x") for _ in range(2))
        tensor.normal_()
        assert store._backend.takes_directly(tensor)
        store.write("x", tensor)
        store.read("x", out).wait()
        assert torch.equal(tensor, out)


def test_the_cuda_calls(monkeypatch):
    """Which driver calls are made, and that their results are looked at."""
    calls: list[tuple[str, ...]] = []
    result = [0]

    class Cudart:
        def cudaHostRegister(self, *arguments):
            calls.append(("register", *arguments))
            return result[0]

        def cudaHostUnregister(self, *arguments):
            calls.append(("unregister", *arguments))
            return result[0]

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    lock = CudaPageLock()
    lock.register(4096, 8192)
    lock.unregister(4096)
    assert calls == [("register", 4096, 8192, 1), ("unregister", 4096)]
    result[0] = 2
    with pytest.raises(PageLockError, match="cudaHostRegister: 2"):
        lock.register(4096, 8192)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_torch_sees_the_memory_as_pinned():
    pool = HostBufferPool(page_lock=CudaPageLock())
    host = pool.allocate(1 << 20, torch.float32, "x")
    assert host.is_pinned() and host[513:].is_pinned()
    host.normal_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on_device = host.to("cuda", non_blocking=True)
    stream.synchronize()
    assert torch.equal(on_device.cpu(), host)
    pool.close()
    assert not host.is_pinned()
