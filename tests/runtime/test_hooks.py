"""The wrappers around DeepSpeed: what reaches the original, what reaches our engine, whose error comes first."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from pydantic import ValidationError

import lazytrain_ds.config as block_config
from lazytrain_ds.errors import ConfigError, UnsupportedError
from lazytrain_ds.runtime import hooks, overrides

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def config(**changes: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "lazytrain": {}}
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


class Recorder:
    """Stands for `deepspeed.initialize` (`stock`) and for our engine (`ours`) and records the calls."""

    def __init__(self) -> None:
        self.stock: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.ours: list[SimpleNamespace] = []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    engine = ModuleType("lazytrain_ds.runtime.engine")

    def ours(block: Any, original: Any, args: Any, kwargs: Any, rewritten: Any) -> str:
        shown = getattr(kwargs.get("args"), "deepspeed_config", None)
        recorder.ours.append(
            SimpleNamespace(
                block=block, original=original, args=args, kwargs=kwargs, rewritten=rewritten, args_config=shown
            )
        )
        return "ours"

    engine.initialize = ours  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "lazytrain_ds.runtime.engine", engine)
    # torch.distributed counts as started, so that no test touches the environment unless it means to.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    return recorder


@pytest.fixture
def initialize(calls: Recorder):
    """A fresh wrapper around a stand-in with the real signature."""
    import functools

    @functools.wraps(deepspeed.initialize.__wrapped__)
    def stock(*args: Any, **kwargs: Any) -> str:
        calls.stock.append((args, kwargs))
        return "stock"

    return hooks._wrap_initialize(stock)


def test_installed_once_and_thin() -> None:
    first = deepspeed.initialize
    hooks.install()
    assert deepspeed.initialize is first
    assert not hasattr(first.__wrapped__, "__wrapped__")
    assert not hasattr(deepspeed.zero.Init.__init__.__wrapped__, "__wrapped__")


@pytest.mark.parametrize("block", [None, False, {"enabled": False}, {"enabled": False, "nonsense": 1}])
def test_without_the_block_the_original_gets_exactly_its_arguments(initialize, calls: Recorder, block: Any) -> None:
    given = config(lazytrain=block, zero_optimization={"stage": 1})
    before = json.dumps(given)
    model = object()
    assert initialize(None, model, config=given) == "stock"
    ((args, kwargs),) = calls.stock
    assert args == (None, model)
    assert kwargs == {"config": given}
    assert kwargs["config"] is given
    assert json.dumps(given) == before
    assert calls.ours == []


def test_absent_block_unreadable_and_contradictory_configs_reach_the_original(
    initialize, calls: Recorder, tmp_path: Path
) -> None:
    twice = tmp_path / "twice.json"
    twice.write_text('{"lazytrain": {}, "lazytrain": {}}')
    (tmp_path / "empty.json").write_text("")
    on = config()
    for kwargs in (
        {},
        {"config": None},
        {"config": {}},
        {"config": str(tmp_path / "missing.json")},
        {"config": str(tmp_path)},
        {"config": str(twice)},
        {"config": str(tmp_path / "empty.json")},
        {"config": 7},
        {"config": on, "args": SimpleNamespace(deepspeed_config="x.json")},
        {"no_such_argument": 1},
    ):
        assert initialize(**kwargs) == "stock"
        assert calls.stock.pop() == ((), kwargs)
    assert calls.ours == []


def as_path(given: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    # hjson: comments and a trailing comma, as DeepSpeed reads them
    path.write_text("// a comment\n" + json.dumps(given)[:-1] + ", # another\n}")
    return str(path)


@pytest.mark.parametrize(
    "way", ["dict", "config_params", "path", "pathlib", "base64", "args", "deepscale", "positional"]
)
def test_every_way_to_pass_a_config_reaches_our_engine(initialize, calls: Recorder, tmp_path: Path, way: str) -> None:
    given = config(lazytrain={"sequence_length": 64})
    path = as_path(given, tmp_path)
    args, kwargs = (), {"model": torch.nn.Linear(1, 1)}
    namespace = argparse.Namespace(local_rank=-1)
    if way == "dict":
        kwargs["config"] = given
    elif way == "config_params":
        kwargs["config_params"] = given
    elif way == "path":
        kwargs["config"] = path
    elif way == "pathlib":
        kwargs["config"] = Path(path)
    elif way == "base64":
        kwargs["config"] = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
    elif way == "positional":
        args, kwargs = (None, kwargs["model"], None, None, None, None, 29500, None, None, None, given), {}
    else:
        setattr(namespace, "deepspeed_config" if way == "args" else "deepscale_config", path)
        kwargs["args"] = namespace
    assert initialize(*args, **kwargs) == "ours"
    (call,) = calls.ours
    assert call.block.sequence_length == 64
    assert call.kwargs["config"] is call.rewritten
    assert call.rewritten["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert "config_params" not in call.kwargs
    assert call.args == ()
    assert call.args_config is None  # DeepSpeed refuses a config in both places
    if "args" in kwargs:
        assert call.kwargs["args"] is namespace  # not a copy: DeepSpeed writes local_rank into it
        assert path in (getattr(namespace, n, None) for n in ("deepspeed_config", "deepscale_config"))
    assert call.original(**call.kwargs) == "stock"


def test_users_dict_is_left_alone(initialize, calls: Recorder) -> None:
    shared = object()
    given = config(zero_optimization={"stage": 3, "sub_group_size": 5, "leaf_module": {"names": ["a"]}}, extra=shared)
    before = {**given, "zero_optimization": dict(given["zero_optimization"])}
    initialize(config=given)
    assert given == before
    assert calls.ours[0].rewritten["extra"] is shared
    calls.ours[0].rewritten["zero_optimization"]["leaf_module"]["names"].append("b")
    assert given["zero_optimization"]["leaf_module"] == {"names": ["a"]}


def test_replaced_keys_are_said_once(initialize, calls: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    given = config(
        zero_optimization={
            "stage": 3,
            "sub_group_size": 1e9,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "ratio": 0.3},
        }
    )
    hooks._wrap_init(lambda self, config_dict_or_path=None, config=None: None)(object(), given)
    from_init = capsys.readouterr().out
    initialize(config=given)
    assert capsys.readouterr().out == ""
    initialize(config=given)
    assert capsys.readouterr().out == from_init
    lines = from_init.splitlines()
    assert len(lines) == len(set(lines)) == 4
    assert any("sub_group_size: 1000000000.0 -> unlimited" in line for line in lines)
    assert any("offload_optimizer.ratio: 0.3 -> removed" in line for line in lines)


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    hooks.say("x")
    assert capsys.readouterr().out == ""


def test_misspelt_block_is_a_warning_once(initialize, calls: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    given = config(lazytrain=..., lazy_trian={})
    assert (initialize(config=given), initialize(config=given)) == ("stock", "stock")
    out = capsys.readouterr().out
    assert out.count('"lazy_trian" looks like "lazytrain"') == 1


# --- whose error comes first -----------------------------------------------------------------------------------------

USER_CASES = {
    # name: (config as people have it, DeepSpeed's own error, part of its message)
    "C03": ({"stage": 3, "reduce_bucket_size": 0}, ValidationError, "reduce_bucket_size"),
    "C05": ({"stage": 3, "stage3_param_persitance_threshold": 1}, ValidationError, "stage3_param_persitance_threshold"),
    "C12": ({"stage": 3, "cpu_offload": True, "cpu_offload_params": True}, ValidationError, "cpu_offload_params"),
    "C19": ({"stage": 3, "aio": {"block_size": 1}}, ValidationError, "aio"),
    "C21": (
        {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "buffer_size": 2e9}},
        ValidationError,
        "buffer_size",
    ),
    "removed key": ({"stage": 3, "mics_shard_size": 1}, Exception, "MiCS"),
}


@pytest.mark.parametrize("name", USER_CASES)
def test_deepspeeds_own_error_comes_first_and_unchanged(initialize, calls: Recorder, name: str) -> None:
    zero, kind, text = USER_CASES[name]
    given = config(zero_optimization=zero, lazytrain={"no_such_key": 1})
    with pytest.raises(kind, match=text) as ours:
        initialize(config=given)
    with pytest.raises(kind) as stock:
        deepspeed.DeepSpeedConfig({key: value for key, value in given.items() if key != "lazytrain"})
    assert str(ours.value) == str(stock.value)
    assert type(ours.value) is type(stock.value)
    assert ours.value.__cause__ is None
    assert calls.ours == []


@pytest.mark.parametrize(
    "zero",
    [
        {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu"},
            "sub_group_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },  # C01
        {
            "stage": 3,
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e6,
            "sub_group_size": 1e12,
        },  # C08
        {"stage": 3, "offload_param": {"device": "none", "pin_memory": True}},  # C09
        {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False},
        {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "rel", "buffer_size": 1e8, "max_in_cpu": 5e7},
            "offload_optimizer": {"device": "nvme", "nvme_path": "rel", "fast_init": True, "pipeline_read": True},
        },  # C18
        {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": "auto", "offload_param": {"pin_memory": "auto"}},
    ],
)
def test_real_configs_are_rewritten_to_something_deepspeed_parses(initialize, calls: Recorder, zero: Any) -> None:
    initialize(config=config(zero_optimization=zero))
    parsed = deepspeed.DeepSpeedConfig(calls.ours[0].rewritten).zero_config
    assert (parsed.offload_param.device, parsed.offload_optimizer.device) == ("cpu", "cpu")
    assert parsed.offload_optimizer.ratio == 1.0
    assert (parsed.prefetch_bucket_size, parsed.param_persistence_threshold, parsed.max_reuse_distance) == (0, 0, 0)
    assert parsed.sub_group_size == parsed.max_live_parameters == 2**63 - 1


def test_batch_contradiction_is_deepspeeds_error_with_our_advice(initialize, calls: Recorder) -> None:
    given = config(train_batch_size=7)
    with pytest.raises(AssertionError, match="train_batch_size is not equal") as caught:
        initialize(config=given)
    assert any('"train_batch_size": 6' in note for note in caught.value.__notes__)
    assert calls.ours == []


def test_both_precisions_is_deepspeeds_error(initialize, calls: Recorder) -> None:
    with pytest.raises(AssertionError, match="bfloat16 and fp16"):
        initialize(config=config(bf16={"enabled": True}, fp16={"enabled": True}))


@pytest.mark.parametrize("key", ["train_batch_size", "gradient_clipping"])
def test_auto_without_hugging_face_is_named(initialize, calls: Recorder, key: str) -> None:
    with pytest.raises(ConfigError, match=f'"{key}" is still "auto"'):
        initialize(config=config(**{key: "auto"}))


def test_errors_of_the_block_are_ours(initialize, calls: Recorder) -> None:
    for given, kind, text in (
        (config(lazytrain={"device_memroy": 1}), ConfigError, "device_memory"),
        (config(lazytrain=[]), ConfigError, "is not an object"),
        (config(zero_optimization={"stage": 2}), ConfigError, "stage 3"),
        (config(lazytrain=..., zero_optimization={"stage": 3, "lazytrain": {}}), ConfigError, "top level"),
        (config(compile={"deepcompile": True}), UnsupportedError, "compile.deepcompile"),
        (config(hybrid_engine={"enabled": True}), UnsupportedError, "hybrid_engine"),
        (config(zero_optimization={"stage": 3, "zenflow": {"topk_ratio": 0.1}}), UnsupportedError, "zenflow"),
        (
            config(zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}),
            UnsupportedError,
            "super_offload",
        ),
    ):
        with pytest.raises(kind, match=text):
            initialize(config=given)
    assert calls.stock == calls.ours == []


def test_pipeline_module_is_refused(initialize, calls: Recorder) -> None:
    model = object.__new__(deepspeed.PipelineModule)
    with pytest.raises(UnsupportedError, match="PipelineModule"):
        initialize(model=model, config=config())
    assert initialize(model=model, config=config(lazytrain=None)) == "stock"


# --- zero.Init -------------------------------------------------------------------------------------------------------


def wrapped_init(seen: list[Any]):
    def original(self: Any, module: Any = None, config_dict_or_path: Any = None, config: Any = None) -> None:
        seen.append((module, config_dict_or_path, config))

    return hooks._wrap_init(original)


@pytest.mark.parametrize("name", ["config_dict_or_path", "config"])
def test_zero_init_gets_the_rewritten_config(calls: Recorder, name: str) -> None:
    seen: list[Any] = []
    init = wrapped_init(seen)
    given = config(zero_optimization={"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}})
    init(object(), "module", **{name: given})
    module, *configs = seen[0]
    (rewritten,) = [c for c in configs if c is not None]
    assert module == "module"
    assert rewritten["zero_optimization"]["offload_param"]["device"] == "cpu"
    init(object(), None, rewritten)  # as DeepSpeed's own engine does with what it was given
    assert seen[1][1] is rewritten


def test_zero_init_without_the_block_is_untouched(calls: Recorder) -> None:
    seen: list[Any] = []
    init = wrapped_init(seen)
    off = config(lazytrain=None)
    init(object(), "m", off)
    init(object(), "m")
    assert seen[0][1] is off
    assert seen[1] == ("m", None, None)


def test_zero_init_lets_hugging_face_resolve_the_scheduler_later(calls: Recorder) -> None:
    given = config(scheduler={"type": "WarmupLR", "params": {"total_num_steps": "auto"}}, gradient_clipping="auto")
    wrapped_init([])(object(), None, given)
    with pytest.raises(ConfigError, match="train_batch_size"):
        wrapped_init([])(object(), None, config(train_batch_size="auto"))


# --- plain python ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch, calls: Recorder) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    for name in (*LAUNCHER, *hooks._LAUNCHED):
        monkeypatch.setenv(name, "0")  # so that the patch restores it whatever the code does
        monkeypatch.delenv(name)
    return monkeypatch


def test_plain_python_becomes_a_group_of_one(initialize, no_launcher, calls: Recorder) -> None:
    import os

    initialize(config=config(lazytrain=None))
    assert not any(name in os.environ for name in LAUNCHER)
    initialize(config=config())
    assert [os.environ[name] for name in LAUNCHER[:4]] == ["0", "0", "1", "127.0.0.1"]
    assert 1024 <= int(os.environ["MASTER_PORT"]) < 65536


@pytest.mark.parametrize("name", ["RANK", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_launcher_is_left_alone(initialize, no_launcher, calls: Recorder, name: str) -> None:
    import os

    no_launcher.setenv(name, "1")
    initialize(config=config())
    assert "MASTER_PORT" not in os.environ


# --- the table of overridden names -----------------------------------------------------------------------------------


def test_table_matches_the_installed_deepspeed() -> None:
    assert overrides.mismatches() == []
    names = [entry.name for entry in overrides.OVERRIDDEN]
    assert len(names) == len(set(names)) > 40
    assert all(entry.why and entry.source.endswith(".py") for entry in overrides.OVERRIDDEN)


def test_signatures_are_seen_through_decorators() -> None:
    stage3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
    assert overrides.signature_of(f"{stage3}.unscale_and_clip_grads") == "(self, sub_group_id, total_norm)"
    assert overrides.signature_of("deepspeed.initialize").startswith("(args=None, model=None")


def test_changed_and_missing_names_are_refused_by_name(
    initialize, calls: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    monkeypatch.setattr(Stage3, "_post_step", lambda self, timer_names, extra: None)
    monkeypatch.delattr(Stage3, "partition_grads")
    assert initialize(config=config(lazytrain=None)) == "stock"
    with pytest.raises(UnsupportedError, match=r"_post_step .* is \(self, timer_names, extra\)") as caught:
        initialize(config=config())
    assert "partition_grads (runtime/zero/stage3.py) does not exist" in str(caught.value)
    assert overrides.SUPPORTED in str(caught.value)


@pytest.mark.parametrize(
    ("version", "fine"), [("0.19.7", False), ("0.19.8", True), ("0.19.9+abc", True), ("0.20.0", False)]
)
def test_version_range(monkeypatch: pytest.MonkeyPatch, version: str, fine: bool) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    if fine:
        overrides.check_signatures()
    else:
        with pytest.raises(UnsupportedError, match=f"its version is {version}"):
            overrides.check_signatures()


def test_failed_registration_concerns_only_configs_that_ask_for_the_optimizer(
    initialize, calls: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_registration_error", RuntimeError("no compiler"))
    assert initialize(config=config(optimizer={"type": "AdamW", "params": {}})) == "ours"
    for block in ({}, None):
        with pytest.raises(UnsupportedError, match="no compiler"):
            initialize(config=config(lazytrain=block, optimizer={"type": "HybridAdamW8bit"}))


def test_block_is_parsed_from_what_the_user_wrote() -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/fast"}}
    assert block_config.find_block(config(zero_optimization=zero)).nvme_path == "/fast"
