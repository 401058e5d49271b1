import pytest

from lazytrain_ds.errors import PlanError, SchemaError
from lazytrain_ds.planning import instance as I
from lazytrain_ds.planning.plan import BlockPlan, Plan, SubGroupPlan
from lazytrain_ds.planning.schema import TRANSFER_CHANNELS, digest


def small_instance(**changes: object) -> I.Instance:
    keep = I.ActivationChoice("keep", "keep", 100, 60, 0.0)
    boundary = I.ActivationChoice("boundary", "boundary", 0, 0, 1.0)
    block = I.BlockCosts(1, 10, 1.0, 2.0, 1000, 5, 5, (keep, boundary))
    values: dict = dict(
        name="small",
        tiers=(I.Tier("device", 1000), I.Tier("host", 10000, 100), I.Tier("nvme", 0)),
        channels=tuple(I.Channel(name, 100.0) for name in TRANSFER_CHANNELS),
        classes=(I.BlockClass("block", 50, 50, 40, 100, 200, "bf16", (block,)),),
        order=("block",) * 3,
        optimizer_modes=(I.OptimizerMode("host", "fp32", 1e-9, 12.0),),
        micro_batches=(1,),
        global_batch=4,
        sequence_length=8,
        accumulation_bytes_per_parameter=4.0,
    )
    return I.Instance(**{**values, **changes})


def small_plan(*blocks: BlockPlan) -> Plan:
    return Plan(blocks=blocks, micro_batch=1, rounds=4)


def test_instance_and_plan_survive_json():
    instance = small_instance()
    assert I.Instance.from_json(instance.to_json()) == instance
    assert digest(I.Instance.from_json(instance.to_json())) == digest(instance)
    plan = small_plan(*[BlockPlan("boundary", boundary=home) for home in ("device", "dropped", "host")])
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.segments() == ((0, 2), (2, 3))
    plan.check(instance)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"order": ("nope",)}, "order.0"),
        ({"micro_batches": (3,)}, "micro_batches.0"),
        ({"tiers": (I.Tier("device", 1),)}, "tiers"),
        ({"schema_version": 99}, "schema_version"),
        ({"global_batch": 0}, "global_batch"),
    ],
)
def test_a_bad_instance_names_its_field(change, where):
    with pytest.raises(SchemaError) as caught:
        small_instance(**change)
    assert caught.value.field == where


def test_a_bad_file_names_the_path_and_an_unknown_key_is_an_error():
    text = small_instance().to_json()
    with pytest.raises(SchemaError, match=r"tiers\.0"):
        I.Instance.from_json(text.replace('"capacity_bytes": 1000,', '"capacity_bytes": -1,', 1))
    with pytest.raises(SchemaError, match="surprise"):
        I.Instance.from_json(text.replace('"name": "small"', '"surprise": 1, "name": "small"', 1))


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([BlockPlan("none")] * 3, "not on its menu"),
        ([BlockPlan("keep")], "has 1 blocks"),
        ([BlockPlan("keep"), BlockPlan("boundary", boundary="dropped"), BlockPlan("keep")], "may be dropped only"),
        ([BlockPlan("boundary", saved_tier="host")] + [BlockPlan("keep")] * 2, "nothing to offload"),
        ([BlockPlan("keep", optimizer=SubGroupPlan("host", "8bit"))] + [BlockPlan("keep")] * 2, "no 8bit step"),
        ([BlockPlan("keep", parameter_lead=9)] + [BlockPlan("keep")] * 2, "lead"),
    ],
)
def test_a_plan_outside_the_space_says_which_block_and_why(blocks, reason):
    with pytest.raises(PlanError, match=reason):
        small_plan(*blocks).check(small_instance())


def test_the_first_block_cannot_be_dropped():
    with pytest.raises(SchemaError, match=r"blocks\.0\.boundary"):
        small_plan(BlockPlan("boundary", boundary="dropped"))
