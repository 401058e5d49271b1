"""The public seam: PlanPolicy lays a plan out as the simulator does; a user's own class takes its place (F12)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.program import FORWARD, PARAMETER, RERUN, Program
from lazytrain_ds.runtime.policy import PlanPolicy
from tests.integration.plans import random_plan
from tests.integration.training import config, engine_of, gpt, llama, rule_block, run, tokens, train
from tests.planning.tiny import tiny_instance


def visits_of(program: Program, policy: PlanPolicy):
    """(position, kind, block, action) of one micro-step."""
    before = {FORWARD: policy.before_forward, RERUN: policy.before_rerun}
    for position, (kind, block) in enumerate(program.visits):
        yield position, kind, block, before.get(kind, policy.before_backward)(block)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6))
def test_what_a_visit_needs_is_there_and_nothing_is_fetched_twice(seed):
    instance = tiny_instance(6)
    plan = random_plan(instance, seed)
    program = Program(Costs(instance, plan.micro_batch), plan)
    policy = PlanPolicy(plan, instance, None)
    present = {block for block, decisions in enumerate(plan.blocks) if decisions.resident}
    issued = Counter()
    for position, _, block, action in visits_of(program, policy):
        for unit in (*action.fetch, *action.fetch_ahead):
            issued[unit] += 1
            assert unit not in present or plan.blocks[unit].resident, "it is still there"
            present.add(unit)
        assert block in present, f"seed {seed}: block {block} at visit {position}"
        present -= set(action.release)
    assert present == {block for block, decisions in enumerate(plan.blocks) if decisions.resident}
    planned = Counter(issue.block for issues in program.issues for issue in issues if issue.kind == PARAMETER)
    streamed = {b for b, decisions in enumerate(plan.blocks) if not decisions.resident}
    assert {b: n for b, n in issued.items() if b in streamed} == {b: n for b, n in planned.items() if b in streamed}


def test_what_only_the_backward_needs_is_marked_so_that_a_forward_without_gradient_leaves_it_out():
    """The last block is held over the turn; what its backward needs beside it is issued while the forward runs."""
    instance = tiny_instance(6, borrows=((5, 0),))
    ahead = 0
    for seed in range(40):
        plan = random_plan(instance, seed)
        policy = PlanPolicy(plan, instance, None)
        for block in range(plan.block_count):
            action = policy.before_forward(block)
            assert all(unit >= block or plan.blocks[unit].resident or unit == 0 for unit in action.fetch)
            ahead += len(action.fetch_ahead)
            assert policy.before_backward(block).fetch_ahead == ()
    assert ahead > 0


def test_a_choice_that_keeps_no_operators_output_is_plain_recomputation():
    """Blocks that cannot be in a segment have such a choice; it must not reach the runtime as a selective one."""
    instance = tiny_instance()
    classes = []
    for block_class in instance.classes:
        costs = tuple(
            replace(
                cost,
                menu=tuple(
                    replace(choice, kind="selective") if choice.kind == "boundary" else choice for choice in cost.menu
                ),
            )
            for cost in block_class.costs
        )
        classes.append(replace(block_class, costs=costs))
    instance = replace(instance, classes=tuple(classes))
    seen = set()
    for seed in range(20):
        plan = random_plan(instance, seed)
        policy = PlanPolicy(plan, instance, None)
        seen |= {(policy.activations(block).kind, policy.activations(block).ops) for block in range(plan.block_count)}
    assert ("boundary", ()) in seen
    assert not any(kind == "selective" and not ops for kind, ops in seen)


# -- a user's own class --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["KeepMatmuls", "OnDemand"])
@pytest.mark.parametrize("make", [gpt, llama], ids=["gpt", "llama"])
def test_f12_a_policy_of_the_users_is_carried_out_exactly(name, make):
    kept = run(make, config(rule_block("keep_all")), tokens(3))
    counts = []

    def look(engine):
        counters = engine._lt_activations.counters
        counts.append((counters.recomputes, counters.offloaded_bytes.get("host", 0)))
        assert type(engine._lt_book.policy).__name__ == name

    run(make, config({"policy": f"tests.runtime.policies:{name}"}), tokens(3), check=look).assert_identical(kept)
    blocks = 5 if make is gpt else 3
    recomputes, offloaded = counts[0]
    assert recomputes == 3 * blocks
    assert (offloaded > 0) == (name == "KeepMatmuls")


def test_f12_kept_matmul_outputs_are_not_computed_again():
    from torch.utils.flop_counter import FlopCounterMode

    flops = {}
    for name in ("KeepMatmuls", "OnDemand"):
        torch.manual_seed(0)
        with engine_of(gpt(), config({"policy": f"tests.runtime.policies:{name}"})) as engine:
            with FlopCounterMode(display=False) as counter:
                train(engine, tokens(1))
            flops[name] = counter.get_total_flops()
    model = gpt()
    weights = sum(p.numel() for block in model.blocks for p in block.parameters() if p.dim() == 2)
    assert flops["OnDemand"] - flops["KeepMatmuls"] == 2 * weights * 2 * 256


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("tests.runtime.policies:Nothing", "cannot import 'tests.runtime.policies:Nothing'"),
        ("tests.runtime.nowhere:Nothing", "cannot import"),
        ("tests.runtime.policies:NotAPolicy", "NotAPolicy is not a lazytrain_ds.runtime.policy.Policy"),
    ],
)
def test_f12_a_policy_that_is_none_is_refused_by_name(policy, message):
    with pytest.raises(ConfigError, match=message), engine_of(gpt(), config({"policy": policy})):
        pass
