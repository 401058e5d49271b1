"""Hand-reckoned schedules for every clause of the contract in simulator.py."""

import itertools
import random
from dataclasses import replace

import pytest

from benchmarks.planner_instances import instance as big_instance
from lazytrain_ds.errors import PlanError
from lazytrain_ds.planning.plan import SubGroupPlan
from lazytrain_ds.planning.rules import RULES, apply
from lazytrain_ds.planning.simulator import Simulator, predict, simulate
from tests.planning.random_plans import random_plan
from tests.planning.tiny import DEVICE_GROUP, tiny_instance, uniform


def tasks(timeline, kind, block=None):
    return [task for task in timeline.tasks if task.kind == kind and block in (None, task.block)]


def test_everything_resident_is_pure_compute():
    instance = tiny_instance(optimizer_modes=tiny_instance().optimizer_modes[2:])
    plan = uniform(instance, parameter_tier="device", optimizer=DEVICE_GROUP)
    timeline = simulate(instance, plan)
    # 3 x (10 + 20) of compute and 3 updates of 2 parameters at 0.5 s.
    assert timeline.step_seconds == pytest.approx(93)
    assert timeline.stall_seconds() == 0
    # 3 x (4 parameters, 8 accumulation, 24 states); all boundaries and kept tensors; the last backward's transient
    # and gradient.
    assert timeline.peak_bytes("device") == 3 * 36 + 3 * (2 + 8) + 7 + 3


@pytest.mark.parametrize(("lead", "stall"), [(0, 3 * 4 + 2 * 4), (1, 4), (2, 4)])
def test_a_fetch_is_issued_lead_visits_ahead_and_the_last_block_is_not_fetched_twice(lead, stall):
    instance = tiny_instance()
    plan = uniform(instance, parameter_lead=lead)
    timeline = simulate(instance, plan)
    assert len(tasks(timeline, "parameter_fetch")) == 5
    # Serial: the last gradient (3 s) first; then the first fetch is always exposed.
    assert timeline.stall_seconds("h2d") == pytest.approx(stall)
    assert timeline.stall_seconds("d2h") == pytest.approx(3)
    assert timeline.step_seconds == pytest.approx(90 + 3 + stall)


def test_long_leads_hold_and_count_slots():
    instance = tiny_instance(5)
    simulator = Simulator(instance)
    one = simulator.run(uniform(instance, parameter_lead=1))
    three = simulator.run(uniform(instance, parameter_lead=3))
    assert one.program.moved["h2d"][0] == 9 * 4
    assert three.program.moved["h2d"][0] == 8 * 4  # the last but one is held as well
    assert three.peaks["device"] > one.peaks["device"]


def test_keep_parameters_holds_them_from_forward_to_backward():
    instance = tiny_instance()
    timeline = simulate(instance, uniform(instance, keep_parameters=True))
    assert len(tasks(timeline, "parameter_fetch")) == 3


def test_a_gradient_lingers_until_its_copy_ends_and_two_at_most():
    instance = tiny_instance(rate=0.1)  # a gradient takes 30 s, a backward 20 s
    plan = uniform(instance, parameter_tier="device")
    timeline = simulate(instance, plan)
    backward = {task.block: task for task in tasks(timeline, "backward")}
    gradient = {task.block: task for task in tasks(timeline, "gradient")}
    assert gradient[1].start_seconds == pytest.approx(gradient[2].end_seconds)
    assert backward[0].start_seconds == pytest.approx(gradient[2].end_seconds)  # not before the one before last left
    assert timeline.stall_seconds("d2h") > 0


def test_offloaded_tensors_leave_and_come_back():
    instance = tiny_instance()
    plan = uniform(instance, parameter_tier="device", boundary="host", saved_tier="host")
    timeline = simulate(instance, plan)
    out, back = tasks(timeline, "activation_offload"), tasks(timeline, "activation_prefetch")
    assert [(task.block, task.byte_count) for task in out] == [(0, 2), (0, 6), (1, 2), (1, 6), (2, 2), (2, 6)]
    assert sorted((task.block, task.byte_count) for task in back) == sorted((t.block, t.byte_count) for t in out)
    forward = {task.block: task for task in tasks(timeline, "forward")}
    backward = {task.block: task for task in tasks(timeline, "backward")}
    for task in out:
        producer = task.block if task.byte_count == 6 else task.block - 1
        assert task.start_seconds >= (forward[producer].end_seconds if producer >= 0 else 0) - 1e-9
    for task in back:
        assert task.end_seconds <= backward[task.block].start_seconds + 1e-9
    kept = Simulator(instance).run(uniform(instance, parameter_tier="device"))
    assert timeline.peak_bytes("device") < kept.peaks["device"]
    assert timeline.peak_bytes("host") == kept.peaks["host"] + 3 * 8


