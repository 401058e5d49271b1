"""`lazytrain plan`: will it fit, how fast, and what is in the way; nothing is allocated, no GPU and no weights
needed.
"""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lazytrain_ds.commands.question import Question, ask, divisors, read_config_file, with_capacity
from lazytrain_ds.config import BATCH_KEYS, BLOCK, LazyTrainConfig, find_block, parse_size
from lazytrain_ds.errors import ConfigError, InfeasibleError, format_bytes
from lazytrain_ds.hardware.spec import HardwareSpec
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.schema import to_json

FITS, DOES_NOT_FIT = 0, 3
# Searching seconds that one what-if question may cost.
WHAT_IF_SECONDS = 0.3


def run(arguments: Namespace) -> int:
    """Print the plan; 0 it fits, 3 it does not. LazyTrainError for bad input (the caller prints it, status 2)."""
    config = read_config_file(arguments.config)
    block = find_block(config) or LazyTrainConfig()

    from lazytrain_ds.workload.load import locate_model

    locate_model(arguments.model)  # before the machine is measured, which may take a minute
    hardware, said = machine_of(arguments, block)
    question = ask(
        config,
        arguments.model,
        hardware,
        sequence_length=arguments.seq_len,
        micro_batch=arguments.micro_batch,
        global_batch=arguments.global_batch,
    )
    question = replace(question, notes=(*said, *question.notes))

    from lazytrain_ds.planning.solve import solve
    from lazytrain_ds.report.screen import STDOUT, screen, working
    from lazytrain_ds.report.tables import format_count, plan_tables, speed_lines, speed_of

    console = screen()
    console.quiet = arguments.json == STDOUT  # then the JSON is the only output
    say = partial(console.print, markup=False, soft_wrap=True)
    title = f"{question.instance.name}: {format_count(question.instance.parameter_count)} parameters on {hardware.name}"
    say(title, style="bold")
    try:
        with working("planning"):
            plan = solve(question.instance, kind=question.kind, solver=question.solver)
    except InfeasibleError as error:
        with working("looking for what would fit"):
            advice = what_would_fit(question, error)
        say(f"does not fit: {error}", style="red")
        for line in (*advice, *(f"note: {note}" for note in question.notes)):
            say(line)
        shortages = [{"tier": tier, "need_bytes": need, "have_bytes": have} for tier, need, have in error.shortages]
        _write(arguments.json, {"fits": False, "shortages": shortages, "advice": list(advice)}, question.instance, None)
        return DOES_NOT_FIT
    for table in plan_tables(question.instance, plan):
        console.print(table)
    with working("looking for what would help"):
        helps = what_helps(question, plan)
        largest = largest_batch(question) if len(question.instance.micro_batches) > 1 else None
    lines = speed_lines(question.instance, plan)
    if largest is not None:
        lines.append(f"largest micro-batch that fits: {largest} (the plan's is the fastest)")
    for line in (*lines, *helps, *(f"note: {note}" for note in question.notes)):
        say(line)
    if arguments.write_config is not None:
        write_config(arguments.write_config, planned_config(config, question.instance, plan, arguments.typed))
        say(f"wrote {arguments.write_config}")
    speed = asdict(speed_of(question.instance, plan))
    _write(arguments.json, {"fits": True, "speed": speed, "helps": list(helps)}, question.instance, plan)
    return FITS


def _write(target: str | None, summary: Mapping[str, Any], instance: Instance, plan: Plan | None) -> None:
    from lazytrain_ds.report.screen import write_json

    whole = {
        **summary,
        "plan": json.loads(plan.to_json()) if plan is not None else None,
        "instance": json.loads(to_json(instance)),
    }
    write_json(target, whole)


def planned_config(
    config: Mapping[str, Any], instance: Instance, plan: Plan, typed: Sequence[str] = ()
) -> dict[str, Any]:
    """The config with the planned batch sizes and sequence length, and how it was made under `_comment`.

    Caps stay out: a run plans with the memory that it finds. A key instead of a JSON comment, because the Hugging Face
    Trainer and accelerate read strict JSON; DeepSpeed ignores keys it does not know.
    """
    from lazytrain_ds.report.tables import format_count, format_number, speed_of

    speed, prediction = speed_of(instance, plan), plan.prediction
    assert prediction is not None
    peaks = [
        f"{tier.name} {format_bytes(prediction.peak_bytes(tier.name))} of {format_bytes(tier.usable_bytes)}"
        for tier in instance.tiers
        if tier.capacity_bytes
    ]
    comment = [
        shlex.join(["lazytrain", *typed]),
        f"{format_count(instance.parameter_count)} parameters; predicted: {speed.step_seconds:.3g} s a step, "
        f"{format_number(speed.tokens_per_second)} tokens/s; peaks: {', '.join(peaks)}",
    ]
    rest = {key: value for key, value in config.items() if key not in ("_comment", *BATCH_KEYS)}
    block = config.get(BLOCK)
    given = dict(block) if isinstance(block, Mapping) else {}
    given.pop("micro_batch", None)
    rest[BLOCK] = {**given, "sequence_length": instance.sequence_length}
    sizes = (instance.global_batch, plan.micro_batch, plan.rounds)
    return {"_comment": comment, **dict(zip(BATCH_KEYS, sizes, strict=True)), **rest}


