"""`lazytrain convert`: every key accounted for, nothing of the user's lost, and the run it gives is the same one."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from lazytrain_ds import cli
from lazytrain_ds.commands.convert import convert
from lazytrain_ds.config import find_block
from lazytrain_ds.errors import ConfigError
from lazytrain_ds.rewrite import rewrite

CPU = {"device": "cpu", "pin_memory": True}
AUTO_BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
# Settings that occur in people's configs, by the tool they come with.
CONFIGS: dict[str, dict[str, Any]] = {
    "axolotl": {
        **AUTO_BATCH,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 0,
            "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },
    },
    "llama_factory": {
        **AUTO_BATCH,
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
            "overlap_comm": False, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "comms_config": {"verbose": False},
    },
    "nvme": {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "nvme", "buffer_count": 4, "pipeline_read": False},
            "offload_param": {"device": "nvme", "nvme_path": "/elsewhere", "pin_memory": False, "max_in_cpu": 1},
        },
        "aio": {"block_size": 1048576},
    },
    "none": {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "none", "pin_memory": True}},
    },
    "stage_2": {"train_batch_size": 8, "zero_optimization": {"stage": 2, "contiguous_gradients": False}},
    "bare": {"train_batch_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_run_is_the_one_that_the_block_alone_would_give(name: str) -> None:
    old = CONFIGS[name]
    before = copy.deepcopy(old)
    new, _ = convert(old)
    assert old == before
    zero = {**old.get("zero_optimization", {}), "stage": 3}
    direct = {**old, "zero_optimization": zero, "lazytrain": {}}
    assert rewrite(new)[0]["zero_optimization"] == rewrite(direct)[0]["zero_optimization"]
    assert find_block(new) == find_block(direct)
    rest = {"zero_optimization", "lazytrain", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"}
    assert {k: v for k, v in new.items() if k not in rest} == {k: v for k, v in old.items() if k not in rest}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_with_the_new_config_replaces_nothing_more_of_the_users(name: str) -> None:
    new, _ = convert(CONFIGS[name])
    set_by_user = [item for item in rewrite(new)[1] if item.old is not None]
    assert set_by_user == []


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_of_the_old_and_the_new_config_has_its_line(name: str) -> None:
    old = CONFIGS[name]
    new, lines = convert(old)
    said = {line.key for line in lines}
    for config, gone in ((old, ("removed", "moved")), (new, ())):
        for key in config:
            if key == "zero_optimization":
                for inner, value in config[key].items():
                    if inner.startswith("offload_"):
                        for part in value:
                            present = f"{key}.{inner}.{part}" in said
                            assert present or (config is new and part == "device"), (inner, part)
                    else:
                        assert f"{key}.{inner}" in said
            else:
                assert key in said, gone
    assert all(line.why for line in lines)


def test_what_happens_to_each_kind_of_key() -> None:
    old = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**CPU, "ratio": 0.3, "super_offload": True},
            "zenflow": {"topk_ratio": 0.1},
            "cpu_offload": True,
            "aio": {"block_size": 1},
            "reduce_bucket_size": 0,
            "stage3_param_persitance_threshold": 5,
        },
        "hybrid_engine": {"enabled": True},
        "compile": {"deepcompile": True, "offload_opt_states": True},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    new, lines = convert(old)
    what = {line.key.removeprefix("zero_optimization."): line.what for line in lines}
    assert what == {
        "stage": "kept", "offload_optimizer.device": "removed", "offload_optimizer.pin_memory": "removed",
        "offload_optimizer.ratio": "removed", "offload_optimizer.super_offload": "removed", "zenflow": "removed",
        "cpu_offload": "removed", "aio": "moved", "reduce_bucket_size": "removed",
        "stage3_param_persitance_threshold": "removed", "hybrid_engine": "removed", "compile.deepcompile": "removed",
        "compile": "kept", "activation_checkpointing": "kept", "lazytrain": "added",
    }  # fmt: skip
    why = {line.key: line.why for line in lines}
    assert "misspelt" in why["zero_optimization.stage3_param_persitance_threshold"]
    assert "never changes results" in why["zero_optimization.zenflow"]
    assert new == {
        "zero_optimization": {"stage": 3}, "compile": {"offload_opt_states": True}, "aio": {"block_size": 1},
        "activation_checkpointing": {"cpu_checkpointing": True}, "lazytrain": {},
    }  # fmt: skip


def test_a_block_that_is_there_stays_and_is_checked() -> None:
    new, lines = convert({"zero_optimization": {"stage": 3}, "lazytrain": {"device_memory": "20GB"}})
    assert new["lazytrain"] == {"device_memory": "20GB"}
    assert [line.what for line in lines if line.key == "lazytrain"] == ["kept"]
    with pytest.raises(ConfigError, match="did you mean"):
        convert({"zero_optimization": {"stage": 3}, "lazytrain": {"device_memroy": "20GB"}})
    with pytest.raises(ConfigError, match="move it to the top level"):
        convert({"zero_optimization": {"stage": 3, "lazytrain": {}}})


def test_deepspeed_accepts_what_the_command_writes(tmp_path) -> None:
    from lazytrain_ds.runtime.hooks import _let_deepspeed_parse

    for name, old in CONFIGS.items():
        new, _ = convert({key: value for key, value in old.items() if value != "auto"})
        new.pop("fp16", None), new.pop("bf16", None)
        assert _let_deepspeed_parse({**new, "train_batch_size": 8}).zero_config.stage == 3, name


def test_the_command(tmp_path, capsys) -> None:
    old, target = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("// mine\n" + json.dumps(CONFIGS["axolotl"])[:-1] + ",}")
    assert cli.main(["convert", str(old)]) == 0
    text = capsys.readouterr().out
    table, _, config = text.partition("The new config")
    assert max(map(len, table.splitlines())) <= 100
    assert json.loads(config.partition("\n")[2]) == convert(CONFIGS["axolotl"])[0]
    assert cli.main(["convert", str(old), "-o", str(target)]) == 0
    assert json.loads(target.read_text()) == convert(CONFIGS["axolotl"])[0]
    assert f"wrote {target}" in capsys.readouterr().out.replace("\n", "")
    assert cli.main(["convert", str(old), "-o", str(target)]) == 2
    assert "exists; --force overwrites it" in capsys.readouterr().err.replace("\n", " ")
    assert cli.main(["convert", str(old), "-o", str(target), "--force", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == json.loads(target.read_text())
    assert {line["what"] for line in found["lines"]} >= {"kept", "removed", "added"}
    assert cli.main(["convert", str(tmp_path / "none.json")]) == 2


def test_a_misspelt_block_is_named_and_kept():
    new, lines = convert({"train_batch_size": 8, "lazytrian": {"device_memory": "2GB"}})
    assert new["lazytrian"] == {"device_memory": "2GB"}
    (why,) = (line.why for line in lines if line.key == "lazytrian")
    assert 'looks like "lazytrain" misspelt' in why
