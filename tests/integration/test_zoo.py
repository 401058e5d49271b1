"""Every model of the zoo under every kind of plan: to the same bits, and as plain PyTorch trains it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.integration.plans import random_plan
from tests.integration.training import Result, config, plan_block, rule_block, run, run_plain
from tests.integration.zoo import ZOO, features

STEPS = 3
# Not compared with stock ZeRO-3, which updates a parameter that got no gradient with the one it got before, and fails
# at its start on parameters without dimensions.
NOT_LIKE_STOCK = {"LayerDrop", "Scalars"}


def seeded(*arguments: Any, **keywords: Any) -> Result:
    random.seed(5)
    return run(*arguments, **keywords)


@pytest.mark.parametrize("name", ZOO)
def test_every_plan_trains_it_to_the_same_bits(name: str, tmp_path: Path) -> None:
    make, calls, seen = ZOO[name], features(STEPS), []
    kept = seeded(make, config(rule_block("keep_all")), calls, check=lambda e: seen.append(e.lazytrain_instance))
    plan = random_plan(seen[0], 1)
    for block in (rule_block("checkpoint_all_host"), rule_block("megatrain"), plan_block(plan, tmp_path)):
        seeded(make, config(block), calls).assert_identical(kept)
    random.seed(5)
    run_plain(make, config(None), calls).assert_close(kept)
    if name not in NOT_LIKE_STOCK:
        seeded(make, config(None), calls).assert_close(kept)


def test_blocks_that_a_glob_names_are_the_blocks() -> None:
    """Of two stages the first one becomes part of what comes before: other blocks, the same bits."""
    seen: list[Any] = []

    def look(engine: Any) -> None:
        seen.append([block.name for block in engine._lt_setup.resolved.table if block.kind == "block"])

    found, named = (
        run(ZOO["Nested"], config({**rule_block("megatrain"), **block}), features(STEPS), check=look)
        for block in ({}, {"blocks": "blocks.1.*"})
    )
    assert seen == [["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"], ["blocks.1.0", "blocks.1.1"]]
    named.gradients = found.gradients = []  # one per sub-group, and so per block
    named.assert_identical(found)