def test_nvme_homes_cost_the_link_and_the_ssd():
    instance = tiny_instance()
    timeline = simulate(instance, uniform(instance, boundary="nvme", saved_tier="nvme", parameter_tier="nvme"))
    assert timeline.channel_bytes("nvme_write") == 3 * 8 + 3 * 4  # activations, updated parameters
    assert timeline.channel_bytes("nvme_read") == 3 * 8 + 5 * 4
    assert timeline.channel_bytes("h2d") == 3 * 8 + 5 * 4
    assert timeline.peak_bytes("nvme") == 3 * 8 + 3 * 4


def test_a_dropped_segment_is_run_again_once_from_its_boundary():
    instance = tiny_instance()
    plan = uniform(instance, choice="boundary")
    blocks = (plan.blocks[0], *[replace(block, boundary="dropped") for block in plan.blocks[1:]])
    timeline = simulate(instance, replace(plan, blocks=blocks))
    again = [(task.block, task.seconds) for task in tasks(timeline, "recompute")]
    # Blocks 0 and 1 are re-run without gradient, then each backward recomputes its own inside.
    assert again == [(0, 10), (1, 10), (2, 10), (1, 10), (0, 10)]
    # Forward 0 1 2, re-run 0 1, backward 2 1 0: with lead 1 only the last two turns are held.
    fetched = [task.block for task in tasks(timeline, "parameter_fetch")]
    assert fetched == [0, 1, 2, 0, 1, 2, 1, 0]
    published = simulate(instance, replace(plan, blocks=blocks), executor="published_megatrain")
    assert sum(task.seconds for task in tasks(published, "recompute")) == 60
    assert len(tasks(published, "parameter_fetch")) == 9


def test_serial_waits_for_all_updates_and_hidden_for_one_block_at_a_time():
    instance = tiny_instance(host_seconds=6.0)
    serial = simulate(instance, uniform(instance, "serial", parameter_lead=1))
    hidden = simulate(instance, uniform(instance, "hidden", parameter_lead=1))
    assert serial.step_seconds == pytest.approx(90 + 3 + 18 + 4)
    # Block 0's update ends at 3 + 6, its fetch at 13; the other two hide behind the forward.
    assert hidden.step_seconds == pytest.approx(90 + 13)
    updates = [task.block for task in tasks(hidden, "optimizer")]
    assert updates == [0, 1, 2]
    for block in range(3):
        update = tasks(hidden, "optimizer", block)[0]
        assert tasks(hidden, "parameter_fetch", block)[0].start_seconds >= update.end_seconds - 1e-9


def test_resident_blocks_stepped_on_the_host_get_one_write_back():
    instance = tiny_instance(host_seconds=6.0)
    timeline = simulate(instance, uniform(instance, "hidden", parameter_tier="device"))
    assert not tasks(timeline, "parameter_fetch")
    assert len(tasks(timeline, "parameter_write")) == 3
    assert timeline.step_seconds == pytest.approx(90 + 13)


def test_frozen_weights_of_a_mixed_block_are_never_written():
    base = tiny_instance()
    mixed = replace(base.classes[0], parameter_count=4, parameter_bytes=8)  # half of it is trained
    instance = replace(base, classes=(mixed,))
    timeline = simulate(instance, uniform(instance, parameter_tier="nvme"))
    assert timeline.channel_bytes("nvme_write") == 3 * 4
    assert timeline.channel_bytes("nvme_read") == 5 * 8
    writes = [task for task in timeline.tasks if task.kind == "parameter_write"]
    assert [task.byte_count for task in writes] == [4, 4, 4]
    assert all(task.end_seconds - task.start_seconds == pytest.approx(4.0) for task in writes)


