"""When a plan counts as off, from timelines that the simulator makes under other rates; and what is done about it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import ConfigError, InfeasibleError
from lazytrain_ds.planning.instance import Allowed, Channel
from lazytrain_ds.planning.schema import TRANSFER_CHANNELS
from lazytrain_ds.planning.simulator import simulate
from lazytrain_ds.planning.solve import solve
from lazytrain_ds.planning.timeline import Stall, Task
from lazytrain_ds.runtime.corrections import Corrections, channel_rate, measure
from lazytrain_ds.runtime.replan import DROP_STEPS, RESOLVES_AFTER_DROPS, WINDOW_STEPS, Replanner, make_replanner
from lazytrain_ds.workload.measure import Seconds, with_measured
from tests.models import GPT
from tests.runtime.zero3 import flat_instance


def slower(instance, forward=1.0, backward=1.0, **rates):
    """The instance with compute that takes so many times as long, and channels at a share of their rates."""
    seconds = {}
    for item in instance.classes:
        costs = item.at(2)
        seconds[item.name] = Seconds(costs.forward_seconds * forward, costs.backward_seconds * backward)
    channels = tuple(
        replace(channel, bytes_per_second=channel.bytes_per_second * rates.get(channel.name, 1.0))
        for channel in instance.channels
    )
    return replace(with_measured(instance, seconds, 2), channels=channels)


@pytest.fixture(scope="module")
def instance():
    """GPT's blocks of 200 kB behind a slow link, in host memory: fetching takes about as long as computing."""
    channels = tuple(Channel(name, 2e7) for name in TRANSFER_CHANNELS)
    return replace(flat_instance(GPT()), channels=channels, allowed=Allowed(parameter_tiers=("host",)))


class Book:
    """As much of a PlanBook as a Replanner asks for."""

    def __init__(self, instance):
        self.estimated = self.instance = instance
        self.plan = solve(instance, time_limit_seconds=0.05)
        self.corrections = None
        self.kept = []
        self.asked = []
        self.world_size, self.times_blocks = 1, True

    def keep_measured(self, corrections):
        self.kept.append(corrections)

    def solve_again(self, instance):
        self.asked.append(instance)
        return solve(instance, time_limit_seconds=0.05)


@pytest.fixture
def book(instance):
    return Book(instance)


def feed(replanner, book, real, count):
    """So many steps as `real` would have them; what the replanner said to the last one that mattered."""
    timeline = replace(simulate(real, book.plan), source="measured")
    answers = [replanner.step_done(timeline) for _ in range(count)]
    found = [answer for answer in answers if answer is not None]
    if found:
        book.instance, book.plan = found[-1]
    return found


def replanner_of(book, always=False):
    lines = []
    return Replanner(book, always, lines.append), lines


def test_a_plan_that_is_as_promised_stays_and_its_times_are_kept(book):
    replanner, lines = replanner_of(book)
    assert feed(replanner, book, book.instance, 30) == [] and lines == [] and book.asked == []
    assert len(book.kept) == 1
    for ratio in book.kept[0].compute.values():
        assert ratio.forward == pytest.approx(1.0) and ratio.backward == pytest.approx(1.0)


@pytest.mark.parametrize(("factor", "again"), [(1.1, False), (1.5, True), (0.5, True)])
def test_compute_that_takes_other_times_than_estimated(book, factor, again):
    replanner, lines = replanner_of(book)
    real = slower(book.estimated, factor, factor)
    found = feed(replanner, book, real, 1 + WINDOW_STEPS)
    assert len(found) == again and replanner.resolved == again
    if again:
        instance, plan = found[0]
        assert plan.prediction.step_seconds == pytest.approx(simulate(real, plan).step_seconds)
        for mine, theirs in zip(instance.classes, real.classes, strict=True):
            assert mine.at(2).forward_seconds == pytest.approx(theirs.at(2).forward_seconds)
        assert "with what was measured it takes" in lines[0] and "solved again" in lines[0]
        assert feed(replanner, book, real, 30) == [], "once"


def test_one_noisy_step_changes_nothing(book):
    replanner, _ = replanner_of(book)
    feed(replanner, book, book.instance, 2)
    feed(replanner, book, slower(book.estimated, 10.0, 10.0, h2d=0.1), 1)
    feed(replanner, book, book.instance, 30)
    assert replanner.resolved == 0


def test_waits_alone_make_a_plan_off(book):
    replanner, _ = replanner_of(book)
    timeline = replace(simulate(book.instance, book.plan), source="measured")
    late = replace(timeline, stalls=(*timeline.stalls, Stall("d2h", 0.2 * timeline.step_seconds)))
    found = [answer for _ in range(1 + WINDOW_STEPS) if (answer := replanner.step_done(late)) is not None]
    assert len(found) == 1 and replanner.resolved == 1


