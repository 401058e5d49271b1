"""Bytes that the kernel counts for this process' disk transfers are those of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazytrain_ds.planning.simulator import predict
from tests.runtime.checkpoint_tools import engine_under, steps
from tests.runtime.test_nvme_tiers import Wide


def kernel_bytes() -> dict[str, int]:
    """What went through the block layer for this process so far."""
    with open("/proc/self/io") as file:
        counted = dict(line.split(": ") for line in file)
    return {"nvme_read": int(counted["read_bytes"]), "nvme_write": int(counted["write_bytes"])}


@pytest.mark.parametrize(("plan", "optimizer"), [("nvme", "fp32"), ("mixed", "fp32"), ("nvme", "8bit")])
def test_kernel_counted_bytes_are_the_plans(tmp_path, plan, optimizer):
    with engine_under(plan, tmp_path, "fp32", optimizer, make=lambda: Wide(515)) as engine:
        store = engine._lt_book.nvme_store
        if not store.report.direct_io.supported:
            pytest.skip("no direct I/O here: the page cache hides what reaches the disk")
        steps(engine, 0, 2)
        engine.optimizer.drain()
        before = kernel_bytes()
        own = {"nvme_read": store.disk_bytes_read, "nvme_write": store.disk_bytes_written}
        steps(engine, 2, 5)
        engine.optimizer.drain()
        after = kernel_bytes()
        prediction = predict(engine.lazytrain_instance, replace(engine.lazytrain_plan, prediction=None))
        planned = {channel.channel: channel.byte_count for channel in prediction.channels}
        measured = {"nvme_read": store.disk_bytes_read, "nvme_write": store.disk_bytes_written}
    for channel, moved in measured.items():
        counted = (after[channel] - before[channel]) / 3
        assert counted > 2**20
        assert counted == pytest.approx((moved - own[channel]) / 3, rel=0.005), "the store's own count"
        assert counted == pytest.approx(planned[channel], rel=0.02), channel
