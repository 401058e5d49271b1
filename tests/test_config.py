"""The "lazytrain" block: keys, sizes, errors that name the remedy, and what it replaces in the rest of the config."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazytrain_ds import config as module
from lazytrain_ds.config import (
    LazyTrainConfig,
    batch_hint,
    find_block,
    misspelt_keys,
    parse_size,
    refuse_features,
    require_resolved,
    require_stage_3,
    require_top_level,
)
from lazytrain_ds.errors import ConfigError, UnsupportedError
from lazytrain_ds.rewrite import rewrite

# DESIGN.md section 4, "The block's keys"
KEYS = [
    "enabled",
    "device_memory",
    "host_memory",
    "nvme_path",
    "nvme_space",
    "nvme_write_budget",
    "sequence_length",
    "micro_batch",
    "state_precision",
    "activations",
    "parameters",
    "optimizer_states",
    "blocks",
    "planner",
    "plan_file",
    "policy",
    "replan",
    "profile",
    "device",
    "report_dir",
]


def with_block(block: Any, **rest: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3}, "lazytrain": block, **rest}


def test_imports_neither_torch_nor_deepspeed(child_environment: dict[str, str]) -> None:
    code = "import sys, lazytrain_ds.config; print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=child_environment, capture_output=True)
    assert done.stdout.decode().strip() == "[]", done.stderr.decode()


def test_all_keys_of_the_design_and_no_others() -> None:
    assert sorted(LazyTrainConfig.model_fields) == sorted(KEYS)
    assert sorted(module.PlannerConfig.model_fields) == ["gap", "kind", "solver", "time_limit"]
    assert sorted(module.ProfileConfig.model_fields) == ["cache_dir", "refresh"]


# --- on and off ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, False, {"enabled": False}, {"enabled": False, "typo": 1}])
def test_off(block: Any) -> None:
    assert find_block(with_block(block)) is None
    assert find_block({}) is None


@pytest.mark.parametrize("block", [True, {}, "auto", {"enabled": True}, {"enabled": "auto"}])
def test_on_with_defaults(block: Any) -> None:
    assert find_block(with_block(block)) == LazyTrainConfig()


@pytest.mark.parametrize("block", [[], [{}], 1, 0, 3.5, "on", ""])
def test_neither_on_nor_off(block: Any) -> None:
    with pytest.raises(ConfigError, match=r'"lazytrain": .* is not an object'):
        find_block(with_block(block))


def test_auto_is_allowed_everywhere() -> None:
    everywhere = dict.fromkeys(KEYS, "auto")
    parsed = LazyTrainConfig.parse(everywhere)
    assert parsed == LazyTrainConfig(state_precision="auto", micro_batch="auto")
    nested = {"planner": dict.fromkeys(("kind", "solver", "time_limit", "gap"), "auto")}
    assert LazyTrainConfig.parse(nested | {"profile": {"cache_dir": "auto", "refresh": "auto"}}) == LazyTrainConfig()


def test_defaults_change_no_numerics() -> None:
    block = LazyTrainConfig()
    assert (block.state_precision, block.micro_batch) == ("fp32", "keep")


def test_every_available_value_is_kept() -> None:
    block = {
        "device_memory": "70GB",
        "host_memory": 10**11,
        "nvme_path": "/fast/disk",
        "nvme_space": "1TiB",
        "sequence_length": 4096,
        "activations": "checkpoint_all",
        "parameters": "host",
        "optimizer_states": "nvme",
        "blocks": "model.layers.*",
        "planner": {"kind": "milp", "solver": "scip", "time_limit": 30, "gap": 0},
        "plan_file": "plan.json",
        "policy": "my_package.policies:Mine",
        "report_dir": "runs/report",
    }
    parsed = LazyTrainConfig.parse(block).model_dump()
    assert parsed == LazyTrainConfig().model_dump() | block | {
        "device_memory": 70 * 10**9,
        "nvme_space": 2**40,
        "blocks": ("model.layers.*",),
    }


def test_block_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        LazyTrainConfig().device_memory = 1  # type: ignore[misc]


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("70GB", 70 * 10**9),
        ("65GiB", 65 * 2**30),
        ("65 gib", 65 * 2**30),
        ("1.5TB", 15 * 10**11),
        ("512B", 512),
        ("4096", 4096),
        (1, 1),
        (7e10, 70 * 10**9),
        ("10_000kB", 10**7),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes(text: object, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "70G", "70 gigs", "-1GB", 0, -5, True, None, 1.5, "nan", "infGB", "1e9", [], "9" * 30, "٣GB x"]
)
def test_sizes_refused(text: object) -> None:
    with pytest.raises(ValueError, match='"70GB", "65GiB" or "auto"'):
        parse_size(text)


@given(st.integers(1, 2**40), st.sampled_from(["B", "kB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_sizes_are_exact(count: int, unit: str) -> None:
    factor = parse_size(f"1{unit}")
    if count * factor < 2**63:
        assert parse_size(f"{count}{unit}") == count * factor


# --- errors of the block ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"device_memroy": 1}, '"lazytrain.device_memroy" is not a key; did you mean "lazytrain.device_memory"?'),
        ({"gpu_memroy_budget": 1}, 'did you mean "lazytrain.device_memory"?'),
        ({"ssd-path": "/x"}, 'did you mean "lazytrain.nvme_path"?'),
        ({"time_limit": 3}, '"lazytrain.time_limit" is not a key here; did you mean "lazytrain.planner.time_limit"?'),
        (
            {"planner": {"tme_limit": 3}},
            '"lazytrain.planner.tme_limit" is not a key; did you mean "lazytrain.pl',
        ),
        ({"profile": {"cachedir": "/x"}}, 'did you mean "lazytrain.profile.cache_dir"?'),
        ({"zzz": 1}, 'valid keys of "lazytrain" are enabled, device_memory,'),
        ({"planner": {"zzz": 1}}, 'valid keys of "lazytrain.planner" are kind, solver, time_limit, gap'),
        ({"planner": []}, '"lazytrain.planner": [] is not an object'),
        ({"planner": {"kind": "MILPs"}}, "did you mean 'milp'?"),
        ({"planner": {"solver": "hihgs"}}, "did you mean 'highs'?"),
        ({"planner": {"time_limit": 0}}, '"lazytrain.planner.time_limit": 0 is not a number above 0'),
        ({"planner": {"gap": -0.1}}, "is not a number of at least 0"),
        ({"device_memory": "lots"}, "\"lazytrain.device_memory\": 'lots' is not a size"),
        ({"device_memory": None}, '"lazytrain.device_memory": None is not a size'),
        ({"sequence_length": 0}, "is not a whole number of at least 1"),
        ({"sequence_length": 8.0}, "is not a whole number of at least 1"),
        ({"activations": "checkpoint"}, "did you mean 'checkpoint_all'?"),
        ({"parameters": "gpu"}, "is not one of 'auto', 'keep_all'"),
        ({"micro_batch": 4}, "is not one of 'keep', 'auto'"),
        ({"blocks": []}, "is not a glob"),
        ({"policy": "module.Class"}, 'is not "module:Class"'),
        ({"policy": "../evil:Class"}, 'is not "module:Class"'),
        ({"nvme_path": ""}, "is not a path"),
        ({"enabled": "yes"}, "is not true, false"),
        ({"device": {"emulated": {}}}, 'is not {"emulate": {...}}'),
    ],
)
def test_errors_name_the_key_and_the_remedy(block: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LazyTrainConfig.parse(block)
    assert text in str(caught.value)
    assert caught.value.__cause__ is None


def test_all_errors_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LazyTrainConfig.parse({"device_memroy": 1, "planner": {"gap": "x"}, "host_memory": "y"})
    assert len(str(caught.value).splitlines()) == 3


def test_a_plan_file_fixes_the_micro_batch() -> None:
    with pytest.raises(ConfigError, match=r'"lazytrain\.micro_batch": "auto" and .* exclude'):
        LazyTrainConfig.parse({"micro_batch": "auto", "plan_file": "plan.json"})


# --- the rest of the config ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["lazy_train", "LazyTrain", "lazytrian", "lazy-train", "lazytrain_ds", "lazytrainn"])
def test_misspelt_block(key: str) -> None:
    assert misspelt_keys({key: {}, "bf16": {}, "zero_optimization": {}}) == [key]


def test_known_keys_do_not_look_misspelt() -> None:
    usual = ["train_batch_size", "optimizer", "scheduler", "aio", "fp16", "_comment", "data_types", "lazytrain", "load"]
    assert misspelt_keys(dict.fromkeys(usual)) == []


@pytest.mark.parametrize("zero", [{}, {"stage": 2}, {"stage": True}, {"stage": "auto"}, True, False, None])
def test_other_stages(zero: Any) -> None:
    with pytest.raises(ConfigError, match=r'set "zero_optimization": {"stage": 3}'):
        require_stage_3({"zero_optimization": zero})


def test_stage_3_and_nesting() -> None:
    require_stage_3({"zero_optimization": {"stage": 3}})
    require_top_level({"zero_optimization": {"stage": 3}, "lazytrain": {}})
    require_top_level({"zero_optimization": True})
    with pytest.raises(ConfigError, match="move it to the top level"):
        require_top_level({"zero_optimization": {"lazytrain": {}}})


def test_auto_that_nobody_resolves() -> None:
    unresolved = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}},
        "scheduler": {"params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"reduce_bucket_size": "auto"},  # DeepSpeed drops these itself
    }
    with pytest.raises(ConfigError) as caught:
        require_resolved(unresolved)
    assert str(caught.value).startswith(
        '"train_batch_size", "gradient_clipping", "optimizer.params.lr", "scheduler.params.warmup_num_steps" are still '
    )
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r'^"train_batch_size" is still "auto"'):
        require_resolved(unresolved, batch_only=True)
    require_resolved({"train_batch_size": 8, "optimizer": None, "scheduler": []})


@pytest.mark.parametrize(
    ("train", "micro", "rounds", "advice"),
    [
        (7, 2, 1, ['"train_batch_size": 2', '"train_micro_batch_size_per_gpu": 7']),
        (7, 2, None, ['"train_batch_size": 6']),
        (8, 2, 2, ['"train_batch_size": 4', '"train_micro_batch_size_per_gpu": 4', '"gradient_accumulation_steps": 4']),
        (2, None, 4, ['"gradient_accumulation_steps": 1']),
        (8, 2, 4, None),
        (8, None, None, None),
        (None, 2, 4, None),
        ("auto", 2, 4, None),
        (8, 0, 4, None),
    ],
)
def test_advice_on_batch_sizes(train: Any, micro: Any, rounds: Any, advice: list[str] | None) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, (train, micro, rounds), strict=True) if value is not None}
    hint = batch_hint(config, 1)
    assert (hint is None) == (advice is None)
    assert all(part in (hint or "") for part in advice or [])
    assert batch_hint(config, 2) is None


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6))
def test_following_the_advice_works(train: int, micro: int, rounds: int) -> None:
    config = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": rounds}
    hint = batch_hint(config, 1)
    assert (hint is None) == (train == micro * rounds)
    for advice in (hint or "").partition("; set ")[2].split(" or ") if hint else []:
        key, value = advice.replace('"', "").split(": ")
        assert batch_hint(config | {key: int(value)}, 1) is None


@pytest.mark.parametrize(
    ("rest", "name"),
    [
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "super_offload"),
        ({"zero_optimization": {"zenflow": {}}}, "zenflow"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled"),
    ],
)
def test_features_that_exclude_each_other(rest: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf'{name}" and "lazytrain" exclude each other: it \w+ .*Remove "'):
        refuse_features(rest)


def test_features_that_are_off_are_fine() -> None:
    refuse_features(
        {
            "zero_optimization": {"offload_optimizer": {"super_offload": False}},
            "compile": {"deepcompile": False},
            "hybrid_engine": {"enabled": False},
        }
    )


# --- who wins --------------------------------------------------------------------------------------------------------

OURS = {
    "sub_group_size": 2**63 - 1,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 2**63 - 1,
    "stage3_max_reuse_distance": 0,
}


def test_rewritten_placement() -> None:
    new, replaced = rewrite(with_block({}))
    cpu = {"device": "cpu", "pin_memory": True}
    assert new["zero_optimization"] == {"stage": 3, "offload_param": cpu, "offload_optimizer": cpu, **OURS}
    assert [r.key for r in replaced] == ["zero_optimization.offload_param", "zero_optimization.offload_optimizer"]
    assert all("not set ->" in str(r) for r in replaced)
    assert new["lazytrain"] == {}


def test_rewriting_twice_changes_nothing_more() -> None:
    once, _ = rewrite(with_block({}, optimizer={"type": "AdamW"}))
    twice, replaced = rewrite(once)
    assert twice == once
    assert replaced == []


def test_argument_is_left_alone_and_the_rest_is_kept() -> None:
    user = with_block({}, aio={"block_size": 1}, gradient_clipping=1.0, custom=[{"a": 1}])
    user["zero_optimization"] |= {"overlap_comm": False, "reduce_bucket_size": 5, "sub_group_size": 3}
    before = copy.deepcopy(user)
    new, _ = rewrite(user)
    assert user == before
    assert {key: new[key] for key in ("aio", "gradient_clipping", "custom")} == {
        key: user[key] for key in ("aio", "gradient_clipping", "custom")
    }
    assert new["custom"] is not user["custom"]
    assert (new["zero_optimization"]["overlap_comm"], new["zero_optimization"]["reduce_bucket_size"]) == (False, 5)


def test_everything_replaced_is_reported_and_nothing_else() -> None:
    zero = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/x", "buffer_count": 8, "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": "auto",
        "max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_model_persistence_threshold": 10,
    }
    new, replaced = rewrite({"zero_optimization": zero})
    assert {r.key.removeprefix("zero_optimization."): r.new for r in replaced} == {
        "offload_param.device": "cpu",
        "offload_param.buffer_count": None,
        "sub_group_size": 2**63 - 1,
        "max_live_parameters": 2**63 - 1,
        "stage3_model_persistence_threshold": None,
    }
    assert all(r.why for r in replaced)
    assert new["zero_optimization"] == {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        **OURS,
    }


@pytest.mark.parametrize(
    ("zero", "pins"),
    [
        ({}, (True, True)),
        ({"offload_param": {"pin_memory": False}}, (False, False)),
        ({"offload_param": {"pin_memory": True}, "offload_optimizer": {"pin_memory": False}}, (True, False)),
        ({"cpu_offload": True, "cpu_offload_use_pin_memory": False}, (False, False)),
        ({"offload_optimizer": {"device": "nvme", "pin_memory": False}}, (False, False)),
    ],
)
def test_pin_memory_is_the_users(zero: dict[str, Any], pins: tuple[bool, bool]) -> None:
    rewritten = rewrite({"zero_optimization": {"stage": 3, **zero}})[0]["zero_optimization"]
    assert (rewritten["offload_param"]["pin_memory"], rewritten["offload_optimizer"]["pin_memory"]) == pins


@pytest.mark.parametrize(
    ("zero", "block", "path"),
    [
        ({"offload_param": {"device": "nvme", "nvme_path": "/a"}}, {}, "/a"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}, True, "/b"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}, {"nvme_path": "/mine"}, "/mine"),
        ({"offload_optimizer": {"device": "cpu", "nvme_path": "/b"}}, {}, "auto"),
        ({}, {}, "auto"),
    ],
)
def test_nvme_path_is_the_users(zero: dict[str, Any], block: Any, path: str) -> None:
    found = find_block({"zero_optimization": {"stage": 3, **zero}, "lazytrain": block})
    assert found is not None
    assert found.nvme_path == path


@pytest.mark.parametrize(
    ("zero", "flag", "after"),
    [
        ({}, None, False),  # offload is our doing: a client optimizer stays allowed
        ({"offload_optimizer": {"device": "none"}}, True, False),
        ({"offload_optimizer": {"device": "cpu"}}, None, None),  # the user's own offload: DeepSpeed's rule stands
        ({"cpu_offload": True}, True, True),
    ],
)
def test_client_optimizers_are_not_refused_because_of_us(zero: dict[str, Any], flag: Any, after: Any) -> None:
    rest = {} if flag is None else {"zero_force_ds_cpu_optimizer": flag}
    new, _ = rewrite({"zero_optimization": {"stage": 3, **zero}, **rest})
    assert new.get("zero_force_ds_cpu_optimizer") == after
