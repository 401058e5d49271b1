"""ZeRO-3 engines in this process, one rank, with and without our stage-3 optimizer. Not a test module."""

from __future__ import annotations

import os
import random
import socket
from typing import Any

import torch
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def one_process_group() -> None:
    """The environment of a one-process launch, on a free port."""
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")


def zero3_config(dtype: str = "fp32", accumulation: int = 1, clip: float = 1.0, **changes: Any) -> dict[str, Any]:
    """What a rewritten config looks like: everything in host memory, no heuristics."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 10**9,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "sub_group_size": 10**12,
            "offload_param": {"device": "cpu", "pin_memory": False},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return {**config, **changes}


def random_placement(model: nn.Module, seed: int, tiers: tuple[str, ...] = ("device", "host")) -> Any:
    """A plan that keeps all activations and places parameters at random."""
    from lazytrain_ds.planning.plan import BlockPlan, Plan
    from lazytrain_ds.workload.blocks import find_blocks

    chance = random.Random(seed)
    blocks = tuple(
        BlockPlan(
            "keep",
            parameter_tier=chance.choice(tiers),
            keep_parameters=chance.random() < 0.4,
            parameter_lead=chance.randrange(4),
        )
        for _ in find_blocks(model)
    )
    return Plan(blocks, 2, 1, optimizer_step=chance.choice(("hidden", "serial")), origin=f"random {seed}")


def bare_setup(model: nn.Module, plan: Any, device: Any) -> Any:
    """A Setup without config or instance: enough for parameters, gradients and updates."""
    from lazytrain_ds.runtime.policy import PlanPolicy
    from lazytrain_ds.runtime.setup import BlockModules, Setup
    from lazytrain_ds.workload.blocks import find_blocks

    table = find_blocks(model)
    policy = PlanPolicy(plan, None, table)
    return Setup(None, BlockModules.resolve(model, table), device, None, plan, policy)


def engine_for(
    model: nn.Module, config: dict[str, Any], plan: Any = None, device: Any = None, optimizer: Any = None
) -> Any:
    """A DeepSpeed engine; with a plan its ZeRO-3 optimizer is ours, without it is stock."""
    one_process_group()
    import deepspeed
    from deepspeed.runtime.zero import stage3 as upstream

    original = upstream.DeepSpeedZeroOptimizer_Stage3
    if plan is not None:
        from lazytrain_ds.runtime.device.cpu import CpuDevice
        from lazytrain_ds.runtime.stage3 import LazyStage3

        setup = bare_setup(model, plan, device or CpuDevice())
        upstream.DeepSpeedZeroOptimizer_Stage3 = type("LazyStage3", (LazyStage3,), {"lazytrain": setup})
    try:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)),
            config=config,
        )
    finally:
        upstream.DeepSpeedZeroOptimizer_Stage3 = original
    return engine


def full_parameters(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter, gathered and copied."""
    import deepspeed

    result = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            result[name] = parameter.detach().clone()
    return result