@pytest.mark.parametrize(("share", "again"), [(0.3, True), (0.95, False)])
def test_a_channel_that_slows_down_in_the_middle_of_a_run(book, share, again):
    replanner, lines = replanner_of(book)
    feed(replanner, book, book.instance, 20)
    real = slower(book.estimated, h2d=share)
    assert feed(replanner, book, real, DROP_STEPS - 1) == [], "two slow steps may be chance"
    found = feed(replanner, book, real, 1)
    assert len(found) == again
    if again:
        assert found[0][0].channel("h2d").bytes_per_second == pytest.approx(real.channel("h2d").bytes_per_second)
        assert "h2d" in lines[0] and "GB/s instead of" in lines[0]
        assert feed(replanner, book, real, 30) == [], "the new rate is the expected one now"


def test_drops_are_followed_only_so_often(book):
    replanner, _ = replanner_of(book)
    feed(replanner, book, book.instance, 10)
    for number in range(RESOLVES_AFTER_DROPS + 2):
        feed(replanner, book, slower(book.estimated, h2d=0.4 ** (number + 1)), 10)
    assert replanner.resolved == RESOLVES_AFTER_DROPS


def test_always_looks_after_every_window(book):
    replanner, _ = replanner_of(book, always=True)
    for factor in (2.0, 4.0, 8.0):
        feed(replanner, book, slower(book.estimated, factor, factor), 2 + WINDOW_STEPS)
    assert replanner.resolved == 3


def test_where_nothing_fits_the_plan_stays_with_its_real_prediction(book):
    def none(instance):
        raise InfeasibleError("too small")

    book.solve_again = none
    replanner, lines = replanner_of(book)
    before, real = book.plan, slower(book.estimated, 2.0, 2.0)
    found = feed(replanner, book, real, 1 + WINDOW_STEPS)
    assert found[0][1].blocks == before.blocks and "no other plan was found: too small" in lines[0]
    assert found[0][1].prediction.step_seconds == pytest.approx(simulate(real, before).step_seconds)


# -- corrections ---------------------------------------------------------------------------------------------------
def test_corrections_carry_over_to_another_shape(instance):
    plan = solve(instance, time_limit_seconds=0.05)
    real = slower(instance, 1.5, 2.0, d2h=0.5)
    corrections = measure(instance, plan, [simulate(real, plan)] * 3)
    twice = with_measured(
        instance,
        {c.name: Seconds(2 * c.at(2).forward_seconds, 2 * c.at(2).backward_seconds) for c in instance.classes},
        2,
    )
    applied = corrections.applied(twice, 2)
    for mine, before in zip(applied.classes, twice.classes, strict=True):
        assert mine.at(2).forward_seconds == pytest.approx(1.5 * before.at(2).forward_seconds)
        assert mine.at(2).backward_seconds == pytest.approx(2.0 * before.at(2).backward_seconds)
    assert applied.channel("d2h").bytes_per_second == pytest.approx(1e7)
    again = Corrections.from_seconds(instance, 2, corrections.seconds(instance, 2)).compute
    assert again.keys() == corrections.compute.keys()
    for name, seconds in again.items():
        assert seconds.forward == pytest.approx(1.5) and seconds.backward == pytest.approx(2.0), name


def test_rate_of_a_channel_takes_overlap_and_latency_off():
    from lazytrain_ds.planning.timeline import Timeline

    def timeline(*spans):
        tasks = tuple(Task("parameter_fetch", 0, "h2d", start, end, 10**6) for start, end in spans)
        return Timeline(tasks, (), (), 1.0)

    assert channel_rate(timeline((0.0, 0.1), (0.1, 0.2)), "h2d") == pytest.approx(1e7)
    assert channel_rate(timeline((0.0, 0.2), (0.1, 0.2)), "h2d") == pytest.approx(1e7)
    assert channel_rate(timeline((0.0, 0.1), (0.3, 0.4)), "h2d", 0.05) == pytest.approx(2e7)
    assert channel_rate(timeline(), "h2d") is None
    assert channel_rate(timeline((0.0, 0.1)), "d2h") is None


# -- who asks for it -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("block", "world_size", "timed", "reason"),
    [
        ({"plan_file": "plan.json"}, 1, True, r"plan_file.*says what to do"),
        ({"policy": "module:Name"}, 1, True, r"policy.*decides instead of the plan"),
        ({}, 2, True, "there are 2 ranks"),
        ({}, 1, False, "blocks are not timed"),
    ],
)
def test_where_the_plan_is_not_ours_to_change(block, world_size, timed, reason):
    book = SimpleNamespace(world_size=world_size, times_blocks=timed)
    assert make_replanner(book, LazyTrainConfig.parse(block), print) is None
    with pytest.raises(ConfigError, match=f'"lazytrain.replan": true is not possible here, because .*{reason}'):
        make_replanner(book, LazyTrainConfig.parse({**block, "replan": True}), print)


def test_on_by_default_and_off_when_asked():
    book = SimpleNamespace(world_size=1, times_blocks=True)
    assert make_replanner(book, LazyTrainConfig(), print).always is False
    assert make_replanner(book, LazyTrainConfig(replan=True), print).always is True
    assert make_replanner(book, LazyTrainConfig(replan=False), print) is None
