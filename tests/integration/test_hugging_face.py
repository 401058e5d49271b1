"""The block in the DeepSpeed config of the Hugging Face Trainer, of accelerate and of what is built on them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.hugging_face import (
    AUTO_CONFIG,
    BLOCK,
    LENGTH,
    Tokens,
    engine_of,
    fresh_state,
    is_lazytrain,
    llama,
    recording,
    trainer_of,
    with_block,
)
from tests.runtime.zero3 import full_parameters

MEGATRAIN = {**BLOCK, "planner": {"kind": "megatrain"}}


def trained(folder: Path, block: dict[str, Any] | None, config: Any = AUTO_CONFIG, **changes: Any) -> dict[str, Any]:
    """Losses of every micro-step, gradient norms, weights, and what was in force."""
    with trainer_of(folder, with_block(config, block), trainer_class=recording(), **changes) as trainer:
        trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
        engine = engine_of(trainer)
        history = trainer.state.log_history
        return {
            "lazytrain": is_lazytrain(engine),
            "losses": torch.tensor(trainer.recorded),
            "norms": torch.tensor([entry["grad_norm"] for entry in history if "grad_norm" in entry]),
            "evaluations": torch.tensor([entry["eval_loss"] for entry in history if "eval_loss" in entry]),
            "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
            "weights": full_parameters(engine),
            "batch": (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()),
        }


def assert_close(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    assert ours["lazytrain"] and not stock["lazytrain"]
    assert ours["batch"] == stock["batch"] and ours["rates"] == stock["rates"]
    for name in ("losses", "norms", "evaluations"):
        torch.testing.assert_close(ours[name], stock[name], rtol=1e-5, atol=0.0)
    for name, weight in stock["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-4, atol=1e-6)


def test_trainer_with_auto_values_gives_the_losses_of_a_run_without_the_block(tmp_path):
    """Evaluated after each step, too; U35: no mismatch, and the batch stays TrainingArguments'."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "trainer_options": {"eval_dataset": Tokens(6)}}
    stock = trained(tmp_path, None, **evaluated)
    ours = trained(tmp_path, BLOCK, **evaluated)
    assert len(stock["losses"]) == 8 and len(stock["evaluations"]) == 4 and stock["batch"] == (2, 2)
    assert stock["evaluations"][-1] < stock["evaluations"][0] - 1e-3
    assert_close(ours, stock)
    without_evaluation = trained(tmp_path, MEGATRAIN)
    assert torch.equal(without_evaluation["losses"], ours["losses"])


def test_client_optimizer_of_the_trainer(tmp_path):
    """No "optimizer" in the config: the Trainer's own AdamW, which accelerate turns into DeepSpeedCPUAdam."""
    config = copy.deepcopy(AUTO_CONFIG)
    del config["optimizer"], config["scheduler"]
    assert_close(trained(tmp_path, BLOCK, config), trained(tmp_path, None, config))


def test_checkpoints_resume_bit_for_bit_also_under_another_plan(tmp_path):
    saving = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    whole = trained(tmp_path / "run", BLOCK, **saving)
    assert (tmp_path / "run" / "checkpoint-3" / "global_step3").is_dir()
    for block in (BLOCK, MEGATRAIN):
        resumed = trained_from(tmp_path / "run" / "checkpoint-3", tmp_path / "resumed", block)
        assert torch.equal(resumed["losses"], whole["losses"][6:])
        assert all(torch.equal(weight, resumed["weights"][name]) for name, weight in whole["weights"].items())


def trained_from(checkpoint: Path, folder: Path, block: dict[str, Any]) -> dict[str, Any]:
    with trainer_of(folder, with_block(AUTO_CONFIG, block), trainer_class=recording(), max_steps=5) as trainer:
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return {"losses": torch.tensor(trainer.recorded), "weights": full_parameters(engine_of(trainer))}


def test_save_model_gives_full_weights_that_from_pretrained_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    with trainer_of(tmp_path / "run", with_block(AUTO_CONFIG)) as trainer:
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        weights = full_parameters(engine_of(trainer))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert len(weights) == len(dict(loaded.named_parameters()))
    assert not torch.equal(weights["model.embed_tokens.weight"], llama().model.embed_tokens.weight)


def test_from_pretrained_under_zero_init_trains_like_a_model_that_was_loaded_plainly(tmp_path):
    """TrainingArguments come first, so `from_pretrained` partitions each parameter as it loads it."""
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(tmp_path / "model")

    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
        return model

    plain = trained(tmp_path, BLOCK)
    partitioned = trained(tmp_path, BLOCK, make=load)
    assert torch.equal(plain["losses"], partitioned["losses"])
    assert_close(partitioned, trained(tmp_path, None, make=load))