def write_config(target: str, config: Mapping[str, Any]) -> None:
    """Write a config file. ConfigError where that fails."""
    try:
        Path(target).expanduser().write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--write-config: cannot write {target}: {error.strerror}") from error


def machine_of(arguments: Namespace, block: LazyTrainConfig) -> tuple[HardwareSpec, tuple[str, ...]]:
    """The machine to plan for, with the caps of the command line and the block, and what was assumed."""

    def size(name: str, option: str | None, value: int | str) -> int | None:
        if option is not None:
            try:
                return parse_size(option)
            except ValueError as error:
                raise ConfigError(f"--{name.replace('_', '-')}: {option!r} {error}") from error
        return value if isinstance(value, int) else None

    device = size("device_memory", arguments.device_memory, block.device_memory)
    host = size("host_memory", arguments.host_memory, block.host_memory)
    nvme = size("nvme_space", arguments.nvme_space, block.nvme_space)
    path = block.nvme_path if block.nvme_path != "auto" else None
    notes: list[str] = []
    if arguments.hardware is not None:
        from lazytrain_ds.hardware.host_memory import host_memory
        from lazytrain_ds.hardware.presets import preset

        if host is None:
            host = host_memory().available_bytes
            notes.append(f"host memory of this machine assumed ({format_bytes(host)}); give --host-memory")
        if path is not None and nvme is None:
            raise ConfigError("a preset does not know the size of your SSD; give --nvme-space or lazytrain.nvme_space")
        spec = preset(arguments.hardware, host_memory_bytes=host, nvme_bytes=nvme if path and nvme else 0)
        notes.append(f"rates of {spec.name} from data sheets; --probe on the machine itself measures them")
    else:
        from lazytrain_ds.hardware.probe import probe
        from lazytrain_ds.runtime.machine import update_seconds

        if path is not None:
            from lazytrain_ds.hardware.nvme import check_nvme_path

            checked = check_nvme_path(path, nvme or 0)
            notes += checked.warnings
            path = str(checked.path if checked.path.is_dir() else checked.path.parent)
        cache = None if block.profile.cache_dir == "auto" else block.profile.cache_dir
        spec = probe(nvme_path=path, cache_dir=cache, refresh=bool(arguments.probe), optimizer=update_seconds)
        if spec.kind == "cpu":
            # One memory for both: by default half of it plays the device.
            half = spec.host_memory_bytes // 2
            device, host = half if device is None else device, half if host is None else host
            notes.append("there is no GPU here: half of the free memory stands in for the device")
        available = {"device": spec.device_memory_bytes, "host": spec.host_memory_bytes}
        for name, wanted in (("device", device), ("host", host)):
            if wanted is not None and wanted > available[name]:
                notes.append(f"{name}_memory {format_bytes(wanted)} is more than this machine has free now "
                             f"({format_bytes(available[name])})")  # fmt: skip
    return spec.with_memory(device=device, host=host, nvme=nvme if path is not None else None), tuple(notes)


# -- what if --


def what_would_fit(question: Question, error: InfeasibleError) -> tuple[str, ...]:
    """Changes that were tried and fit: caps raised to the need, a smaller micro-batch."""
    from lazytrain_ds.planning.solve import solve

    instance = question.instance
    lines: list[str] = []
    wanted = {tier: int(need * 1.05) for tier, need, _ in error.shortages}
    for _ in range(4):
        share = {tier.name: tier.margin_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.02
                 for tier in instance.tiers}  # fmt: skip
        raised = {tier: int(need / (1 - share[tier])) + 1 for tier, need in wanted.items()}
        try:
            solve(with_capacity(instance, **raised), kind=question.kind, time_limit_seconds=WHAT_IF_SECONDS)
        except InfeasibleError as again:
            wanted.update({tier: max(int(need * 1.05), wanted.get(tier, 0)) for tier, need, _ in again.shortages})
            continue
        keys = {"device": "device_memory", "host": "host_memory", "nvme": "nvme_space"}
        listed = ", ".join(f"{keys[tier]} {format_bytes(count)}" for tier, count in raised.items())
        lines.append(f"it fits with {listed}")
        break
    smallest = min(instance.micro_batches)
    if smallest > 1 and all(tier == "device" or tier == "host" for tier in wanted):
        lines += _smaller_batch(question, smallest)
    return tuple(lines) or ("no change of caps alone makes it fit; use a smaller model or a shorter sequence",)


