"""The plan space counted instead of listed: how many blocks of each group take each option, and what follows from it.

Every row is valid for the simulator: the phase it names lasts at least as long as the row says, the tier it names holds
at least that many bytes. So the model's optimum is a lower bound of every plan's step, and its counts make a start for
the search. What order alone decides (which block of a group takes which option) is left out.

Phases of a step: `first` (from the end of the last backward to the end of the first forward, optimizer included),
`forward` (any later forward), `backward`; `micro` is a forward with its backward, `later` the average of those after
the first, `step` all of them.
"""

from __future__ import annotations

from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.counts import ActivationOption, Group, Key, Phase, Row
from lazytrain_ds.planning.departures import paced, remaining, senders
from lazytrain_ds.planning.grouping import make_groups
from lazytrain_ds.planning.instance import Instance, StepMode
from lazytrain_ds.planning.moves import Space
from lazytrain_ds.planning.plan import BlockPlan, Plan, SubGroupPlan
from lazytrain_ds.planning.reruns import refetches
from lazytrain_ds.planning.schema import TIERS, TierName

__all__ = ["ActivationOption", "Group", "Key", "Phase", "Relaxation", "Row"]


class Relaxation:
    """Groups, options and rows of one instance, micro-batch and step mode."""

    def __init__(self, instance: Instance, costs: Costs, mode: StepMode) -> None:
        self.instance = instance
        self.costs = costs
        self.mode = mode
        self.rounds = costs.rounds
        self.space = Space(instance, costs.micro_batch)
        self.fixed: dict[Key, float] | None = None
        # The rows of `times` by key, made when first asked for.
        self._columns: dict[Key, list[tuple[int, float]]] | None = None
        self._constants: list[float] = []
        self._spans: dict[Phase, tuple[int, int]] = {}
        self._reliefs: list[tuple[int, float]] | None = None
        # What a block's decision counts as; plans share the decisions of blocks that a move leaves alone.
        self._keys: list[dict[int, tuple[BlockPlan, list[Key]]]] = [{} for _ in instance.order]
        self.groups, self.group_of = make_groups(instance, costs, self.space)
        phases: tuple[Phase, ...] = ("first", "forward", "backward", "micro", "later", "step")
        self.times: dict[Phase, list[Row]] = {phase: [] for phase in phases}
        self.memory: dict[TierName, Row] = {tier: Row(tier) for tier in TIERS}
        # Bytes of host memory a kind of staging takes as soon as one of its options occurs.
        self.staging: dict[str, dict[Key, int]] = {"states": {}, "parameters": {}, "gradients": {}}
        self.written = Row("nvme_written")
        self.offloaded_seconds = Row("activations out")  # D2H seconds of one forward's activations
        self.written_seconds = Row("activations to NVMe")  # write seconds of one forward's activations
        # Device rows at the start of the last block's and the last but one's backward, beyond memory["device"].
        self.turn = Row("turn")
        self.next = Row("next")
        self._make_rows()

    # ---- rows

    def _row(self, phase: Phase, name: str) -> Row:
        row = Row(name)
        self.times[phase].append(row)
        return row

    def _make_rows(self) -> None:
        costs, rounds = self.costs, self.rounds
        instance, n = self.instance, self.instance.block_count
        first_block, last_block = costs.blocks[0], costs.blocks[n - 1]
        last_group, first_group = self.group_of[n - 1], self.group_of[0]
        hidden = self.mode == "hidden"
        forward_compute = sum(block.forward_seconds for block in costs.blocks)
        backward_compute = sum(block.backward_seconds for block in costs.blocks)

        compute = {phase: self._row(phase, "compute") for phase in ("first", "forward", "backward")}
        compute["first"].constant = compute["forward"].constant = forward_compute
        compute["backward"].constant = backward_compute
        link = {phase: self._row(phase, "h2d") for phase in ("first", "forward", "backward")}
        link["first"].constant = link["forward"].constant = last_block.forward_seconds
        link["backward"].constant = first_block.backward_seconds
        reads = {phase: self._row(phase, "nvme_read") for phase in ("first", "forward", "backward")}
        out = self._row("backward", "d2h")
        host = self._row("first", "host")
        # What a micro-step moves it moves within itself, except for its last two gradients.
        self.h2d_micro, self.d2h_micro = self._row("micro", "h2d"), self._row("micro", "d2h")
        self.d2h_later = Row("d2h")
        self.read_micro, self.write_micro = self._row("micro", "nvme_read"), self._row("micro", "nvme_write")
        self.h2d_step, self.d2h_step = self._row("step", "h2d"), self._row("step", "d2h")
        self.read_step, self.write_step = self._row("step", "nvme_read"), self._row("step", "nvme_write")
        self.host_step = self._row("step", "host")
        state_writes = self._row("first", "nvme_write")
        host.constant = last_block.forward_seconds if hidden else forward_compute
        # The last backward and the first forward after it: all gradients leave, then the host updates.
        self.drain = Row("drain")
        self.drain.constant = host.constant + last_block.backward_seconds

        memory = self.memory
        memory["device"].constant = instance.fixed_device_bytes
        memory["host"].constant = instance.fixed_host_bytes
        if hidden:
            # Two staging buffers: all states but the last two are written before the last block's update begins.
            writes = [
                max((costs.nvme_write.seconds(costs.group(b, group)[1]) for group in self._nvme_groups(b)), default=0.0)
                for b in range(n)
            ]
            largest = sorted(writes, reverse=True)
            state_writes.constant = -sum(largest[:2])
        # All gradients but the last two have left when the last sender's backward begins.
        left = remaining(costs, self.groups, self.group_of, last=True)
        out.subtract(left)
        if n > 1:
            out.constant += last_block.backward_seconds + first_block.backward_seconds
            self.times["backward"].append(paced(costs, self.groups, self.group_of))
        if n > 2:
            # Gradients below the last two blocks only start to leave when those are through.
            late = self._row("backward", "d2h")
            late.subtract(remaining(costs, self.groups, self.group_of, last=False))
            second = costs.blocks[n - 2]
            late.constant += last_block.backward_seconds + second.backward_seconds + first_block.backward_seconds
            for g, group in enumerate(self.groups):
                for key in senders(group, g) if g != last_group else ():
                    late.add(key, costs.d2h.seconds(group.numbers.gradient_bytes))
        # A dropped boundary re-runs the block before it, which must be one that keeps its boundary only.
        recomputed = [any(choice[4] for choice in menu.values()) for menu in costs.choices]
        least_forward = [
            min(
                (costs.blocks[b - 1].forward_seconds for b in group.blocks if b > 0 and recomputed[b - 1]),
                default=0.0,
            )
            for group in self.groups
        ]

        # Transfers follow each other, and while one lasts compute gets no further than its lead: waits add up.
        lead = instance.allowed.longest_lead
        waits = {phase: self._row(phase, "compute") for phase in ("first", "forward")}
        waits["first"].constant = waits["forward"].constant = forward_compute
        reach = [
            max(sum(costs.blocks[i].forward_seconds for i in range(max(0, b - lead), b)) for b in group.blocks)
            for group in self.groups
        ]
        for g, group in enumerate(self.groups):
            numbers = group.numbers
            any_block = group.blocks[0]
            fetch = costs.h2d.seconds(numbers.parameter_bytes)
            read = costs.nvme_read.seconds(numbers.parameter_bytes)
            for index, (tier, keep) in enumerate(group.parameters):
                key = Key(g, "parameter", index)
                if numbers.parameter_bytes == 0:
                    continue
                memory[tier].add(key, numbers.parameter_bytes)
                if tier == "device":
                    continue
                # The last block goes from forward to backward without a second fetch.
                passes = 1 if keep or g == last_group else 2
                if keep or g == last_group:
                    self.turn.add(key, numbers.parameter_bytes)
                    if g != last_group:
                        self.next.add(key, numbers.parameter_bytes)
                elif g == self.group_of[n - 2]:
                    self.next.add(key, numbers.parameter_bytes)
                for phase in ("first", "forward"):
                    link[phase].add(key, fetch)
                    if g != first_group:
                        compute[phase].add(key, max(0.0, fetch - reach[g]))
                if passes == 2:
                    link["backward"].add(key, fetch)
                self.h2d_step.add(key, passes * rounds * fetch)
                self.h2d_micro.add(key, passes * fetch)
                if tier == "nvme":
                    for phase in ("first", "forward"):
                        reads[phase].add(key, read)
                        waits[phase].add(key, max(0.0, read - reach[g]))
                    if passes == 2:
                        reads["backward"].add(key, read)
                    self.read_step.add(key, passes * rounds * read)
                    self.read_micro.add(key, passes * read)
                    if numbers.trainable:
                        self.written.add(key, numbers.trained_bytes)
                        self.write_step.add(key, costs.nvme_write.seconds(numbers.trained_bytes))
                if g == first_group:
                    exposed = fetch + (read if tier == "nvme" else 0.0)
                    compute["forward"].add(key, exposed)
                    if not hidden or not numbers.trainable:
                        compute["first"].add(key, exposed)
                    if not hidden:
                        host.add(key, exposed)
            for index, option in enumerate(group.activations):
                self._activation_terms(Key(g, "activation", index), option, any_block, compute, link, reads)
                if option.boundary == "dropped":
                    compute["backward"].add(Key(g, "activation", index), least_forward[g])
            if numbers.trainable:
                for index, sub_group in enumerate(group.optimizers):
                    self._optimizer_terms(
                        Key(g, "optimizer", index), sub_group, any_block, compute, link, out, host, state_writes, reads
                    )
                back = Key(g, "write_back")
                link["first"].add(back, fetch)
                if g != first_group:
                    compute["first"].add(back, max(0.0, fetch - reach[g]))
                self.h2d_step.add(back, fetch)
                memory["host"].add(back, numbers.parameter_bytes)
                away = Key(g, "parameter_out")
                self.d2h_step.add(away, costs.d2h.seconds(numbers.parameter_bytes))
                if g == first_group and hidden:
                    # Stepped on the device, copied out and fetched again before the first block can run.
                    compute["first"].add(away, fetch)
                    entry = self._row("first", "compute")
                    entry.constant = forward_compute
                    entry.add(away, costs.d2h.seconds(numbers.parameter_bytes) + fetch)
            again = Key(g, "refetch")
            link["backward"].add(again, fetch)
            self.h2d_step.add(again, rounds * fetch)
            self.h2d_micro.add(again, fetch)

        # What is left over of one micro-step's gradients is part of the next one's: only the last one's gets away.
        self.d2h_micro.subtract(left)
        if self.rounds > 1:
            self.d2h_later.subtract(left, self.rounds - 1)
            self.times["later"].append(self.d2h_later)
        if n > 1:
            self.d2h_micro.constant += first_block.backward_seconds
            self.d2h_later.constant += first_block.backward_seconds / max(1, self.rounds - 1)

        self.refetches, self.cheapest_refetch = refetches(costs, self.groups, lead)
        self._staging()
        self.turn.constant = last_block.transient_backward_bytes + last_block.gradient_bytes
        if n > 1:
            second = costs.blocks[n - 2]
            self.next.constant = second.transient_backward_bytes + second.gradient_bytes
        for block, owners in costs.borrowed.items():
            if block == n - 1:
                self.turn.constant += sum(costs.blocks[owner].gradient_bytes for owner in owners)

    def _staging(self) -> None:
        """Host staging buffers: two of the largest of each kind that occurs."""
        for g, group in enumerate(self.groups):
            numbers = group.numbers
            if not numbers.trainable:
                continue
            for index, sub_group in enumerate(group.optimizers):
                key = Key(g, "optimizer", index)
                if sub_group.tier == "nvme":
                    self.staging["states"][key] = 2 * self.costs.group(group.blocks[0], sub_group)[1]
                if sub_group.step_device == "host" and self.rounds > 1:
                    self.staging["gradients"][key] = 2 * numbers.gradient_bytes
            for index, (tier, _) in enumerate(group.parameters):
                if tier == "nvme":
                    self.staging["parameters"][Key(g, "parameter", index)] = 2 * numbers.parameter_bytes

    def _nvme_groups(self, block: int) -> list[SubGroupPlan]:
        options = self.groups[self.group_of[block]].optimizers
        return [option for option in options if option.tier == "nvme"] if self.costs.blocks[block].trainable else []

    def _activation_terms(
        self,
        key: Key,
        option: ActivationOption,
        block: int,
        compute: dict[str, Row],
        link: dict[str, Row],
        reads: dict[str, Row],
    ) -> None:
        costs, rounds, n = self.costs, self.rounds, self.instance.block_count
        numbers = costs.blocks[block]
        kept, offloadable, recompute, needs_input, _ = costs.choices[block][option.choice]
        compute["backward"].add(key, recompute)
        if key.group == self.group_of[0]:
            link["backward"].add(key, recompute)
        on_device = kept if option.saved == "device" else kept - offloadable
        away: list[tuple[int, str]] = []
        if option.saved != "device" and offloadable:
            away.append((offloadable, option.saved))
        if needs_input and option.boundary == "device":
            on_device += numbers.boundary_bytes
        elif needs_input and option.boundary in ("host", "nvme") and numbers.boundary_bytes:
            away.append((numbers.boundary_bytes, option.boundary))
        last = key.group == self.group_of[n - 1]
        # Everything is there when the backward begins; the last block's own is gone when the next one's begins.
        self.turn.add(key, on_device)
        if not last:
            self.next.add(key, on_device)
        extra = max(0, numbers.full_kept_bytes - kept)
        came_back = sum(byte_count for byte_count, _ in away)
        if last:
            self.turn.add(key, extra + came_back)
        elif n > 1 and key.group == self.group_of[n - 2]:
            self.next.add(key, extra + came_back)
        for byte_count, tier in away:
            seconds = costs.d2h.seconds(byte_count)
            self.offloaded_seconds.add(key, seconds)
            self.d2h_step.add(key, rounds * seconds)
            self.d2h_micro.add(key, seconds)
            self.d2h_later.add(key, seconds)
            back = costs.h2d.seconds(byte_count)
            link["backward"].add(key, back)
            self.h2d_step.add(key, rounds * back)
            self.h2d_micro.add(key, back)
            self.memory[tier].add(key, byte_count)  # type: ignore[index]
            if tier == "nvme":
                reads["backward"].add(key, costs.nvme_read.seconds(byte_count))
                read, write = costs.nvme_read.seconds(byte_count), costs.nvme_write.seconds(byte_count)
                self.read_step.add(key, rounds * read)
                self.read_micro.add(key, read)
                self.write_step.add(key, rounds * write)
                self.write_micro.add(key, write)
                self.written_seconds.add(key, write)
                self.written.add(key, rounds * byte_count)

    def _after_update(self, block: int) -> float:
        numbers = self.costs.blocks[block]
        return self.costs.h2d.seconds(numbers.parameter_bytes) + numbers.forward_seconds

    def _optimizer_terms(
        self,
        key: Key,
        group: SubGroupPlan,
        block: int,
        compute: dict[str, Row],
        link: dict[str, Row],
        out: Row,
        host: Row,
        state_writes: Row,
        reads: dict[str, Row],
    ) -> None:
        costs, rounds, n = self.costs, self.rounds, self.instance.block_count
        numbers = costs.blocks[block]
        seconds, states = costs.group(block, group)
        self.memory[group.tier].add(key, states)
        if group.step_device == "device":
            self.memory["device"].add(key, numbers.accumulation_bytes)
            # On compute, at the same time as the host's updates.
            compute["first"].add(key, seconds)
            if self.mode == "hidden":
                link["first"].add(key, seconds)
            return
        self.memory["host"].add(key, numbers.accumulation_bytes)
        gradient = costs.d2h.seconds(numbers.gradient_bytes)
        out.add(key, gradient)
        self.d2h_step.add(key, rounds * gradient)
        self.d2h_micro.add(key, gradient)
        self.d2h_later.add(key, gradient)
        host.add(key, seconds)
        trainable = [block.accumulate_seconds for block in costs.blocks if block.trainable]
        added = min(trainable) / len(trainable) if rounds > 1 else 0.0
        self.drain.add(key, gradient + seconds + added)
        self.host_step.add(key, seconds + (rounds - 1) * numbers.accumulate_seconds)
        fetch = costs.h2d.seconds(numbers.parameter_bytes)
        arrives = gradient + (numbers.accumulate_seconds if rounds > 1 else 0.0)
        first = key.group == self.group_of[0]
        if self.mode == "serial":
            link["first"].add(key, seconds)
        if first and numbers.parameter_bytes:
            # The optimizer starts when block 0's gradient, the last one, is in; its own update precedes its fetch.
            host.add(key, arrives)
            link["first"].add(key, arrives if self.mode == "serial" else arrives + seconds)
            if self.mode == "hidden":
                compute["first"].add(key, arrives + seconds + fetch)
        if self.mode == "hidden" and n > 1:
            # What follows the last update: that block's fetch, its forward and the last block's.
            others = [b for b in range(n - 1) if costs.blocks[b].trainable]
            after = min((self._after_update(b) for b in others), default=0.0)
            share = fetch - after if key.group == self.group_of[n - 1] else after / len(others)
            host.add(key, share)
            self.drain.add(key, share)
        if group.tier == "nvme":
            read, write = costs.nvme_read.seconds(states), costs.nvme_write.seconds(states)
            reads["first"].add(key, read)
            state_writes.add(key, write)
            self.read_step.add(key, read)
            self.write_step.add(key, write)
            self.written.add(key, states)

    # ---- plans as counts

    def counts(self, plan: Plan) -> dict[Key, float]:
        """How often each option occurs in `plan`."""
        result: dict[Key, float] = {}

        resident_before = True
        for block, decided in enumerate(plan.blocks):
            known = self._keys[block].get(id(decided))
            if known is None or known[0] is not decided:
                known = self._keys[block][id(decided)] = (decided, self._keys_of(block, decided))
            for key in known[1]:
                result[key] = result.get(key, 0.0) + 1.0
            if decided.boundary == "dropped" and not resident_before:
                key = Key(self.group_of[block - 1], "refetch")
                result[key] = result.get(key, 0.0) + 1.0
            resident_before = decided.resident
        return result

    def _keys_of(self, block: int, decided: BlockPlan) -> list[Key]:
        g = self.group_of[block]
        group = self.groups[g]
        keys = [
            Key(g, "activation", group.activation_index[self.option_of(block, decided)]),
            Key(g, "parameter", group.parameter_index[self.parameter_of(decided)]),
        ]
        if group.numbers.trainable:
            keys.append(Key(g, "optimizer", group.optimizer_index[decided.optimizer]))
            on_device = decided.optimizer.step_device == "device"
            if decided.resident and not on_device:
                keys.append(Key(g, "write_back"))
            if not decided.resident and on_device:
                keys.append(Key(g, "parameter_out"))
        return keys

    def fix_placement(self, plan: Plan) -> None:
        """Leave only activations open: each block's parameters and sub-group are as in `plan`."""
        self.fixed = {key: value for key, value in self.counts(plan).items() if key.kind in ("parameter", "optimizer")}

    def option_of(self, block: int, decided: BlockPlan) -> ActivationOption:
        """The activation option of a block of a plan."""
        _, offloadable, _, needs_input, _ = self.costs.choices[block][decided.choice]
        saved: TierName = decided.saved_tier if offloadable else "device"
        return ActivationOption(decided.choice, saved, decided.boundary if needs_input else "device")

    @staticmethod
    def parameter_of(decided: BlockPlan) -> tuple[TierName, bool]:
        """The parameter option of a block of a plan (residents are kept anyway)."""
        return decided.parameter_tier, decided.keep_parameters and decided.parameter_tier != "device"

    def _values(self, counts: dict[Key, float]) -> list[float]:
        """Every row of `times`, then `drain`, at these counts."""
        if self._columns is None:
            rows = [row for phase in self.times for row in self.times[phase]]
            rows.append(self.drain)
            self._constants = [row.constant for row in rows]
            self._columns = {}
            for index, row in enumerate(rows):
                for key, coefficient in row.terms.items():
                    self._columns.setdefault(key, []).append((index, coefficient))
            self._spans, begin = {}, 0
            for phase in self.times:
                self._spans[phase] = (begin, begin + len(self.times[phase]))
                begin += len(self.times[phase])
        values, columns = self._constants.copy(), self._columns
        for key, count in counts.items():
            for index, coefficient in columns.get(key, ()):
                values[index] += coefficient * count
        return values

    def _most(self, values: list[float], phase: Phase) -> float:
        begin, end = self._spans[phase]
        return max(values[begin:end], default=0.0)

    def seconds(self, counts: dict[Key, float]) -> float:
        """The model's step time for given counts: the MILP's objective, with re-runs' fetches."""
        values = self._values(counts)
        return self._total(values, max(values[slice(*self._spans["step"])]))

    def _total(self, values: list[float], step: float) -> float:
        first, forward, backward, micro, later = (
            self._most(values, phase) for phase in ("first", "forward", "backward", "micro", "later")
        )
        total = max(first + backward, micro) + (self.rounds - 1) * max(forward + backward, micro, later)
        # The step as the last backward with the next forward, and every other pass.
        drained = values[-1] + (self.rounds - 1) * (forward + backward)
        return max(total, drained, step)

    def least_seconds(self, counts: dict[Key, float]) -> float:
        """No plan with these counts has a shorter step: what prefetches before backward may save is taken off."""
        # A re-run's parameters may still be there: not every fetch of the plan's is a certain cost.
        certain = self.refetches.value(counts)
        counts = {key: value for key, value in counts.items() if key.kind != "refetch"}
        if certain > 0:
            counts[Key(self.cheapest_refetch, "refetch")] = certain
        values = self._values(counts)
        if self._reliefs is None:
            lead = self.instance.allowed.longest_lead
            longest = max(block.parameter_bytes for block in self.costs.blocks)
            saved = {
                "h2d": lead * self.costs.h2d.seconds(longest),
                "nvme_read": lead * self.costs.nvme_read.seconds(longest),
            }
            times: dict[Phase, float] = {"backward": 1.0, "micro": 1.0, "step": float(self.rounds)}
            self._reliefs = [
                (self._spans[phase][0] + index, count * saved[row.name])
                for phase, count in times.items()
                for index, row in enumerate(self.times[phase])
                if row.name in saved
            ]
        for index, relief in self._reliefs:
            values[index] -= relief
        return self._total(values, max(values[slice(*self._spans["step"])]))

    def device_bytes(self, counts: dict[Key, float]) -> float:
        """Device bytes at the start of backward, as far as counts tell."""
        most = max(self.turn.value(counts), self.next.value(counts) if self.instance.block_count > 1 else 0.0)
        return self.memory["device"].value(counts) + most

    def least_excess(self, counts: dict[Key, float]) -> float:
        """Bytes above the caps that every plan with these counts has at least."""
        excess = 0.0
        for tier in TIERS:
            need = self.device_bytes(counts) if tier == "device" else self.memory[tier].value(counts)
            if tier == "host":
                for kind in self.staging.values():
                    need += max((size for key, size in kind.items() if counts.get(key)), default=0)
            excess += max(0.0, need - self.costs.caps[tier])
        return excess
