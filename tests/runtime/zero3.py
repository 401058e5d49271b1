"""ZeRO-3 engines in this process, one rank, with and without our stage-3 optimizer. Not a test module."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import replace
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


def flat_instance(model: nn.Module, micro_batch: int = 2, rounds: int = 1, quantizable: Any = None) -> Any:
    """An instance with the model's real parameter bytes and made-up costs; every block may be recomputed.

    `quantizable(parameter)`: whether its states may be 8-bit.
    """
    from lazytrain_ds.planning import instance as I
    from lazytrain_ds.planning.schema import TRANSFER_CHANNELS
    from lazytrain_ds.workload.blocks import find_blocks
    from lazytrain_ds.workload.signature import parameter_numel

    table = find_blocks(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    keep = I.ActivationChoice("keep", "keep", 1000, 600, 0.0)
    boundary = I.ActivationChoice("boundary", "boundary", 0, 0, 0.01)
    classes: dict[str, Any] = {}
    for block in table:
        menu = (keep, boundary) if block.kind == "block" else (keep,)
        costs = I.BlockCosts(micro_batch, 100, 0.01, 0.02, 1000, 10, 10, menu)
        count = sum(parameter_numel(named[name]) for name in block.parameters)
        trainable = sum(parameter_numel(named[name]) for name in block.parameters if named[name].requires_grad)
        quantized = sum(
            parameter_numel(named[name])
            for name in block.parameters
            if quantizable is not None and named[name].requires_grad and quantizable(named[name])
        )
        classes[block.class_name] = I.BlockClass(
            block.class_name, count, trainable, quantized, 4 * count, 4 * trainable, "fp32", (costs,)
        )
    return I.Instance(
        name="flat",
        tiers=(I.Tier("device", 10**9), I.Tier("host", 10**9), I.Tier("nvme", 10**9)),
        channels=tuple(I.Channel(name, 1e9) for name in TRANSFER_CHANNELS),
        classes=tuple(classes.values()),
        order=tuple(block.class_name for block in table),
        optimizer_modes=tuple(
            I.OptimizerMode(place, precision, 1e-9, byte_count)
            for precision, byte_count in (("fp32", 12.0), *([("8bit", 6.03125)] if quantizable else []))
            for place in ("host", "device")
        ),
        micro_batches=(micro_batch,),
        global_batch=micro_batch * rounds,
        sequence_length=32,
        accumulation_bytes_per_parameter=4.0,
        borrows=table.borrows,
    )


def random_plan(
    instance: Any,
    seed: int,
    tiers: tuple[str, ...] = ("device", "host"),
    activations: bool = False,
    states: tuple[str, ...] = ("host",),
) -> Any:
    """Parameters placed at random; with `activations` also what is recomputed, dropped and offloaded to the host."""
    from lazytrain_ds.planning.plan import BlockPlan, Plan, SubGroupPlan

    chance = random.Random(seed)
    micro_batch = instance.micro_batches[0]
    blocks: list[Any] = []
    for index in range(instance.block_count):
        menu = instance.costs(index, micro_batch).menu
        choice = chance.choice(menu) if activations else menu[0]
        before = blocks[-1].choice if blocks else ""
        homes = ["device", "host"] if activations else ["device"]
        if activations and choice.kind == "boundary" and before == "boundary":
            homes += ["dropped", "dropped"]
        tier = chance.choice(states)
        saved = chance.choice(["device", "host"]) if activations and choice.offloadable_bytes else "device"
        blocks.append(
            BlockPlan(
                choice.name,
                boundary=chance.choice(homes),
                saved_tier=saved,
                parameter_tier=chance.choice(tiers),
                keep_parameters=chance.random() < 0.4,
                parameter_lead=chance.randrange(4),
                activation_lead=chance.randrange(3),
                optimizer=SubGroupPlan(tier, "fp32", "device" if tier == "device" else "host"),
            )
        )
    step = chance.choice(("hidden", "serial"))
    plan = Plan(tuple(blocks), micro_batch, instance.rounds(micro_batch), optimizer_step=step, origin=f"random {seed}")
    plan.check(instance)
    return plan


def bare_setup(model: nn.Module, instance: Any, plan: Any, device: Any, nvme: Any = None) -> Any:
    """A Setup without config: enough for parameters, gradients and updates."""
    from lazytrain_ds.runtime.policy import PlanPolicy
    from lazytrain_ds.runtime.setup import BlockModules, Setup
    from lazytrain_ds.workload.blocks import find_blocks

    table = find_blocks(model)
    setup = Setup(None, BlockModules.resolve(model, table), device, instance, plan, PlanPolicy(plan, instance, table))
    setup.nvme = nvme
    return setup


def quantizes(model: nn.Module, optimizer: Any) -> Any:
    """Which parameters an 8-bit optimizer quantizes; None for the others."""
    from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit

    if not isinstance(optimizer, HybridAdamW8bit):
        return None
    optimizer.observe_model(model)
    return lambda parameter: optimizer.precision_of(parameter) == "8bit"


def with_precision(plan: Any, precision: str) -> Any:
    """The plan with states of another precision."""
    blocks = tuple(replace(b, optimizer=replace(b.optimizer, precision=precision)) for b in plan.blocks)
    return replace(plan, blocks=blocks)


def engine_for(
    model: nn.Module,
    config: dict[str, Any],
    seed: int | None = None,
    device: Any = None,
    optimizer: Any = None,
    tiers: tuple[str, ...] = ("device", "host"),
    nvme: Any = None,
    states: tuple[str, ...] = ("host",),
    arrange: Any = None,
) -> Any:
    """A DeepSpeed engine; with a seed its ZeRO-3 optimizer is ours under the random plan of it, without it is stock.

    `arrange(plan)` gives the plan to use instead. States are 8-bit where the optimizer quantizes.
    """
    one_process_group()
    import deepspeed
    from deepspeed.runtime.zero import stage3 as upstream

    original = upstream.DeepSpeedZeroOptimizer_Stage3
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    if seed is not None:
        from lazytrain_ds.runtime.device.cpu import CpuDevice
        from lazytrain_ds.runtime.stage3 import LazyStage3

        rounds = config["gradient_accumulation_steps"]
        quantizable = quantizes(model, optimizer)
        instance = flat_instance(model, rounds=rounds, quantizable=quantizable)
        plan = random_plan(instance, seed, tiers, states=states)
        if quantizable is not None:
            plan = with_precision(plan, "8bit")
        plan = arrange(plan) if arrange is not None else plan
        plan.check(instance)
        setup = bare_setup(model, instance, plan, device or CpuDevice(), nvme)
        setup.quantizable = quantizable or setup.quantizable
        upstream.DeepSpeedZeroOptimizer_Stage3 = type("LazyStage3", (LazyStage3,), {"lazytrain": setup})
    try:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
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
