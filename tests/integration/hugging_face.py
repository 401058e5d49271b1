"""Runs of the Hugging Face Trainer in this process, as users' scripts make them. Not a test module."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lazytrain_ds  # noqa: F401 - hooks DeepSpeed
from tests import models
from tests.runtime.zero3 import one_process_group

VOCABULARY, LENGTH = 211, 32
BLOCK = {"sequence_length": LENGTH}

# As in Hugging Face's own documentation: everything that TrainingArguments also says is "auto".
AUTO_CONFIG: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 1e9,
}


def with_block(config: dict[str, Any], block: dict[str, Any] | None = BLOCK) -> dict[str, Any]:
    """A copy of `config`, with the block unless it is None."""
    result = copy.deepcopy(config)
    if block is not None:
        result["lazytrain"] = block
    return result


class Tokens(torch.utils.data.Dataset):
    """Language-model samples that depend on their index alone; `pattern` ones can be learnt."""

    def __init__(self, count: int = 64, vocabulary: int = VOCABULARY, length: int = LENGTH) -> None:
        self.count, self.vocabulary, self.length = count, vocabulary, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(5000 + index)
        ids = torch.randint(0, self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def llama() -> nn.Module:
    """A small Hugging Face Llama without dropout, from fixed weights."""
    torch.manual_seed(0)
    model = models.llama(length=LENGTH, vocabulary=VOCABULARY)
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    return model


def arguments(folder: Path, config: Any, **changes: Any) -> Any:
    """TrainingArguments of a run on the CPU. (DeepSpeed's scheduler leaves the rate at 0 for the first two steps.)"""
    from transformers import TrainingArguments

    one_process_group()
    options: dict[str, Any] = dict(
        output_dir=str(folder),
        deepspeed=config,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-3,
        adam_epsilon=1e-5,
        weight_decay=0.1,
        warmup_steps=1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        optim="adamw_torch",
        dataloader_pin_memory=False,
    )
    return TrainingArguments(**{**options, **changes})


@contextmanager
def fresh_state() -> Iterator[None]:
    """transformers and accelerate keep the last run's settings in globals; each run here begins without them."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    def forget() -> None:
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
        gc.collect()

    forget()
    try:
        yield
    finally:
        forget()


@contextmanager
def trainer_of(
    folder: Path,
    config: Any,
    make: Callable[[], nn.Module] = llama,
    trainer_class: Any = None,
    trainer_options: dict[str, Any] | None = None,
    **changes: Any,
) -> Iterator[Any]:
    """A Trainer; its engine is destroyed afterwards. The model is made after the arguments, as in users' scripts."""
    from transformers import Trainer

    with fresh_state():
        args = arguments(folder, config, **changes)
        options = {"train_dataset": Tokens(), **(trainer_options or {})}
        trainer = (trainer_class or Trainer)(model=make(), args=args, **options)
        try:
            yield trainer
        finally:
            engine = engine_of(trainer)
            if engine is not None:
                engine.destroy()


def engine_of(trainer: Any) -> Any:
    """The DeepSpeed engine of a Trainer, None before training."""
    wrapped = getattr(trainer, "model_wrapped", None)
    return wrapped if hasattr(wrapped, "global_steps") and hasattr(wrapped, "destroy") else None


def recording(base: Any = None) -> Any:
    """A subclass of the Trainer, or of `base`, whose `recorded` has the loss of every micro-step, unrounded."""
    from transformers import Trainer

    class Recording(base or Trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.recorded: list[float] = []

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            if torch.is_grad_enabled():
                self.recorded.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    return Recording


def tokenizer() -> Any:
    """A word-level tokenizer over the vocabulary, made here."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as tokenizer_models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(tokenizer_models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", eos_token="w1", bos_token="w2", unk_token="w0"
    )


def is_lazytrain(engine: Any) -> bool:
    """Whether the block was in force."""
    return type(engine).__name__ == "LazyTrainEngine"
