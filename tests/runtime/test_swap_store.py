"""NvmeStore on a real file system: content, order, accounting, refusals."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazytrain_ds.errors import SwapError
from lazytrain_ds.runtime.swap import NvmeStore, TensorSpec, aligned_empty

ODD_SIZES = [0, 1, 3, 511, 513, 67 * 211, (1 << 20) + 1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool,
          torch.complex64, torch.float8_e4m3fn]  # fmt: skip


def filled(numel: int, dtype: torch.dtype, seed: int = 0, *, aligned: bool = True) -> torch.Tensor:
    """Random bytes as `dtype` (booleans: 0 or 1)."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if aligned:
        tensor = aligned_empty(numel, dtype)
    else:  # one element past an aligned address
        tensor = aligned_empty(numel + 1, dtype)[1:]
    as_bytes(tensor).copy_(raw)
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """`torch.equal` would call NaNs different."""
    return left.dtype == right.dtype and torch.equal(as_bytes(left), as_bytes(right))


@pytest.fixture
def store(tmp_path):
    with NvmeStore(tmp_path / "nvme", aio={"block_size": 65536, "queue_depth": 4, "intra_op_parallelism": 3}) as it:
        yield it


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_odd_size_comes_back(store, dtype, aligned):
    for numel in ODD_SIZES:
        tensor = filled(numel, dtype, numel, aligned=aligned)
        store.write("x", tensor)
        out = filled(numel, dtype, numel + 1, aligned=not aligned)
        store.read("x", out).wait()
        assert same_bytes(out, tensor), numel


def test_a_read_touches_nothing_around_its_slice(store):
    """Slices of a flat buffer: the padding on disk must not spill into the neighbours."""
    flat = aligned_empty(4096, torch.float32)
    flat.fill_(7.0)
    store.write("x", filled(1031, torch.float32, 1)).wait()
    store.read("x", flat[1024 : 1024 + 1031]).wait()
    assert same_bytes(flat[1024 : 1024 + 1031], filled(1031, torch.float32, 1))
    assert torch.all(flat[:1024] == 7) and torch.all(flat[1024 + 1031 :] == 7)


def test_a_tensor_with_any_shape_is_read_into_any_shape(store):
    tensor = filled(67 * 211, torch.float32).view(67, 211)
    store.write("x", tensor)
    out = torch.empty(211, 67)
    store.read("x", out).wait()
    assert same_bytes(out.view(-1), tensor.view(-1))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["write", "write", "read", "delete", "export"]),
            st.integers(0, 3),
            st.sampled_from([0, 1, 3, 511, 513, 1024, 4096, 67 * 211, 300_001]),
            st.sampled_from(DTYPES),
            st.booleans(),
        ),
        max_size=25,
    )
)
def test_any_sequence_behaves_like_a_dictionary(store, tmp_path, steps):
    for key in list(store.keys()):
        store.delete(key)
    model: dict[str, torch.Tensor] = {}
    reads = []
    for number, (action, slot, numel, dtype, aligned) in enumerate(steps):
        key = f"key {slot}"
        if action == "write":
            tensor = filled(numel, dtype, number, aligned=aligned)
            store.write(key, tensor)
            model[key] = tensor
        elif key not in model:
            with pytest.raises(SwapError):
                store.read(key, torch.empty(1))
        elif action == "read":
            out = filled(model[key].numel(), model[key].dtype, 99, aligned=aligned)
            reads.append((store.read(key, out), out, model[key]))
        elif action == "delete":
            store.delete(key)
            del model[key]
        else:
            store.export(key, tmp_path / "exported")
            assert (tmp_path / "exported").read_bytes() == bytes(as_bytes(model[key]).numpy())
    for ticket, out, expected in reads:
        ticket.wait()
        assert same_bytes(out, expected)
    assert sorted(store.keys()) == sorted(model)
    store.synchronize()
    assert store.occupied_bytes == sum(f.stat().st_size for f in store.directory.glob("*.swap"))