DYNAMO_TRAP = """
import json, sys
import torch, deepspeed
early = "torch._dynamo" in sys.modules
config = json.loads(sys.argv[1])
with deepspeed.zero.Init(config_dict_or_path=config):
    import torch._dynamo
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.backward(engine(torch.ones(2, 8)).mean())
engine.step()
print("TRAINED", type(engine).__name__, "imported before" if early else "imported inside")
"""


@pytest.mark.integration
def test_torch_dynamo_first_imported_inside_zero_init(child_environment):
    """torch 2.13 checks the signatures of what zero.Init replaced; models import torch._dynamo lazily."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "lazytrain": {"sequence_length": 8},
    }
    done = subprocess.run(
        [sys.executable, "-c", DYNAMO_TRAP, json.dumps(config)],
        env=child_environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "TRAINED LazyTrainEngine" in done.stdout


def test_a_reference_model_without_the_block_in_the_same_process(tmp_path):
    """As in preference training: the policy is planned, a frozen second model is a stock ZeRO-3 engine."""
    import deepspeed

    reference_config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    }
    expected = llama().eval()
    with fresh_state():
        from transformers import Trainer

        from tests.integration.hugging_face import arguments

        args = arguments(tmp_path, with_block(AUTO_CONFIG))
        reference = deepspeed.initialize(model=llama().requires_grad_(False).eval(), config=reference_config)[0]

        class WithReference(Trainer):
            divergence: list[float] = []  # noqa: RUF012 - a test's own record

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
                outputs = model(**inputs)
                with torch.no_grad():
                    theirs = reference(input_ids=inputs["input_ids"]).logits
                torch.testing.assert_close(theirs, expected(input_ids=inputs["input_ids"]).logits)
                self.divergence.append(float((outputs.logits - theirs).abs().max()))
                return (outputs.loss, outputs) if return_outputs else outputs.loss

        trainer = WithReference(model=llama(), args=args, train_dataset=Tokens())
        trainer.train()
        engine = engine_of(trainer)
        assert is_lazytrain(engine) and not is_lazytrain(reference)
        assert trainer.divergence[0] < 1e-5 and trainer.divergence[-1] > 1e-3
        engine.destroy()
        reference.destroy()


# -- PEFT and TRL --------------------------------------------------------------------------------------------------
def lora() -> Any:
    """A frozen Llama with LoRA on its attention."""
    from peft import LoraConfig, get_peft_model

    model = llama()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def test_peft_lora_trains_as_without_the_block_and_saves_its_adapter(tmp_path):
    from peft import PeftModel

    stock = trained(tmp_path, None, make=lora)
    before = lora().state_dict()
    with trainer_of(tmp_path, with_block(AUTO_CONFIG), make=lora, trainer_class=recording()) as trainer:
        trainer.train()
        engine = engine_of(trainer)
        assert is_lazytrain(engine)
        weights = full_parameters(engine)
        trainer.save_model(str(tmp_path / "adapter"))
        torch.testing.assert_close(torch.tensor(trainer.recorded), stock["losses"], rtol=1e-5, atol=0.0)
    frozen = {name for name in weights if "lora_" not in name}
    assert all(torch.equal(weights[name], before[name]) for name in frozen)
    assert all(not torch.equal(weights[name], before[name]) for name in weights.keys() - frozen)
    loaded = PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_trl_sft_trainer(tmp_path):
    """SFTTrainer on tokenised samples, plain and with LoRA: as without the block."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.integration.hugging_face import arguments, tokenizer

    rows = [Tokens()[index]["input_ids"].tolist() for index in range(16)]
    results = {}
    for block in (None, BLOCK):
        with fresh_state():
            options = arguments(tmp_path, None).to_dict()
            del options["deepspeed"]
        with fresh_state():
            wanted = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "learning_rate")
            wanted += ("adam_epsilon", "weight_decay", "warmup_steps", "max_grad_norm", "logging_steps")
            args = SFTConfig(
                output_dir=str(tmp_path),
                deepspeed=with_block(AUTO_CONFIG, block),
                max_length=LENGTH,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                optim="adamw_torch",
                gradient_checkpointing=True,
                dataset_kwargs={"skip_prepare_dataset": True},
                **{name: options[name] for name in wanted},
            )
            dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
            trainer = recording(SFTTrainer)(
                model=llama(), args=args, train_dataset=dataset, processing_class=tokenizer()
            )
            trainer.train()
            engine = engine_of(trainer)
            results[block is not None] = torch.tensor(trainer.recorded)
            assert is_lazytrain(engine) == (block is not None)
            engine.destroy()
    torch.testing.assert_close(results[True], results[False], rtol=1e-5, atol=0.0)
