"""A user's script that resumes from its last checkpoint, and that can be killed at a chosen moment. Run as a module.

Each line of the standard input is one run: a JSON object with `directory` (checkpoints in `saved`, results in
`result.pt`), `plan`, `optimizer`, `steps`, `kill` ([event number, milliseconds after it]), and, if not true, `destroy`,
`save`, `result`. Runs are forks of this process, which has imported everything: a killed run costs no second import.
One JSON line comes back for each: exit status, events seen, peak of memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.integration.training import loss_of
from tests.runtime.checkpoint_tools import batch, block_of, everything, settings
from tests.runtime.test_nvme_tiers import WIDTH, Wide
from tests.runtime.zero3 import one_process_group


class Killer:
    """Counts events and ends the process, as the OOM killer would, some milliseconds after one of them."""

    def __init__(self, kill: list[float] | None) -> None:
        self.kill = kill
        self.seen: list[str] = []

    def event(self, name: str) -> None:
        """One of the moments a run can be killed at."""
        self.seen.append(name)
        if self.kill is not None and len(self.seen) == self.kill[0]:
            print(json.dumps({"killed after": name}), file=sys.stderr, flush=True)
            threading.Timer(self.kill[1] / 1e3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def watch_saves(self) -> None:
        """Events before and after every file of a checkpoint."""
        original = torch.save

        def save(*args: Any, **kwargs: Any) -> Any:
            self.event("file begins")
            result = original(*args, **kwargs)
            self.event("file written")
            return result

        torch.save = save


@contextmanager
def anonymous_peak() -> Iterator[dict[str, int]]:
    """Peak of the process' own memory in bytes (RssAnon: mapped files, which the kernel takes back, do not count)."""
    found = {"peak": 0}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    found["peak"] = max(found["peak"], int(line.split()[1]) * 1024)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        stop.set()
        watcher.join()


def train(run: dict[str, Any]) -> None:
    import deepspeed

    directory = Path(run["directory"])
    killer = Killer(run.get("kill"))
    killer.watch_saves()
    one_process_group()
    width = run.get("width", WIDTH)
    block = block_of(run["plan"], directory, "fp32", run["optimizer"])
    with anonymous_peak() as memory:
        torch.manual_seed(0)
        engine, *_ = deepspeed.initialize(model=Wide(width), config=settings(block, "fp32", run["optimizer"]))
        if (directory / "saved" / "latest").exists() or run.get("must_resume"):
            engine.load_checkpoint(str(directory / "saved"))
            killer.event("loaded")
        while engine.global_steps < run["steps"]:
            for number in range(2 * engine.global_steps, 2 * engine.global_steps + 2):
                loss = loss_of(engine(batch(number, "fp32")))
                killer.event("forward")
                engine.backward(loss)
                killer.event("backward")
                engine.step()
                killer.event("step")
            if run.get("save", True):
                engine.save_checkpoint(str(directory / "saved"), tag=f"step{engine.global_steps % 2}")
                killer.event("saved")
    Path(directory, "report.json").write_text(json.dumps({"events": killer.seen, "peak": memory["peak"]}))
    if run.get("result", True):
        torch.save(everything(engine), directory / "result.pt")
    if run.get("destroy", True):
        engine.destroy()


def main() -> None:
    for line in sys.stdin:
        run = json.loads(line)
        child = os.fork()
        if child == 0:
            sys.stdin.close()
            sys.stdout = sys.stderr
            train(run)
            return  # the interpreter ends as any script's does
        _, status = os.waitpid(child, 0)
        report = Path(run["directory"], "report.json")
        found = json.loads(report.read_text()) if report.exists() else {}
        report.unlink(missing_ok=True)
        print("RESULT " + json.dumps({"status": os.waitstatus_to_exitcode(status), **found}), flush=True)


if __name__ == "__main__":
    main()
