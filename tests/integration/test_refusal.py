"""What cannot fit is refused before LazyTrain allocates anything: no memory, no file, no directory is left."""

from __future__ import annotations

import threading
import tracemalloc

import psutil
import pytest
import torch
from torch import nn

from lazytrain_ds.errors import InfeasibleError
from tests.integration.training import config, one_process_group

WIDTH = 1024


class Wide(nn.Module):
    """About 100 MB of fp32 parameters: states would be 300 MB, and DeepSpeed's own copies 100 MB more."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("kind", "nvme"),
    [("checkpoint_all", False), ("checkpoint_all", True), pytest.param("auto", True, marks=pytest.mark.slow)],
)
def test_a_refusal_allocates_nothing(tmp_path, kind, nvme):
    import deepspeed

    one_process_group()
    places = {"report_dir": str(tmp_path / "report"), "profile": {"cache_dir": str(tmp_path / "cache")}}
    if nvme:
        (tmp_path / "disk").mkdir()
        places |= {"nvme_path": str(tmp_path / "disk"), "nvme_space": "1MB"}
    model = Wide()
    values = config({"host_memory": "50MB", "sequence_length": 8, "planner": {"kind": kind}, **places})

    def refused():
        with pytest.raises(InfeasibleError, match="host") as caught:
            deepspeed.initialize(model=model, config=values)
        _, need, have = next(each for each in caught.value.shortages if each[0] == "host")
        assert have < 50_000_000 < need

    refused()  # what is built once per process (kernels, caches, the probe's buffers) is not the refusal's
    threads = threading.active_count()
    process = psutil.Process()
    tracemalloc.start()
    before, grown = process.memory_info().rss, []
    ends = threading.Event()
    watcher = threading.Thread(target=lambda: watch(process, before, grown, ends))
    watcher.start()
    try:
        refused()
    finally:
        ends.set()
        watcher.join()
        tracemalloc.stop()
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert max(grown) < parameters / 4, f"{max(grown) / 1e6:.0f} MB while refusing"
    assert threading.active_count() <= threads
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.name.startswith("probe-") and path.parent.name == "cache" for path in left), left
    assert not (tmp_path / "report").exists()


def watch(process, before, grown, ends):
    while True:
        grown.append(process.memory_info().rss - before)
        if ends.wait(0.005):
            return
