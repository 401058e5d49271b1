"""U20: a machine on which DeepSpeed's async_io cannot be built or loaded trains from NVMe all the same."""

from __future__ import annotations

import pytest

from tests.integration.training import config, gpt, rule_block, run, tokens


@pytest.fixture
def no_libaio(monkeypatch):
    """As where libaio is missing, or lacks a symbol: the probe says no, and loading it anyway fails."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    def load(self, verbose=True):
        raise RuntimeError("Unable to JIT load the async_io op")

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    monkeypatch.setattr(AsyncIOBuilder, "load", load)


@pytest.mark.parametrize("how", ["the block's path", "DeepSpeed's own sections"])
def test_u20_without_libaio_everything_on_nvme_trains_to_the_same_bits(no_libaio, tmp_path, how):
    def make():
        return gpt(width=512, blocks=2)

    swap, settings = tmp_path / "swap", config({})
    settings["lazytrain"] |= dict.fromkeys(("activations", "parameters", "optimizer_states"), "nvme")
    if how == "the block's path":
        settings["lazytrain"]["nvme_path"] = str(swap)
    else:
        for name in ("offload_param", "offload_optimizer"):
            settings["zero_optimization"][name] = {"device": "nvme", "nvme_path": str(swap), "buffer_count": 4}
        settings["aio"] = {"block_size": 262144, "queue_depth": 8}
    seen = []

    def look(engine):
        store = engine._lt_book.nvme_store
        seen.append((store.backend, store.bytes_written, store.bytes_read))
        assert store.directory.parent == swap
        assert all(block.optimizer.tier == "nvme" for block in engine.lazytrain_plan.blocks)

    kept = run(make, config(rule_block("keep_all")), tokens(2))
    run(make, settings, tokens(2), check=look).assert_identical(kept)
    ((backend, written, read),) = seen
    states = 2 * 4 * sum(parameter.numel() for parameter in make().parameters())
    assert backend == "threads" and min(written, read) > states
