"""What the block's keys leave open, and plans that come from files: errors say what to do."""

from __future__ import annotations

import json

import pytest

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import ConfigError
from lazytrain_ds.runtime.questions import allowed_by, plan_from_file
from tests.integration.plans import random_plan
from tests.planning.tiny import tiny_instance


@pytest.mark.parametrize(
    ("block", "situation", "advice"),
    [
        ({"activations": "nvme"}, {}, "'host'; give the directory of the swap files, \"lazytrain.nvme"),
        ({"parameters": "nvme"}, {}, '"lazytrain.nvme_path"'),
        ({"optimizer_states": "nvme", "nvme_path": "/x"}, {"world_size": 2}, "with more than one rank"),
        ({"parameters": "nvme", "nvme_path": "/x"}, {"world_size": 2}, "with more than one rank"),
        ({"optimizer_states": "nvme", "nvme_path": "/x"}, {"own_optimizer": False}, '"HybridAdamW8bit" in the config'),
        ({"optimizer_states": "device"}, {"on_cpu": False}, "on a GPU states are where they are updated"),
    ],
)
def test_a_tier_that_cannot_be_says_why_and_what_to_do(block, situation, advice):
    with pytest.raises(ConfigError, match=r'^"lazytrain\.\w+": "\w+" cannot be carried out here, only ') as caught:
        allowed_by(LazyTrainConfig.parse(block), **{"world_size": 1, **situation})
    assert advice in str(caught.value)


def test_a_forced_tier_is_the_only_one():
    allowed = allowed_by(LazyTrainConfig.parse({"parameters": "nvme", "nvme_path": "/x"}), 1)
    assert allowed.parameter_tiers == ("nvme",) and "nvme" in allowed.boundary_tiers


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_plan_of_a_run_and_an_answer_of_lazytrain_plan(tmp_path, wrapped):
    plan, path = random_plan(tiny_instance(), 3), tmp_path / "plan.json"
    text = plan.to_json()
    path.write_text(json.dumps({"fits": True, "plan": json.loads(text), "instance": None}) if wrapped else text)
    assert plan_from_file(str(path)) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("{'a': 1}", "cannot be read"),
        ("[1]", "is not a plan"),
        ('{"train_batch_size": 1}', "is not a plan (blocks: Field required); a run leaves its plan in `report_dir`"),
        ('{"fits": false, "plan": null}', 'says "does not fit"'),
    ],
)
def test_what_is_no_plan_is_named_with_its_file(tmp_path, text, message):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        plan_from_file(str(path))
    assert message in str(caught.value) and str(path) in str(caught.value)
