"""`lazytrain explain`: why a plan is as it is. Needs neither torch nor DeepSpeed."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from functools import partial
from typing import Any

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.explain import block_reason, explain
from lazytrain_ds.planning.simulator import simulate
from lazytrain_ds.report import explanation as words
from lazytrain_ds.report.run_directory import Source, read_source
from lazytrain_ds.report.screen import screen, working, write_json

# Searching seconds per what-if question.
WHAT_IF_SECONDS = 0.5


def run(arguments: Namespace) -> int:
    """Explain a plan or a run, or one block of it; 0. ConfigError where there is none (status 2)."""
    source = read_source(arguments.source)
    return _block(arguments, source) if arguments.block is not None else _whole(arguments, source)


def _whole(arguments: Namespace, source: Source) -> int:
    console = screen()
    say = partial(console.print, markup=False)
    with working("asking the planner"):
        found = explain(source.instance, source.plan, what_if=not arguments.quick, time_limit_seconds=WHAT_IF_SECONDS)
    binds = words.binding_lines(source)
    buys = words.what_if_lines(source.instance, source.plan, found.what_if)
    blocks = [words.reason_lines(source.instance, source.plan, reason) for reason in found.blocks]
    answer: dict[str, Any] = {
        "source": source.name,
        "step": asdict(found.objective),
        "measured": [asdict(record) for record in source.records],
        "binds": binds,
        "blocks": [
            {"first": reason.first, "last": reason.last, "decision": reason.decision, "sentences": lines}
            for reason, lines in zip(found.blocks, blocks, strict=True)
        ],
        "what_if": [asdict(item) for item in found.what_if],
    }
    if write_json(arguments.json, answer):
        return 0
    say(words.headline(source), style="bold")
    say(words.measured_line(source))
    console.print(words.step_table(found))
    say("\nWhat binds", style="bold")
    for line in binds:
        say(f"* {line}")
    say("\nWhy each block is where it is", style="bold")
    for lines in blocks:
        for line in lines:
            say(line)
    if buys:
        say("\nWhat would help", style="bold")
        for line in buys:
            say(f"* {line}")
    return 0


def _block(arguments: Namespace, source: Source) -> int:
    block, count = arguments.block, source.plan.block_count
    if not 0 <= block < count:
        raise ConfigError(f"--block: there is no block {block}; {source.name} has blocks 0 to {count - 1}")
    reason = block_reason(source.instance, source.plan, block)
    sentences = words.reason_lines(source.instance, source.plan, reason)
    times = words.block_lines(source, block, simulate(source.instance, source.plan))
    answer = {
        "source": source.name,
        "block": block,
        "class": source.instance.order[block],
        "plan": asdict(source.plan.blocks[block]),
        "sentences": sentences,
        "times": times,
    }
    if write_json(arguments.json, answer):
        return 0
    console = screen()
    console.print(words.headline(source), style="bold", markup=False)
    console.print(words.block_table(source, block))
    for line in sentences:
        console.print(line, markup=False)
    console.print("\nIn the predicted first micro-step", style="bold")
    for line in times:
        console.print(f"* {line}" if not line.startswith(" ") else line, markup=False)
    return 0
