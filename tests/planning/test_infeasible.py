import re
from dataclasses import replace

import pytest

from benchmarks.planner_instances import instance as big_instance
from benchmarks.planner_instances import with_caps
from lazytrain_ds.config import parse_size
from lazytrain_ds.errors import InfeasibleError
from lazytrain_ds.planning.infeasible import diagnose
from lazytrain_ds.planning.solve import solve
from tests.planning.tiny import tiny_instance

FITTING = tiny_instance(4, rounds=2)


def test_the_smallest_cap_is_named_and_a_plan_fits_there():
    instance = with_caps(FITTING, device=12)
    with pytest.raises(InfeasibleError):
        solve(instance)
    found = diagnose(instance)
    tier, need, have = found.shortages[0]
    assert tier == "device" and need > have == 12
    report = next(report for report in found.caps if report.tier == "device")
    assert report.need_bytes > 12 and report.proven_bytes <= report.need_bytes
    solve(with_caps(FITTING, device=report.need_bytes))
    with pytest.raises(InfeasibleError):
        solve(with_caps(FITTING, device=report.proven_bytes - 1))
    assert f"device {report.need_bytes} B instead of 12 B" in found.text()


def test_the_message_has_need_have_and_what_to_do():
    with pytest.raises(
        InfeasibleError, match=r"device: needs .* has 12 B .* short\).*one larger cap is enough"
    ) as caught:
        solve(with_caps(FITTING, device=12))
    assert caught.value.shortages[0][0] == "device"


def test_caps_that_must_rise_together_are_named_and_a_plan_fits_there():
    on_host = replace(FITTING, allowed=replace(FITTING.allowed, optimizer_tiers=("host",)))
    instance = with_caps(on_host, device=12, host=5, nvme=0)
    with pytest.raises(InfeasibleError, match="no single larger cap is enough: ") as caught:
        solve(instance)
    together = str(caught.value).split("no single larger cap is enough: ")[1].split(";")[0]
    caps = {tier: int(need) for tier, need in re.findall(r"(device|host|nvme) (\d+) B instead of", together)}
    assert set(caps) == {"device", "host"}
    solve(with_caps(on_host, **{"nvme": 0, **caps}))


def test_the_advice_is_enough_where_margins_are_a_share_of_the_capacity():
    instance = big_instance("0.5B", "rtx3090", micro_batches=(2,), global_batch=64, device_bytes=6 * 10**9)

    def with_margin(capacity):
        tiers = (replace(instance.tier("device"), capacity_bytes=capacity, margin_bytes=capacity // 10),)
        return replace(instance, tiers=tiers + tuple(tier for tier in instance.tiers if tier.name != "device"))

    with pytest.raises(InfeasibleError, match="one larger cap is enough") as caught:
        solve(with_margin(5 * 10**9))
    advised = re.search(r"device (\S+ \wB) instead of 5 GB", str(caught.value))
    solve(with_margin(parse_size(advised[1])))


def test_a_write_budget_is_no_cap_that_could_be_raised():
    instance = replace(
        FITTING, nvme_write_budget_bytes_per_step=1, allowed=replace(FITTING.allowed, optimizer_tiers=("nvme",))
    )
    with pytest.raises(InfeasibleError, match=r"short of nvme_write_budget: \d+ B are written in a step") as caught:
        solve(instance)
    assert "nvme: needs" not in str(caught.value) and "larger cap is enough, the" not in str(caught.value)


def test_the_largest_micro_batch_that_fits():
    instance = big_instance("0.5B", "rtx3090", micro_batches=(1, 2, 64), global_batch=64, device_bytes=9 * 10**9)
    assert diagnose(instance, budget=40).largest_micro_batch == 2
