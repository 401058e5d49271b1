"""The ready configs: strict JSON, made by the command they name, and what the planner says about them now."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from types import ModuleType
from typing import Any

import pytest

from lazytrain_ds import cli
from lazytrain_ds.commands.question import ask, read_config_file
from lazytrain_ds.config import find_block, refuse_features, require_resolved, require_stage_3
from lazytrain_ds.hardware.presets import preset
from lazytrain_ds.planning.simulator import Simulator
from lazytrain_ds.planning.solve import solve
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "ds_configs"
READY = sorted(path.stem for path in FOLDER.glob("*gb_*b.json"))
# One that is planned in a second runs in CI; all of them are `slow`.
SEEDED = ("rtx-3090_128gb_3b",)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ds_configs_generate", FOLDER / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return config


def test_there_are_configs_for_every_card() -> None:
    cards = {name.partition("_")[0] for name in READY}
    assert cards == set(generator().CARDS)


@pytest.mark.parametrize("name", READY)
def test_a_config_is_complete_and_names_its_command(name: str) -> None:
    config = read(name)
    command, figures = config["_comment"]
    arguments = cli.make_parser().parse_args(shlex.split(command)[1:])
    assert arguments.write_config == f"ds_configs/{name}.json"
    made = generator()
    case = next(case for case in made.cases() if case.name == name)
    assert shlex.split(command)[1:] in [case.command(base) for base in made.BASES]
    assert "predicted" in figures
    sizes = [config[key] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    assert config["train_batch_size"] == sizes[0] * sizes[1] == 16
    require_stage_3(config)
    refuse_features(config)
    require_resolved(config)
    block = find_block(config)
    assert block is not None and block.sequence_length == 4096
    base = read_config_file(REPOSITORY / arguments.config)
    assert {key: config[key] for key in base if key != "train_batch_size"} == {
        key: value for key, value in base.items() if key != "train_batch_size"
    }


def test_the_table_says_for_every_case_what_there_is_or_what_is_short() -> None:
    made = generator()
    page = (FOLDER / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w.-]+gb_[\w]+)\.json\)", page))
    assert linked == set(READY)
    for model in made.MODELS:
        section = page.partition(f"## {model.upper()}\n")[2].partition("\n## ")[0]
        for card in made.CARDS:
            row = next(line for line in section.splitlines() if line.startswith(f"| {card} |"))
            cells = [cell.strip() for cell in row.split("|")[2:-1]]
            assert len(cells) == len(made.HOSTS_GB)
            for cell, host in zip(cells, made.HOSTS_GB, strict=True):
                assert (f"({card}_{host}gb_{model}.json)" in cell) or " short" in cell, (model, card, host)


def planned_again(name: str) -> None:
    """The planner, asked about exactly this config, still finds a plan that is about as quick as the file says."""
    config = read(name)
    typed = cli.make_parser().parse_args(shlex.split(config["_comment"][0])[1:])
    host = int(typed.host_memory.removesuffix("GB")) * 10**9
    question = ask(config, str(REPOSITORY / typed.model), preset(typed.hardware, host_memory_bytes=host))
    plan = solve(question.instance, kind=question.kind, solver=question.solver)
    assert Simulator(question.instance).run(plan).fits
    said = re.search(r"predicted: (\S+) s a step", config["_comment"][1])
    assert said is not None and plan.prediction is not None
    assert plan.prediction.step_seconds == pytest.approx(float(said[1]), rel=0.05)


@pytest.mark.parametrize("name", SEEDED)
def test_the_planner_agrees(name: str) -> None:
    planned_again(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", READY)
def test_the_planner_agrees_on_all(name: str) -> None:
    planned_again(name)
