"""DeepSpeed configs as people have them (the settings that matter of each), and what became of them. Not a test module.

The outcomes are those of docs/tested_configs.md, on a CPU, which has no fp16.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

__all__ = ["USER_CONFIGS", "UserConfig", "with_bf16"]

AUTO = "auto"
NVME = "NVME"  # stands for a directory of the test's own
HOST = {"device": "cpu"}
PINNED = {"device": "cpu", "pin_memory": True}
ADAMW_AUTO = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)}
ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
WARMUP_AUTO = {
    "type": "WarmupLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO),
}
DECAY_AUTO = {"type": "WarmupDecayLR", "params": {**WARMUP_AUTO["params"], "total_num_steps": AUTO}}  # type: ignore[dict-item]
BATCH_AUTO: dict[str, Any] = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
}
BATCH: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
}
DYNAMIC = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
BUCKETS_AUTO = {
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
}
COMMON = {"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, **BUCKETS_AUTO}
LIVE = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
GATHER = "stage3_gather_16bit_weights_on_model_save"


def zero(optimizer: dict[str, Any] | None, parameters: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    """A stage-3 section."""
    offloads = {"offload_optimizer": optimizer, "offload_param": parameters}
    return {"stage": 3, **{name: value for name, value in offloads.items() if value is not None}, **settings}


@dataclass(frozen=True)
class UserConfig:
    """One config.

    `trainer`: run by the Hugging Face Trainer, with these TrainingArguments (None: plain `deepspeed.initialize`).
    `outcome`: "trains", "deepspeed" (its own error, of which `message` is a part) or "refused" (ours).
    `text`: how the file is written; otherwise a dict is passed. `model`: which of the test's models.
    """

    config: dict[str, Any]
    outcome: str = "trains"
    message: str = ""
    trainer: dict[str, Any] | None = field(default_factory=dict)
    text: str = ""
    model: str = "llama"


_AXOLOTL = {
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": zero(
        PINNED,
        PINNED,
        overlap_comm=True,
        contiguous_gradients=True,
        sub_group_size=0,
        **BUCKETS_AUTO,
        max_live_parameters=0,
        max_reuse_distance=0,
        gather_16bit_weights_on_model_save=True,
    ),
    "bf16": {"enabled": True},
    "wall_clock_breakdown": False,
    **BATCH_AUTO,
}
_LLAMA_FACTORY = {
    **BATCH_AUTO,
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": AUTO, **DYNAMIC},
    "bf16": {"enabled": AUTO},
    "zero_optimization": zero(PINNED, PINNED, **{**COMMON, "overlap_comm": False}, **LIVE, **{GATHER: True}),
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": False},
}
_TRANSFORMERS = {
    **BATCH,
    "fp16": {"enabled": True, **DYNAMIC},
    "optimizer": ADAMW,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
    },
    "zero_optimization": zero(
        PINNED,
        PINNED,
        overlap_comm=True,
        contiguous_gradients=True,
        sub_group_size=1e14,
        reduce_bucket_size=0,
        stage3_prefetch_bucket_size=0,
        stage3_param_persistence_threshold=0,
        **LIVE,
        stage3_gather_fp16_weights_on_model_save=True,
    ),
    "steps_per_print": 2000,
}
_LLAVA = {
    "fp16": {"enabled": AUTO, **DYNAMIC},
    "bf16": {"enabled": True},
    "optimizer": ADAMW_AUTO,
    "scheduler": WARMUP_AUTO,
    "zero_optimization": zero(PINNED, PINNED, **COMMON, **LIVE, gather_16bit_weights_on_model_save=True),
    **BATCH_AUTO,
    "steps_per_print": 1e5,
    "wall_clock_breakdown": False,
}


def _deepspeed_examples(persistence_key: str, nvme_path: str) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": nvme_path, "pin_memory": True, "buffer_count": 4}
    return {
        **BATCH,
        "optimizer": ADAMW,
        "fp16": {"enabled": True, "loss_scale": 1024},
        "zero_optimization": zero(
            {**offload, "pipeline_read": False, "pipeline_write": False},
            {**offload, "buffer_size": 1e8, "max_in_cpu": 1},
            overlap_comm=True,
            sub_group_size=1e8,
            reduce_bucket_size=9e7,
            stage3_prefetch_bucket_size=5e7,
            **{persistence_key: 1e5},
        ),
        "aio": {
            "block_size": 1048576,
            "queue_depth": 16,
            "intra_op_parallelism": 2,
            "single_submit": False,
            "overlap_events": True,
        },
    }


_TYPO = "stage3_param_persitance_threshold"
_XTUNER = {
    **BATCH,
    "optimizer": ADAMW,
    "zero_force_ds_cpu_optimizer": False,
    "fp16": {"enabled": True, "initial_scale_power": 16},
    "zero_optimization": zero(
        PINNED, PINNED, overlap_comm=True, contiguous_gradients=False, allgather_bucket_size=3e8, reduce_bucket_size=3e8
    ),
}
_DOLLY = {
    "fp16": {"enabled": False},
    "bf16": {"enabled": AUTO},
    "optimizer": ADAMW_AUTO,
    "scheduler": WARMUP_AUTO,
    "zero_optimization": zero(None, None, **COMMON, **LIVE, **{GATHER: True}),
    **BATCH_AUTO,
}
_FASTCHAT = {
    "fp16": {"enabled": AUTO, **DYNAMIC},
    "bf16": {"enabled": AUTO},
    "zero_optimization": zero(
        PINNED,
        PINNED,
        overlap_comm=True,
        contiguous_gradients=True,
        stage3_max_live_parameters=1e9,
        stage3_max_reuse_distance=1e9,
        stage3_prefetch_bucket_size=5e8,
        stage3_param_persistence_threshold=1e6,
        sub_group_size=1e12,
        **{GATHER: True},
    ),
    **{key: value for key, value in BATCH_AUTO.items() if key != "gradient_clipping"},
    "steps_per_print": 1e5,
}
_NOT_OFFLOADED = {"device": "none", "pin_memory": True}
_MINICPM = {
    "fp16": {"enabled": AUTO, **DYNAMIC},
    "bf16": {"enabled": AUTO},
    "optimizer": ADAMW_AUTO,
    "scheduler": WARMUP_AUTO,
    "zero_optimization": zero(_NOT_OFFLOADED, _NOT_OFFLOADED, **COMMON, **LIVE, **{GATHER: True}),
    **BATCH_AUTO,
}
_LIKE_LLAVA = {**_LLAVA, "bf16": {"enabled": AUTO}}
_OLD_STYLE = {
    **BATCH,
    "optimizer": ADAMW,
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "zero_optimization": {
        "stage": 3,
        "cpu_offload": True,
        "cpu_offload_params": True,
        _TYPO: 1e5,
        "stage3_max_live_parameters": 6e6,
        "sub_group_size": 1e6,
    },
}
_ACCELERATE = {
    "fp16": {"enabled": True, **DYNAMIC},
    "optimizer": ADAMW_AUTO,
    "scheduler": DECAY_AUTO,
    "zero_optimization": zero(PINNED, PINNED, **COMMON, **LIVE, **{GATHER: AUTO}),
    **{**BATCH_AUTO, "gradient_accumulation_steps": 1},
    "steps_per_print": 2000,
}
_UNPINNED = {"device": "cpu", "pin_memory": False}
_ACCELERATE_UNPINNED = {
    **_ACCELERATE,
    "gradient_accumulation_steps": 32,
    "zero_optimization": zero(_UNPINNED, _UNPINNED, **COMMON, **LIVE, **{GATHER: AUTO}),
}
_MOE = {
    **BATCH_AUTO,
    "bf16": {"enabled": AUTO},
    "zero_optimization": zero(
        HOST,
        HOST,
        stage3_prefetch_bucket_size=0,
        stage3_max_live_parameters=0,
        stage3_max_reuse_distance=0,
        overlap_comm=True,
    ),
}


def _relative_nvme(nvme_path: str) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": nvme_path, "pin_memory": False}
    return {
        **BATCH_AUTO,
        "bf16": {"enabled": AUTO},
        "optimizer": ADAMW_AUTO,
        "zero_optimization": zero(
            {**offload, "fast_init": True},
            {**offload, "buffer_size": 1e8, "max_in_cpu": 5e7},
            sub_group_size=5e7,
            **{GATHER: True},
        ),
        "aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1},
    }


_AIO_INSIDE = {
    **BATCH,
    "optimizer": ADAMW,
    "bf16": {"enabled": True},
    "zero_optimization": zero(
        {"device": "nvme", "nvme_path": NVME},
        {"device": "nvme", "nvme_path": NVME, "buffer_size": 1e8, "max_in_cpu": 1e9},
        aio={"block_size": 262144, "queue_depth": 32},
    ),
}
_BUFFER_SIZE = {
    **BATCH,
    "optimizer": ADAMW,
    "bf16": {"enabled": True},
    "zero_optimization": zero({"device": "nvme", "nvme_path": NVME, "buffer_size": 2e9}, HOST),
}
_SUPER = {
    **BATCH,
    "optimizer": ADAMW,
    "bf16": {"enabled": True},
    "zero_optimization": zero({**PINNED, "super_offload": True, "ratio": 0.9, "cpuadam_cores_perc": 0.9}, None),
}


def with_bf16(config: dict[str, Any]) -> dict[str, Any]:
    """The same config with bf16 in place of fp16, for a machine that has no fp16."""
    result = copy.deepcopy(config)
    result.pop("fp16", None)
    result["bf16"] = {"enabled": True}
    return result


BF16 = {"bf16": True}
NO_FP16 = "fp16 is not supported"
USER_CONFIGS: dict[str, UserConfig] = {
    "C01": UserConfig(_AXOLOTL, trainer=BF16),
    "C02": UserConfig(_LLAMA_FACTORY),
    "C02 bf16": UserConfig(_LLAMA_FACTORY, trainer=BF16),
    "C03": UserConfig(_TRANSFORMERS, "deepspeed", "reduce_bucket_size", trainer=None),
    "C04": UserConfig(_LLAVA, trainer=BF16),
    "C05": UserConfig(_deepspeed_examples(_TYPO, "/nvme_data"), "deepspeed", _TYPO, trainer=None),
    "C05 corrected": UserConfig(
        _deepspeed_examples("stage3_param_persistence_threshold", NVME), "deepspeed", NO_FP16, trainer=None
    ),
    "C05 corrected, bf16": UserConfig(
        with_bf16(_deepspeed_examples("stage3_param_persistence_threshold", NVME)), trainer=None
    ),
    "C06": UserConfig(_XTUNER, "deepspeed", NO_FP16, trainer=None),
    "C06 bf16": UserConfig(with_bf16(_XTUNER), trainer=None),
    "C07": UserConfig(_DOLLY, trainer=BF16),
    "C08": UserConfig(_FASTCHAT, trainer=BF16),
    "C09": UserConfig(_MINICPM, trainer=BF16, text="blank first line"),
    "C10": UserConfig(_LIKE_LLAVA, trainer=BF16, text=".conf"),
    "C12": UserConfig(_OLD_STYLE, "deepspeed", "cpu_offload_params", trainer=None),
    "C13": UserConfig(_ACCELERATE, "deepspeed", NO_FP16, trainer={"fp16": True, "gradient_accumulation_steps": 1}),
    "C13 bf16": UserConfig(with_bf16(_ACCELERATE), trainer={**BF16, "gradient_accumulation_steps": 1}),
    "C14 bf16": UserConfig(
        with_bf16(_ACCELERATE_UNPINNED),
        trainer={**BF16, "gradient_accumulation_steps": 32, "per_device_train_batch_size": 1},
        text="tabs",
    ),
    "C15": UserConfig(_MOE, trainer=BF16, model="mixtral"),
    "C18": UserConfig(_relative_nvme("swap"), trainer=BF16),
    "C19": UserConfig(_AIO_INSIDE, "deepspeed", "aio", trainer=None),
    "C21": UserConfig(_BUFFER_SIZE, "deepspeed", "buffer_size", trainer=None),
    "C22": UserConfig(_SUPER, "refused", "super_offload", trainer=None),
}
