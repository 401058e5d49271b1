"""Make the configs of this directory and the table in README.md: `python ds_configs/generate.py [--only NAME]`.

For every card, host memory and model size: full fine-tuning with AdamW in fp32 where that fits, else with 8-bit states,
else nothing, and the table says what is short. Each file is what the `lazytrain plan` command in it writes; the test
runs the planner again (tests/test_ds_configs.py). Everything is predicted from data sheets; none of it ran on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from lazytrain_ds.commands.plan import planned_config, write_config  # noqa: E402
from lazytrain_ds.commands.question import Question, Traced, ask, read_config_file, trace  # noqa: E402
from lazytrain_ds.errors import format_bytes  # noqa: E402
from lazytrain_ds.hardware.presets import preset  # noqa: E402
from lazytrain_ds.planning.infeasible import leanest  # noqa: E402
from lazytrain_ds.planning.plan import Plan  # noqa: E402
from lazytrain_ds.planning.solve import solve  # noqa: E402
from lazytrain_ds.report.tables import speed_of  # noqa: E402

CARDS = ("rtx-3090", "rtx-4090", "a100-40gb", "a100-80gb", "h100-sxm", "h800-80gb", "h200")
HOSTS_GB = (64, 128, 256, 512)
MODELS = ("3b", "7b", "14b", "27b")
BASES = ("adamw", "8bit")
# Left for the system and the training script itself.
LEFT_OUT_GB = 6
NVME_GB = 2000


@dataclass(frozen=True)
class Case:
    """One machine and model."""

    card: str
    host_gb: int
    model: str

    @property
    def name(self) -> str:
        """Of the file, without its ending."""
        return f"{self.card}_{self.host_gb}gb_{self.model}"

    def command(self, base: str) -> list[str]:
        """What to type in the repository's root to make this config."""
        return [
            "plan", f"ds_configs/base_{base}.json", "--model", f"ds_configs/models/{self.model}.json",
            "--hardware", self.card, "--host-memory", f"{self.host_gb - LEFT_OUT_GB}GB", "--micro-batch", "auto",
            "--write-config", f"ds_configs/{self.name}.json",
        ]  # fmt: skip


def cases() -> list[Case]:
    """Every combination, small models and hosts first."""
    return [Case(card, host, model) for model in MODELS for card in CARDS for host in HOSTS_GB]


class Maker:
    """Plans cases; models are traced once each."""

    def __init__(self) -> None:
        self._traced: dict[str, Traced] = {}
        self._with_less: dict[tuple[str, str, str], Plan] = {}

    def question(self, case: Case, base: str, nvme_gb: int = 0) -> Question:
        """The instance of one case."""
        config = self.config(base)
        model = str(HERE / "models" / f"{case.model}.json")
        if case.model not in self._traced:
            self._traced[case.model] = trace(config, model, micro_batch="auto")
        hardware = preset(case.card, host_memory_bytes=(case.host_gb - LEFT_OUT_GB) * 10**9, nvme_bytes=nvme_gb * 10**9)
        return ask(config, model, hardware, micro_batch="auto", traced=self._traced[case.model])

    def plan(self, case: Case, base: str, question: Question) -> Plan:
        """The plan; the one for less host memory where that left a tenth of it free, since more buys nothing then."""
        key = (case.card, case.model, base)
        if key not in self._with_less:
            plan = solve(question.instance, kind=question.kind, solver=question.solver)
            assert plan.prediction is not None
            if plan.prediction.peak_bytes("host") <= 0.9 * question.instance.tier("host").usable_bytes:
                self._with_less[key] = plan
            return plan
        return self._with_less[key]

    @staticmethod
    def config(base: str) -> dict[str, Any]:
        """The config that plans start from."""
        return read_config_file(HERE / f"base_{base}.json")


def cell(maker: Maker, case: Case) -> tuple[str, dict[str, Any] | None]:
    """(text for the table, the config or None) of one case."""
    short = ""
    for base in BASES:
        question = maker.question(case, base)
        _, nearest = leanest(question.instance)
        if nearest.fits:
            plan = maker.plan(case, base, question)
            config = planned_config(maker.config(base), question.instance, plan, case.command(base))
            speed = speed_of(question.instance, plan)
            kind = "fp32" if base == "adamw" else "8-bit"
            return f"[{kind}, {speed.tokens_per_second:,.0f} tokens/s]({case.name}.json)", config
        short = ", ".join(f"{tier} {format_bytes(need - have)} short" for tier, need, have in nearest.shortages)
    _, nearest = leanest(maker.question(case, "8bit", nvme_gb=NVME_GB).instance)
    return f"{short}; fits with NVMe" if nearest.fits else short, None


def tables(cells: dict[Case, str]) -> Iterator[str]:
    """README sections, one per model."""
    for model in MODELS:
        rows = [case for case in cells if case.model == model]
        if not rows:
            continue
        yield f"\n## {model.upper()}\n"
        yield "| card | " + " | ".join(f"{host} GB host" for host in HOSTS_GB) + " |"
        yield "|---|" + "---|" * len(HOSTS_GB)
        for card in CARDS:
            texts = [cells.get(Case(card, host, model), "") for host in HOSTS_GB]
            if any(texts):
                yield f"| {card} | " + " | ".join(texts) + " |"


HEAD = """# Ready configs

Full fine-tuning, bf16, 4,096 tokens per sample, 16 samples per optimizer step, micro-batch chosen by the planner.
*fp32*: AdamW with fp32 states; *8-bit*: `HybridAdamW8bit`, where fp32 states do not fit. Elsewhere the cell says what
is short (with 8-bit states) and whether a 2 TB NVMe would make it fit (`"nvme_path"` in the block). Each file names the
`lazytrain plan` command that wrote it, under `_comment`; `python ds_configs/generate.py` writes them all and this page.

Speeds are predicted from data sheets (`lazytrain probe --list`). **None of this has been run on a GPU.** Of the host
memory 6 GB are left to the system. Model shapes: [`models/`](models); the optimizer and the rest of a config:
[`base_adamw.json`](base_adamw.json), [`base_8bit.json`](base_8bit.json). `quickstart_cpu.json` is the README's example.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="make just this file (name without .json); the table stays as it is")
    only = parser.parse_args().only
    maker, cells = Maker(), {}
    for case in cases():
        if only is not None and case.name != only:
            continue
        cells[case], config = cell(maker, case)
        target = HERE / f"{case.name}.json"
        if config is not None:
            write_config(str(target), config)
        else:
            target.unlink(missing_ok=True)
        print(f"{case.name}: {cells[case]}", flush=True)
    if only is None:
        (HERE / "README.md").write_text(HEAD + "\n".join(tables(cells)) + "\n")


if __name__ == "__main__":
    main()
