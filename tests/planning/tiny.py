"""Instances small enough to reckon by hand: rates of 1 byte a second, one class unless said otherwise."""

from lazytrain_ds.planning import instance as I
from lazytrain_ds.planning.plan import BlockPlan, Plan, SubGroupPlan
from lazytrain_ds.planning.schema import TRANSFER_CHANNELS


def tiny_instance(blocks=3, *, latency=0.0, rate=1.0, rounds=1, host_seconds=0.0, accumulate=0.0, **changes):
    """`blocks` equal blocks: forward 10 s, backward 20 s, parameters 4 B, gradient 3 B, boundary 2 B, kept 8 B."""
    keep = I.ActivationChoice("keep", "keep", 8, 6, 0.0)
    part = I.ActivationChoice("part", "selective", 4, 4, 3.0)
    boundary = I.ActivationChoice("boundary", "boundary", 0, 0, 10.0)
    costs = I.BlockCosts(1, 2, 10.0, 20.0, 1000, 5, 7, (keep, part, boundary))
    values = dict(
        name="tiny",
        tiers=(I.Tier("device", 10_000), I.Tier("host", 100_000), I.Tier("nvme", 100_000)),
        channels=tuple(I.Channel(name, rate, latency) for name in TRANSFER_CHANNELS),
        classes=(I.BlockClass("block", 2, 2, 2, 4, 3, "bf16", (costs,)),),
        order=("block",) * blocks,
        optimizer_modes=(
            I.OptimizerMode("host", "fp32", host_seconds / 2, 12.0),
            I.OptimizerMode("host", "8bit", host_seconds / 4, 6.0),
            I.OptimizerMode("device", "fp32", 0.5, 12.0),
        ),
        micro_batches=(1,),
        global_batch=rounds,
        sequence_length=8,
        accumulation_bytes_per_parameter=4.0,
        host_accumulate_seconds_per_parameter=accumulate / 2,
    )
    return I.Instance(**{**values, **changes})


def uniform(instance, step="serial", **fields):
    """The plan that treats all blocks alike."""
    block = BlockPlan(**{"choice": "keep", **fields})
    return Plan((block,) * instance.block_count, instance.micro_batches[0], instance.rounds(1), step)


DEVICE_GROUP = SubGroupPlan("device", "fp32", "device")
