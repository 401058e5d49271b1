"""Each config of user_configs.py with a minimal block: trains, or DeepSpeed's own error comes first and unchanged.

The tensors of the models are 1 MiB and larger, so that NVMe paths are real. What trains gives the losses of the same
run without the block (with host memory in place of NVMe: stock DeepSpeed would build async_io for minutes).
"""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lazytrain_ds.errors import LazyTrainError, UnsupportedError
from tests.integration.hugging_face import Tokens, engine_of, is_lazytrain, recording, trainer_of
from tests.integration.training import loss_of
from tests.integration.user_configs import NVME, USER_CONFIGS, UserConfig
from tests.runtime.zero3 import one_process_group

VOCABULARY, LENGTH, STEPS = 1024, 8, 3
BLOCK: dict[str, Any] = {}
# Those that train take two runs each. A few of different kinds run always, the others with the slow tests.
ALWAYS = ("C02", "C18")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=4,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


MODELS = {"llama": llama, "mixtral": mixtral}


def placed(value: Any, folder: Path) -> Any:
    """The config with the test's own directory for NVMe."""
    if isinstance(value, dict):
        return {key: placed(item, folder) for key, item in value.items()}
    return str(folder / "nvme") if value == NVME else value


def in_host_memory(config: dict[str, Any]) -> dict[str, Any]:
    """The config with host memory in place of NVMe."""
    result = copy.deepcopy(config)
    zero = result["zero_optimization"]
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") == "nvme":
            zero[name] = {"device": "cpu", "pin_memory": zero[name].get("pin_memory", False)}
    return result


def given(config: dict[str, Any], written: str, folder: Path) -> Any:
    """The config as a dict, or as a file written the way people's files are."""
    if not written:
        return config
    path = folder / ("ds.conf" if written == ".conf" else "ds.json")
    text = json.dumps(config, indent="\t" if written == "tabs" else 2)
    path.write_text("\n" + text if written == "blank first line" else text)
    return str(path)


def by_deepspeed(make: Any, config: dict[str, Any]) -> tuple[list[float], bool]:
    import deepspeed

    one_process_group()
    engine, *_ = deepspeed.initialize(model=make(), config=config)
    try:
        losses = []
        for step in range(STEPS):
            sample = [Tokens(64, VOCABULARY, LENGTH)[2 * step + row]["input_ids"] for row in range(2)]
            ids = torch.stack(sample)
            loss = loss_of(engine(input_ids=ids, labels=ids))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses, is_lazytrain(engine)
    finally:
        engine.destroy()


def by_trainer(make: Any, config: Any, folder: Path, arguments: dict[str, Any]) -> tuple[list[float], bool]:
    options = {"train_dataset": Tokens(128, VOCABULARY, LENGTH)}
    with trainer_of(folder, config, make, recording(), options, max_steps=STEPS, **arguments) as trainer:
        trainer.train()
        assert engine_of(trainer).global_steps == STEPS
        return trainer.recorded, is_lazytrain(engine_of(trainer))


def attempt(case: UserConfig, config: dict[str, Any], folder: Path) -> tuple[list[float], bool]:
    """Losses of each micro-step and whether LazyTrain was in force, or what the run raises."""
    make = MODELS[case.model]
    try:
        if case.trainer is None:
            return by_deepspeed(make, config)
        return by_trainer(make, given(config, case.text, folder), folder, case.trainer)
    finally:
        gc.collect()


def failure(case: UserConfig, config: dict[str, Any], folder: Path) -> BaseException:
    with pytest.raises(BaseException) as caught:
        attempt(case, config, folder)
    return caught.value


def named(outcome: str) -> list[Any]:
    found = [name for name, case in USER_CONFIGS.items() if case.outcome == outcome]
    return [
        name if outcome != "trains" or name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in found
    ]


@pytest.mark.integration
@pytest.mark.parametrize("name", named("trains"))
def test_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # relative paths in configs
    case = USER_CONFIGS[name]
    config = placed(case.config, tmp_path)
    losses, in_force = attempt(case, {**config, "lazytrain": BLOCK}, tmp_path)
    assert in_force
    expected, in_force = attempt(case, in_host_memory(config), tmp_path)
    assert not in_force
    rounds = (case.trainer or {}).get("gradient_accumulation_steps", 2) if case.trainer is not None else 1
    assert len(losses) == len(expected) == STEPS * rounds
    # In bf16 the order of additions shows; in fp32 hardly.
    half = config.get("bf16", {}).get("enabled") is True or (case.trainer or {}).get("bf16")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-3 if half else 1e-5, atol=0.0)


@pytest.mark.integration
@pytest.mark.parametrize("name", named("deepspeed"))
def test_deepspeeds_own_error_comes_first_and_unchanged(name, tmp_path):
    case = USER_CONFIGS[name]
    config = placed(case.config, tmp_path)
    stock, ours = failure(case, config, tmp_path), failure(case, {**config, "lazytrain": BLOCK}, tmp_path)
    assert type(ours) is type(stock) and str(ours) == str(stock)
    assert case.message in str(ours)
    assert ours.__cause__ is None and not isinstance(ours, LazyTrainError)
    assert not (tmp_path / "nvme").exists()


@pytest.mark.integration
@pytest.mark.parametrize("name", named("refused"))
def test_refused_by_name(name, tmp_path):
    case = USER_CONFIGS[name]
    error = failure(case, {**placed(case.config, tmp_path), "lazytrain": BLOCK}, tmp_path)
    assert type(error) is UnsupportedError and case.message in str(error)


@pytest.mark.integration
def test_without_tensorboard_its_section_is_deepspeeds_error(tmp_path):
    """C07 has a "tensorboard" section; where the package is missing, DeepSpeed says so, with and without the block."""
    case = USER_CONFIGS["C07"]
    section = {"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "dolly"}}
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("tensorboard is installed")
    stock = failure(case, {**case.config, **section}, tmp_path)
    ours = failure(case, {**case.config, **section, "lazytrain": BLOCK}, tmp_path)
    assert type(ours) is type(stock) and str(ours) == str(stock)


@pytest.mark.integration
def test_a_user_who_says_none_is_told_who_wins(tmp_path, capsys, monkeypatch):
    """C09: `"device": "none"` means no offload in DeepSpeed; with the block the plan decides, and the run says so."""
    monkeypatch.setitem(globals(), "STEPS", 1)
    case = USER_CONFIGS["C09"]
    attempt(case, {**case.config, "lazytrain": BLOCK}, tmp_path)
    said = capsys.readouterr().out
    for section in ("offload_optimizer", "offload_param"):
        assert (
            f"replaced zero_optimization.{section}.device: 'none' -> 'cpu' (the plan places each block itself)" in said
        )


@pytest.mark.integration
def test_unpinned_stays_unpinned(tmp_path):
    """C14: `"pin_memory": false` is the user's. (A CPU pins nothing; what our buffers go by is checked.)"""
    case = USER_CONFIGS["C14 bf16"]
    options = {"train_dataset": Tokens(128, VOCABULARY, LENGTH)}
    config = {**case.config, "gradient_accumulation_steps": 1, "lazytrain": BLOCK}
    arguments = {**case.trainer, "gradient_accumulation_steps": 1, "max_steps": 1}
    with trainer_of(tmp_path, config, llama, None, options, **arguments) as trainer:
        trainer.train()
        assert engine_of(trainer).zero_offload_param().pin_memory is False