def _smaller_batch(question: Question, smallest: int) -> list[str]:
    """Smaller micro-batches scale activations down; costs are proportional to the batch."""
    from lazytrain_ds.planning.solve import solve

    for size in reversed([size for size in divisors(question.instance.global_batch) if size < smallest]):
        smaller = _scaled_to(question.instance, smallest, size)
        try:
            solve(smaller, kind=question.kind, time_limit_seconds=WHAT_IF_SECONDS)
        except InfeasibleError:
            continue
        return [f"a micro-batch of {size} would fit (estimated in proportion; the same global batch)"]
    return []


def _scaled_to(instance: Instance, known: int, size: int) -> Instance:
    share = size / known
    classes = []
    for item in instance.classes:
        costs = item.at(known)
        menu = tuple(
            replace(choice, kept_bytes=int(choice.kept_bytes * share), recompute_seconds=choice.recompute_seconds *
            share,
                    offloadable_bytes=int(choice.offloadable_bytes * share),
                    recompute_flops=int(choice.recompute_flops * share))
            for choice in costs.menu
        )  # fmt: skip
        scaled = replace(
            costs, micro_batch=size, boundary_bytes=int(costs.boundary_bytes * share), menu=menu,
            forward_seconds=costs.forward_seconds * share, backward_seconds=costs.backward_seconds * share,
            forward_flops=int(costs.forward_flops * share),
            transient_forward_bytes=int(costs.transient_forward_bytes * share),
            transient_backward_bytes=int(costs.transient_backward_bytes * share),
        )  # fmt: skip
        classes.append(replace(item, costs=(scaled,)))
    return replace(instance, classes=tuple(classes), micro_batches=(size,))


def largest_batch(question: Question) -> int | None:
    """The largest profiled micro-batch that any plan fits (need grows with the batch, so this is a binary search)."""
    from lazytrain_ds.planning.solve import solve

    sizes = sorted(question.instance.micro_batches)
    best: int | None = None
    low, high = 0, len(sizes) - 1
    while low <= high:
        middle = (low + high) // 2
        one = replace(question.instance, micro_batches=(sizes[middle],))
        try:
            solve(one, kind=question.kind, solver=question.solver, time_limit_seconds=WHAT_IF_SECONDS)
        except InfeasibleError:
            high = middle - 1
            continue
        best, low = sizes[middle], middle + 1
    return best


def what_helps(question: Question, plan: Plan) -> tuple[str, ...]:
    """The single change (a quarter more of a cap or a rate) that shortens the step most; the others briefly."""
    from lazytrain_ds.planning.simulator import Simulator
    from lazytrain_ds.planning.solve import solve

    instance = question.instance
    assert plan.prediction is not None
    now = plan.prediction.step_seconds
    gains: list[tuple[float, str]] = []
    for tier in instance.tiers:
        if not tier.capacity_bytes:
            continue
        more = with_capacity(instance, **{tier.name: int(tier.capacity_bytes * 1.25)})
        try:
            better = solve(more, kind=question.kind, time_limit_seconds=WHAT_IF_SECONDS)
        except InfeasibleError:
            continue
        assert better.prediction is not None
        gains.append(
            (
                now / better.prediction.step_seconds - 1,
                f"{format_bytes(tier.capacity_bytes / 4)} more {tier.name} memory",
            )
        )
    for names, label in ((("h2d", "d2h"), "a link"), (("nvme_read", "nvme_write"), "an SSD")):
        channels = tuple(
            replace(channel, bytes_per_second=1.25 * channel.bytes_per_second) if channel.name in names else channel
            for channel in instance.channels
        )
        outcome = Simulator(replace(instance, channels=channels)).run(plan)
        gains.append((now / outcome.step_seconds - 1, f"{label} 25 % faster"))
    modes = tuple(replace(mode, seconds_per_parameter=mode.seconds_per_parameter / 1.25)
                  for mode in instance.optimizer_modes)  # fmt: skip
    outcome = Simulator(replace(instance, optimizer_modes=modes)).run(plan)
    gains.append((now / outcome.step_seconds - 1, "an optimizer step 25 % faster (more cores or memory bandwidth)"))
    gains.sort(reverse=True)
    if not gains or gains[0][0] < 0.005:
        return ("what would help most: only faster compute",)
    return (f"what would help most: {gains[0][1]} (step {100 * gains[0][0]:.0f} % faster)",)