def test_nvme_states_are_read_stepped_and_written_from_two_buffers():
    instance = tiny_instance(host_seconds=1.0)
    group = SubGroupPlan("nvme", "fp32", "host")
    timeline = simulate(instance, uniform(instance, "serial", optimizer=group))
    reads, writes = tasks(timeline, "state_read"), tasks(timeline, "state_write")
    assert [task.byte_count for task in reads] == [24, 24, 24]
    assert reads[2].start_seconds >= writes[0].end_seconds - 1e-9
    assert timeline.peak_bytes("nvme") == 72
    # gradient, read, read (the write of 0 in between), read waits for write 0, step, write
    assert writes[-1].end_seconds == pytest.approx(3 + 24 + 24 + 24 + 1 + 24 + 1)


def test_later_micro_steps_are_added_on_the_host():
    instance = tiny_instance(rounds=3, accumulate=1.0)
    timeline = simulate(instance, uniform(instance))
    added = tasks(timeline, "accumulate")
    assert len(added) == 6
    assert {task.micro_step for task in added} == {1, 2}
    assert timeline.channel_bytes("d2h") == 3 * 3 * 3


def test_a_borrower_needs_its_owner():
    instance = tiny_instance(4)
    tied = replace(instance, borrows=((3, 0),))
    plan = uniform(instance, "serial", parameter_lead=1)
    alone, both = Simulator(instance).run(plan), Simulator(tied).run(plan)
    # Owner 0 is fetched for its forward, for the borrower (forward and backward in one), for its backward.
    assert both.program.moved["h2d"][0] == alone.program.moved["h2d"][0] + 4


def test_the_timeline_never_shows_more_bytes_than_the_peak():
    """Copies out that linger over several visits, drawn at random: the picture's peak is the one that is capped."""
    rng = random.Random(4)
    instance = big_instance("0.5B", "rtx3090", rounds_of_first=2, link=2e9)
    simulator = Simulator(instance)
    lingering = 0
    for _ in range(30):
        plan = random_plan(instance, rng)
        outcome, timeline = simulator.run(plan), simulator.timeline(plan)
        for tier in ("device", "host", "nvme"):
            assert timeline.peak_bytes(tier) == outcome.peaks[tier]
        lingering += outcome.stalls["d2h"] > 0
    assert lingering > 5


@pytest.mark.parametrize("name", RULES)
def test_timeline_fast_run_and_prediction_agree(name):
    instance = big_instance("7B", "rtx4090", rounds_of_first=5)
    simulator = Simulator(instance)
    plan, outcome = apply(name, instance, simulator)
    timeline = simulator.timeline(plan)
    prediction = predict(instance, plan)
    program = outcome.program
    parts = program.step_compute_seconds + program.step_recompute_seconds + program.device_step_seconds
    assert outcome.step_seconds == pytest.approx(parts + sum(outcome.stalls.values()))
    assert timeline.step_seconds == pytest.approx(outcome.step_seconds)
    assert prediction.step_seconds == pytest.approx(outcome.step_seconds)
    for tier in ("device", "host", "nvme"):
        assert timeline.peak_bytes(tier) == outcome.peaks[tier]
    for channel, (byte_count, seconds) in program.moved.items():
        assert timeline.channel_bytes(channel) == byte_count
        assert timeline.busy_seconds(channel) == pytest.approx(seconds)
    busy = [task for task in timeline.tasks if task.channel == "compute"]
    assert all(a.end_seconds <= b.start_seconds + 1e-9 for a, b in itertools.pairwise(busy))


def test_micro_steps_are_extrapolated_exactly():
    few = big_instance("7B", "rtx4090", rounds_of_first=3)
    many = replace(few, global_batch=4 * 30)
    plans = [apply("checkpoint_all_host", value)[0] for value in (few, many)]
    first, second = (Simulator(value).run(plan).step_seconds for value, plan in zip((few, many), plans, strict=True))
    played, repeats, _ = _play(many, plans[1])
    assert repeats > 20
    assert second - first == pytest.approx(27 * played[-1][0])


def _play(instance, plan):
    from lazytrain_ds.planning.playback import Playback
    from lazytrain_ds.planning.program import Program

    return Playback(Program(Simulator(instance).costs(plan.micro_batch), plan)).play()


def test_a_plan_outside_the_space_is_refused():
    instance = tiny_instance()
    with pytest.raises(PlanError, match="not on its menu"):
        simulate(instance, uniform(instance, choice="nothing"))