def test_concurrent_threads_with_random_delays_see_their_own_order(tmp_path):
    """Eight threads, keys shared in pairs by lock-step; the throttle shuffles completion order."""
    rng = random.Random(5)
    with NvmeStore(tmp_path, aio={"block_size": 16384, "queue_depth": 1, "intra_op_parallelism": 4},
                   throttle=lambda kind, size, start: time.sleep(rng.random() * 0.002)) as store:  # fmt: skip
        failures: list[str] = []

        def work(thread: int) -> None:
            mine = random.Random(thread)
            latest: dict[str, torch.Tensor] = {}
            pending = []
            for step in range(40):
                key = f"{thread}/{mine.randrange(3)}"
                if key in latest and mine.random() < 0.5:
                    out = torch.empty_like(latest[key])
                    pending.append((store.read(key, out), out, latest[key]))
                else:
                    latest[key] = filled(
                        mine.choice([1, 513, 20_000]), torch.float32, step, aligned=mine.random() < 0.5
                    )
                    store.write(key, latest[key])
            for ticket, out, expected in pending:
                ticket.wait(60)
                if not same_bytes(out, expected):
                    failures.append(ticket.key)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


class Gate:
    """A throttle that holds one kind of request until told."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.open = threading.Event()

    def __call__(self, kind: str, size: int, start: float) -> None:
        if kind == self.kind:
            self.open.wait(30)


def test_a_read_waits_for_the_write_before_it_and_other_keys_do_not(tmp_path):
    gate = Gate("write")
    with NvmeStore(tmp_path) as store:
        store.write("other", torch.ones(10)).wait()
        store._ledger.throttle = gate
        tensor = filled(5000, torch.float32)
        write = store.write("x", tensor)
        out, other = torch.zeros(5000), torch.zeros(10)
        read = store.read("x", out)
        store.read("other", other).wait(30)  # handed in later, another key: not held up
        assert torch.equal(other, torch.ones(10))
        time.sleep(0.05)
        assert not write.done() and not read.done()
        gate.open.set()
        read.wait(30)
        assert write.done() and same_bytes(out, tensor)


def test_a_write_waits_for_the_reads_before_it(tmp_path):
    gate = Gate("read")
    with NvmeStore(tmp_path) as store:
        store.write("x", torch.ones(5000)).wait()
        store._ledger.throttle = gate
        out = torch.zeros(5000)
        read = store.read("x", out)
        write = store.write("x", torch.full((5000,), 2.0))
        time.sleep(0.05)
        assert not write.done() and not read.done()
        gate.open.set()
        write.wait(30)
        assert torch.equal(out, torch.ones(5000))
        store.read("x", out).wait()
        assert torch.equal(out, torch.full((5000,), 2.0))


def test_a_read_may_wait_for_the_write_out_of_its_memory(tmp_path):
    """One buffer written from and read into: the read is handed in at once and begins when the write has ended."""
    gate = Gate("write")
    with NvmeStore(tmp_path) as store:
        store.write("next", torch.full((5000,), 2.0)).wait()
        store._ledger.throttle = gate
        buffer = filled(5000, torch.float32)
        content = buffer.clone()
        write = store.write("last", buffer)
        read = store.read("next", buffer, [write])
        time.sleep(0.05)
        assert not write.done() and not read.done() and same_bytes(buffer, content)
        gate.open.set()
        read.wait(30)
        assert torch.equal(buffer, torch.full((5000,), 2.0))
        assert read.ready_seconds == write.end_seconds and read.start_seconds >= write.end_seconds
        assert write.ready_seconds is None
        again = store.read("last", buffer, [write])  # a transfer that has ended holds nothing up
        again.wait(30)
        assert same_bytes(buffer, content)


def test_reads_and_writes_run_at_once(tmp_path):
    """A held write channel does not stop the read channel."""
    gate = Gate("write")
    with NvmeStore(tmp_path, aio={"intra_op_parallelism": 1}) as store:
        store.write("a", torch.ones(10)).wait()
        store._ledger.throttle = gate
        blocked = [store.write(f"w{number}", torch.ones(10)) for number in range(5)]
        store.read("a", torch.zeros(10)).wait(30)
        assert not any(ticket.done() for ticket in blocked)
        gate.open.set()
        store.synchronize()


def kernel_bytes() -> tuple[int, int]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def test_counters_match_the_kernel_within_two_percent(tmp_path):
    with NvmeStore(tmp_path / "nvme") as store:
        if not store.report.o_direct or store.report.ram_backed:
            pytest.skip("needs a disk with O_DIRECT")
        sizes = [1, 3, 511, 513, 67 * 211, 300_001, (1 << 20) + 7]
        tensors = {f"t{size}": filled(size, torch.float32, size, aligned=size % 2 == 0) for size in sizes}
        store.reserve({key: TensorSpec(tensor.dtype, tensor.numel()) for key, tensor in tensors.items()})
        read_before, written_before = kernel_bytes()
        for _ in range(2):
            for key, tensor in tensors.items():
                store.write(key, tensor)
        for key, tensor in tensors.items():
            store.read(key, torch.empty_like(tensor))
        store.synchronize()
        read, written = kernel_bytes()
    payload = sum(size * 4 for size in sizes)
    assert (store.bytes_read, store.bytes_written) == (payload, 2 * payload)
    assert (
        store.disk_bytes_written == 2 * store.disk_bytes_read == 2 * sum(-(-size * 4 // 4096) * 4096 for size in sizes)
    )
    assert read - read_before == pytest.approx(store.disk_bytes_read, rel=0.02)
    assert written - written_before == pytest.approx(store.disk_bytes_written, rel=0.02)


def test_aligned_memory_is_moved_without_a_bounce_buffer(tmp_path, monkeypatch):
    """Zero-copy: the kernel is handed the tensor's own address, for all but the padded tail."""
    seen = []
    real = os.pwritev
    with NvmeStore(tmp_path) as store:
        if not store.report.o_direct:
            pytest.skip("needs O_DIRECT")
        tensor = filled(3 * (1 << 20) + 1, torch.float32)

        def spy(descriptor, buffers, offset):
            import ctypes

            seen.extend((ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer)) for buffer in buffers)
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "pwritev", spy)
        store.write("x", tensor).wait()
    inside = sum(size for address, size in seen if 0 <= address - tensor.data_ptr() < tensor.nbytes)
    assert inside == tensor.nbytes // 4096 * 4096
    assert sum(size for _, size in seen) == -(-tensor.nbytes // 4096) * 4096


def test_four_hundred_tiny_tensors_get_short_names(store):
    keys = [f"model.layers.{number}.{'a_very_long_module_name.' * 20}weight" for number in range(400)]
    for number, key in enumerate(keys):
        store.write(key, torch.full((3,), float(number)))
    names = [path.name for path in store.directory.glob("*.swap")]
    assert len(names) == 400 and max(map(len, names)) <= 32
    out = torch.empty(3)
    store.read(keys[399], out).wait()
    assert torch.equal(out, torch.full((3,), 399.0))
    store.synchronize()
    assert store.bytes_written == 400 * 12 and store.disk_bytes_written == 400 * store.padded_bytes(12)


def test_hooks_see_each_transfer(tmp_path):
    calls = []
    with NvmeStore(tmp_path, on_transfer=lambda *call: calls.append(call)) as store:
        before = time.perf_counter()
        ticket = store.write("x", torch.ones(1 << 20))
        ticket.wait()
        store.read("x", torch.empty(1 << 20)).wait()
        after = time.perf_counter()
    assert [(kind, key, size) for kind, key, size, _, _ in calls] == [("write", "x", 4 << 20), ("read", "x", 4 << 20)]
    for _, _, _, start, end in calls:
        assert before <= start < end <= after
    assert (ticket.start_seconds, ticket.end_seconds) == calls[0][3:]


def test_a_failing_hook_is_logged_and_harms_nothing(tmp_path, caplog):
    with NvmeStore(tmp_path, on_transfer=lambda *call: 1 / 0) as store, caplog.at_level(logging.ERROR):
        store.write("x", torch.ones(3)).wait()
    assert "on_transfer failed" in caplog.text


def test_throttle_slows_one_direction(tmp_path):
    """A rate limiter for emulation: 4 MB at 40 MB/s takes at least 0.1 s, the other direction is free."""

    def limit(kind: str, size: int, start: float) -> None:
        if kind == "read":
            time.sleep(max(0.0, start + size / 40e6 - time.perf_counter()))

    with NvmeStore(tmp_path, aio={"block_size": 1 << 20, "queue_depth": 1}, throttle=limit) as store:
        store.write("x", torch.ones(1_000_000)).wait()
        started = time.perf_counter()
        store.read("x", torch.empty(1_000_000)).wait()
        assert time.perf_counter() - started >= 0.1


# Refusals


def test_reading_what_was_never_written(store):
    with pytest.raises(SwapError, match="nothing was written under 'x'"):
        store.read("x", torch.empty(3))
    store.reserve({"x": TensorSpec(torch.float32, 3)})
    with pytest.raises(SwapError, match="nothing was written under 'x'"):
        store.read("x", torch.empty(3))
    with pytest.raises(SwapError, match="no tensor 'y'"):
        store.delete("y")


def test_reading_into_the_wrong_dtype_or_size(store):
    store.write("x", torch.ones(4)).wait()
    with pytest.raises(SwapError, match=r"holds 4 x torch.float32.*3 x torch.float32"):
        store.read("x", torch.empty(3))
    with pytest.raises(SwapError, match=r"4 x torch.int32"):
        store.read("x", torch.empty(4, dtype=torch.int32))


def test_tensors_that_cannot_be_moved(store):
    with pytest.raises(SwapError, match=r"strides \(1, 4\)"):
        store.write("x", torch.ones(3, 4).t())
    with pytest.raises(SwapError, match="on meta"):
        store.write("x", torch.ones(3, device="meta"))
    assert "x" not in store


def test_space_limit(tmp_path):
    with NvmeStore(tmp_path, space_limit_bytes=16384) as store:
        assert store.capacity_bytes == 16384
        store.write("a", torch.ones(2048)).wait()  # 8 KiB
        with pytest.raises(SwapError, match=r"nvme_space allows \(16.4 kB, 16384 bytes\)"):
            store.write("b", torch.ones(2049))
        store.write("a", torch.ones(4096)).wait()  # grows in place to exactly the limit
        store.delete("a")
        store.write("b", torch.ones(2049)).wait()
        assert store.occupied_bytes == 12288


def test_reserve_refuses_a_disk_too_full_with_need_and_have(tmp_path, monkeypatch):
    with NvmeStore(tmp_path) as store:
        free = store._directory.free_bytes() // 4096 * 4096
        with pytest.raises(SwapError, match=rf"2 tensors need .*{4096 + free * 4} bytes.*free"):
            store.reserve({"small": TensorSpec(torch.float32, 3), "large": TensorSpec(torch.float32, free)})
        assert not list(store.directory.glob("*.swap")) and store.occupied_bytes == 0
    with pytest.raises(SwapError, match=r"the run need .* free"):
        NvmeStore(tmp_path, reserve_bytes=free * 2)
    assert not any(tmp_path.iterdir())


def test_write_budget_per_day(tmp_path, monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with NvmeStore(tmp_path, write_budget_bytes_per_day=8192) as store, caplog.at_level(logging.WARNING):
        store.write("a", torch.ones(3)).wait()
        assert "nvme_write_budget" not in caplog.text
        store.write("a", torch.ones(3)).wait()
        assert caplog.text.count("nvme_write_budget of 8.19 kB are written") == 1
        now[0] += 6 * 3600
        assert store.disk_bytes_written_per_day == pytest.approx(4 * 8192)
        with pytest.raises(SwapError, match=r"nvme_write_budget: 8.19 kB of 8.19 kB .*starts in 18.0 hours"):
            store.write("a", torch.full((3,), 2.0))
        out = torch.empty(3)
        store.read("a", out).wait()  # refused before anything was touched
        assert torch.equal(out, torch.ones(3))
        now[0] += 18 * 3600
        store.write("a", torch.full((3,), 2.0)).wait()
        with pytest.raises(SwapError, match="nvme_write_budget"):
            store.write("b", torch.ones(2000))


def test_unknown_backend_and_bad_aio_block(tmp_path):
    with pytest.raises(SwapError, match="no back end 'io_uring'"):
        NvmeStore(tmp_path, backend="io_uring")
    with pytest.raises(SwapError, match="queue_depth 0"):
        NvmeStore(tmp_path, aio={"queue_depth": 0})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("aio", [{"block_size": 1, "queue_depth": 1}, {"block_size": 10**14}, {"block_size": 5000}])
def test_absurd_aio_blocks_still_work(tmp_path, aio):
    with NvmeStore(tmp_path, aio=aio) as store:
        tensor = filled(20_001, torch.float32)
        out = torch.empty_like(tensor)
        store.write("x", tensor)
        store.read("x", out).wait()
        assert same_bytes(out, tensor)


def test_buffered_fallback_says_so_once_and_pads_nothing(tmp_path, monkeypatch, caplog):
    """A file system without O_DIRECT, as tmpfs was before Linux 6.6: EINVAL at open."""
    real = os.open

    def refuse(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with NvmeStore(tmp_path) as store:
                for numel in ODD_SIZES:
                    tensor = filled(numel, torch.bfloat16, numel, aligned=False)
                    out = torch.empty_like(tensor)
                    store.write("x", tensor)
                    store.read("x", out).wait()
                    assert same_bytes(out, tensor)
                assert store.disk_bytes_written == store.bytes_written
    said = [record.getMessage() for record in caplog.records if "O_DIRECT" in record.getMessage()]
    assert len(said) == 1 and "EINVAL" in said[0] and str(tmp_path) in said[0]


def test_dev_shm_works_and_adds_no_capacity(caplog):
    path = Path(f"/dev/shm/lazytrain_test_{os.getpid()}")
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with caplog.at_level(logging.WARNING), NvmeStore(path) as store:
        tensor = filled(67 * 211, torch.float32)
        out = torch.empty_like(tensor)
        store.write("x", tensor)
        store.read("x", out).wait()
        assert same_bytes(out, tensor) and store.capacity_bytes == 0
    assert "host memory" in caplog.text and str(path) in caplog.text
    assert not path.exists()


@pytest.mark.slow
def test_large_tensor_uses_64_bit_offsets(tmp_path):
    """2 GiB + 12 bytes; offsets, counts and one kernel call's limit all have to cope."""
    numel = (1 << 29) + 3
    tensor, out = aligned_empty(numel, torch.float32), aligned_empty(numel, torch.float32)
    tensor[0], tensor[(1 << 29) - 1], tensor[-1] = 1.0, 2.0, 3.0
    with NvmeStore(tmp_path) as store:
        store.write("x", tensor)
        store.read("x", out).wait()
    assert torch.equal(out, tensor)


# The end


def test_close_fails_what_is_queued_and_is_idempotent(tmp_path):
    gate = Gate("write")
    store = NvmeStore(tmp_path, aio={"intra_op_parallelism": 1}, throttle=gate)
    chain = [store.write("x", torch.ones(10)) for _ in range(600)]  # longer than a recursive finish would survive
    other = store.write("y", torch.ones(10))
    read = store.read("y", torch.empty(10))
    threading.Timer(0.1, gate.open.set).start()
    store.close()
    store.close()
    assert all(ticket.done() for ticket in (*chain, other, read))
    with pytest.raises(SwapError, match="closed before"):
        read.wait(0)
    with pytest.raises(SwapError, match="closed"):
        store.write("x", torch.ones(1))
    assert not any(tmp_path.iterdir())


def test_a_store_that_nobody_holds_is_closed(tmp_path):
    store = NvmeStore(tmp_path)
    store.write("x", torch.ones(3)).wait()
    names = {thread.name for thread in threading.enumerate()}
    assert any(name.startswith("lazytrain-nvme") for name in names)
    del store
    gc.collect()
    assert not any(tmp_path.iterdir())
    assert not any(thread.name.startswith("lazytrain-nvme") for thread in threading.enumerate())


def test_a_timeout_is_not_a_failure(tmp_path):
    gate = Gate("write")
    with NvmeStore(tmp_path, throttle=gate) as store:
        ticket = store.write("x", torch.ones(3))
        with pytest.raises(TimeoutError, match="write of 'x' not done"):
            ticket.wait(0.01)
        gate.open.set()
        ticket.wait(30)
        assert ticket.done()
