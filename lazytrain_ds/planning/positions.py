"""The count model with every block at its place: a linear program in which order, prefetch and memory meet.

Counts say how much moves and what stays; here it is also said where. Each block has its own shares of the options, and
each visit of a micro-step an end time; transfers are a fluid that keeps its volume, its rate, its place on the device
and the reach of the longest lead. Every row holds for what the simulator does with any plan (its own times, and the
average over the micro-steps after the first), so the optimum is a lower bound that knows what counts cannot: bytes
that come back for the next block share the device with the block that runs, and what leaves late is still there.
"""

from __future__ import annotations

from typing import TypeAlias

from ortools.math_opt.python import mathopt

from lazytrain_ds.planning.counts import Key
from lazytrain_ds.planning.milp import CountModel
from lazytrain_ds.planning.relaxation import Relaxation

__all__ = ["PositionModel"]

Linear: TypeAlias = mathopt.LinearTypes
Terms: TypeAlias = list[tuple[mathopt.Variable, float]]


class _Block:
    """One block's shares and what follows from them: each a list of (variable, coefficient) and no constant."""

    def __init__(self) -> None:
        self.on_device: Terms = []  # activation bytes that stay there until the backward
        self.extra: Terms = []  # bytes more while its own backward runs: recomputed, come back, parameters
        self.saved_out: Terms = []  # D2H seconds at the end of its forward (no latency)
        self.boundary_out: Terms = []  # D2H seconds at the end of the forward before
        self.recompute: Terms = []
        self.dropped: Terms = []
        self.recomputed: Terms = []  # 1 where only the boundary is kept
        self.back: Terms = []  # H2D seconds of its activations
        self.back_read: Terms = []
        self.fetch: Terms = []  # H2D seconds of its parameters in a forward
        self.first_fetch: Terms = []
        self.again: Terms = []  # and in backward
        self.read: Terms = []
        self.again_read: Terms = []
        self.gradient: Terms = []
        self.host_step: Terms = []  # seconds of its update on the host
        self.on_host: Terms = []  # 1 where it is stepped on the host
        self.device_step: Terms = []
        self.state_read: Terms = []
        self.state_write: Terms = []
        self.parameter_write: Terms = []
        self.kept_parameters: Terms = []
        self.parameters: Terms = []


class PositionModel(CountModel):
    """The program for one Relaxation, always with fractional shares; `relaxed=False` keeps the counts whole."""

    def __init__(self, relaxation: Relaxation, *, relaxed: bool = True) -> None:
        super().__init__(relaxation, relaxed=relaxed)
        self.share: list[dict[Key, mathopt.Variable]] = []
        self._shares()
        self._blocks = [self._describe(block) for block in range(relaxation.instance.block_count)]
        self._recomputed = [
            self._named(f"recomputed_{b}", self._sum(block.recomputed)) for b, block in enumerate(self._blocks)
        ]
        self._drops()
        lead = relaxation.instance.allowed.longest_lead
        self._window = lead
        later = relaxation.rounds > 1
        self._micro_step("first", memory=not later)
        if later:
            self._micro_step("later", memory=True)

    # ---- shares

    def _shares(self) -> None:
        model, relaxation = self.model, self.relaxation
        self.share = [{} for _ in range(relaxation.instance.block_count)]
        for g, group in enumerate(relaxation.groups):
            keys = [key for key in self.variables if key.group == g]
            if group.size == 1:
                self.share[group.blocks[0]] = {key: self.variables[key] for key in keys}
                continue
            for block in group.blocks:
                for key in keys:
                    name = f"{key.kind}_{g}_{key.option}_at_{block}"
                    self.share[block][key] = model.add_variable(lb=0.0, ub=1.0, name=name)
                for kind in ("activation", "parameter", "optimizer"):
                    parts = [self.share[block][key] for key in keys if key.kind == kind]
                    if parts:
                        model.add_linear_constraint(mathopt.fast_sum(parts) == 1.0)
                self._overlap(g, block)
            for key in keys:
                total = mathopt.fast_sum(self.share[block][key] for block in group.blocks)
                model.add_linear_constraint(total - self.variables[key] == 0.0)

    def _overlap(self, g: int, block: int) -> None:
        back = self.share[block].get(Key(g, "write_back"))
        if back is None:
            return
        group = self.relaxation.groups[g]
        resident = mathopt.fast_sum(
            self.share[block][Key(g, "parameter", option)]
            for option, (tier, _) in enumerate(group.parameters)
            if tier == "device"
        )
        stepped = mathopt.fast_sum(
            self.share[block][Key(g, "optimizer", option)]
            for option, sub_group in enumerate(group.optimizers)
            if sub_group.step_device == "device"
        )
        self.model.add_linear_constraint(back - resident + stepped >= 0.0)
        out = self.share[block][Key(g, "parameter_out")]
        self.model.add_linear_constraint(out - stepped + resident >= 0.0)

    def _describe(self, block: int) -> _Block:
        relaxation, costs = self.relaxation, self.relaxation.costs
        g = relaxation.group_of[block]
        group, numbers, share = relaxation.groups[g], costs.blocks[block], self.share[block]
        n, lead = relaxation.instance.block_count, relaxation.instance.allowed.longest_lead
        result = _Block()
        for index, option in enumerate(group.activations):
            variable = share[Key(g, "activation", index)]
            kept, offloadable, recompute, needs_input, boundary_only = costs.choices[block][option.choice]
            stays = kept if option.saved == "device" else kept - offloadable
            extra = max(0, numbers.full_kept_bytes - kept)
            result.recompute.append((variable, recompute))
            if boundary_only:
                result.recomputed.append((variable, 1.0))
            away: list[tuple[int, str]] = []
            if option.saved != "device" and offloadable:
                away.append((offloadable, option.saved))
                result.saved_out.append((variable, offloadable / costs.d2h.bytes_per_second))
            if option.boundary == "dropped":
                result.dropped.append((variable, 1.0))
                extra += numbers.boundary_bytes
            elif needs_input and option.boundary == "device":
                stays += numbers.boundary_bytes
            elif needs_input and numbers.boundary_bytes:
                away.append((numbers.boundary_bytes, option.boundary))
                result.boundary_out.append((variable, numbers.boundary_bytes / costs.d2h.bytes_per_second))
            for byte_count, home in away:
                extra += byte_count
                result.back.append((variable, costs.h2d.seconds(byte_count)))
                if home == "nvme":
                    result.back_read.append((variable, costs.nvme_read.seconds(byte_count)))
            result.on_device.append((variable, stays))
            result.extra.append((variable, extra))
        fetch = costs.h2d.seconds(numbers.parameter_bytes)
        read = costs.nvme_read.seconds(numbers.parameter_bytes)
        owners = {owner for owned in costs.borrowed.values() for owner in owned}
        # Where the way from forward to backward is within the longest lead, parameters may be held.
        held = 2 * (n - 1 - block) + 1 <= max(1, lead) or block in owners
        for index, (tier, keep) in enumerate(group.parameters):
            variable = share.get(Key(g, "parameter", index))
            if variable is None or not numbers.parameter_bytes or tier == "device":
                continue
            result.fetch.append((variable, fetch))
            result.first_fetch.append((variable, fetch))
            result.extra.append((variable, numbers.parameter_bytes))
            result.parameters.append((variable, numbers.parameter_bytes))
            if tier == "nvme":
                result.read.append((variable, read))
                if numbers.trainable:
                    seconds = costs.nvme_write.seconds(numbers.trained_bytes)
                    result.parameter_write.append((variable, seconds))
            if keep:
                result.kept_parameters.append((variable, numbers.parameter_bytes))
            elif not held:
                result.again.append((variable, fetch))
                if tier == "nvme":
                    result.again_read.append((variable, read))
        if numbers.trainable:
            back = share.get(Key(g, "write_back"))
            if back is not None:
                result.first_fetch.append((back, fetch))
            for index, sub_group in enumerate(group.optimizers):
                variable = share[Key(g, "optimizer", index)]
                seconds, states = costs.group(block, sub_group)
                if sub_group.step_device == "device":
                    result.device_step.append((variable, seconds))
                    continue
                result.host_step.append((variable, seconds))
                result.on_host.append((variable, 1.0))
                result.gradient.append((variable, numbers.gradient_bytes / costs.d2h.bytes_per_second))
                if sub_group.tier == "nvme":
                    result.state_read.append((variable, costs.nvme_read.seconds(states)))
                    result.state_write.append((variable, costs.nvme_write.seconds(states)))
        return result

    def _drops(self) -> None:
        """A dropped boundary follows a block that keeps its boundary only, and not too many in a row."""
        longest = self.relaxation.instance.allowed.longest_segment
        n = len(self._blocks)
        if not any(block.dropped for block in self._blocks):
            return
        drops = [self._named(f"dropped_{b}", self._sum(block.dropped)) for b, block in enumerate(self._blocks)]
        for index in range(1, n):
            if self._blocks[index].dropped:
                self.model.add_linear_constraint(drops[index] - self._recomputed[index - 1] <= 0.0)
            if index >= longest:
                window = mathopt.fast_sum(drops[index - longest + 1 : index + 1])
                self.model.add_linear_constraint(window <= longest - 1.0)

    @staticmethod
    def _sum(terms: Terms, unit: float = 1.0) -> mathopt.LinearSum:
        return mathopt.fast_sum([(value / unit) * variable for variable, value in terms if value] or [0.0])

    def _named(self, name: str, value: Linear) -> mathopt.Variable:
        """A variable equal to `value`: what many rows name is spelled out once."""
        variable = self.model.add_variable(lb=0.0, name=name)
        self.model.add_linear_constraint(variable - value == 0.0)
        return variable

    # ---- one micro-step

    def _micro_step(self, kind: str, *, memory: bool) -> None:
        model, relaxation, blocks = self.model, self.relaxation, self._blocks
        costs, scale = relaxation.costs, self._scale
        n = len(blocks)
        first = kind == "first"
        add = model.add_linear_constraint
        visits = [("forward", b) for b in range(n)] + [("backward", b) for b in reversed(range(n))]
        end = [model.add_variable(lb=0.0, name=f"{kind}_end_{p}") for p in range(2 * n)]
        duration: list[Linear] = []
        for visit, b in visits:
            numbers = costs.blocks[b]
            if visit == "forward":
                duration.append(numbers.forward_seconds / scale)
            else:
                duration.append(numbers.backward_seconds / scale + self._sum(blocks[b].recompute, scale))
        begin: Linear = 0.0
        if first:
            begin = self._optimizer(end, duration)
        before: list[Linear] = [begin, *end[:-1]]
        for p in range(2 * n):
            add(end[p] - before[p] - duration[p] >= 0.0)
        names = ("first", "first_backward") if first else ("forward", "backward")
        add(self.phase_seconds[names[0]] - end[n - 1] == 0.0)
        add(self.phase_seconds[names[1]] - end[2 * n - 1] + end[n - 1] == 0.0)
        # Re-runs: by the end of a backward all those of blocks behind it are through.
        if any(block.dropped for block in blocks):
            total: Linear = 0.0
            for p in range(n, 2 * n):
                b = visits[p][1]
                total = total + duration[p]
                if b and blocks[b].dropped:
                    again = (costs.blocks[b - 1].forward_seconds / scale) * self._sum(blocks[b].dropped)
                    total = self._named(f"{kind}_through_{p}", total + again)
                    add(end[p] - end[n - 1] - total >= 0.0)
        # To the device: what was moved ahead, at the end of each visit.
        needs: list[Linear] = []
        reads: list[Linear] = []
        farther: list[Linear] = []
        for visit, b in visits:
            block = blocks[b]
            if visit == "forward":
                needs.append(self._sum(block.first_fetch if first else block.fetch, scale))
                reads.append(self._sum(block.read, scale))
                farther.append(0.0)
            else:
                needs.append(self._sum([*block.back, *block.again], scale))
                reads.append(self._sum([*block.back_read, *block.again_read], scale))
                most = max((value for _, value in (*block.back, *block.again)), default=0.0)
                farther.append((3 * most / scale) * self._recomputed[b])
        ahead = self._ahead(kind, "h2d", needs, farther, before, end)
        if any(block.read or block.back_read for block in blocks):
            self._ahead(kind, "read", reads, farther, before, end)
        if memory:
            self._levels(kind, visits, before, end, duration, ahead)

    def _ahead(
        self,
        kind: str,
        name: str,
        needs: list[Linear],
        farther: list[Linear],
        before: list[Linear],
        end: list[mathopt.Variable],
    ) -> list[Linear]:
        """Seconds of transfers done by the end of each visit for later ones: limited by time and by the lead."""
        model, lead = self.model, self._window
        longest = self.relaxation.instance.allowed.longest_segment
        count = len(needs)
        needs = [self._named(f"{kind}_{name}_need_{p}", need) for p, need in enumerate(needs)]
        result: list[Linear] = [model.add_variable(lb=0.0, name=f"{kind}_{name}_{p}") for p in range(count)]
        for p in range(count):
            held = result[p - 1] if p else 0.0
            model.add_linear_constraint(held + end[p] - before[p] - needs[p] - result[p] >= 0.0)
            reach = [*needs[p + 1 : p + 1 + lead], *farther[p + 1 + lead : p + lead + longest]]
            model.add_linear_constraint(result[p] - mathopt.fast_sum(reach or [0.0]) <= 0.0)
        return result

    def _optimizer(self, end: list[mathopt.Variable], duration: list[Linear]) -> mathopt.Variable:
        """When compute may begin, and what the first forward waits for."""
        model, relaxation, blocks, scale = self.model, self.relaxation, self._blocks, self._scale
        add, costs = model.add_linear_constraint, relaxation.costs
        n = len(blocks)
        begin = model.add_variable(lb=0.0, name="begin")
        self.gradient_in = model.add_variable(lb=0.0, name="gradient_in")
        device = self._named("device_steps", mathopt.fast_sum(self._sum(block.device_step, scale) for block in blocks))
        add(begin - device >= 0.0)
        trainable = [b for b in range(n) if costs.blocks[b].trainable and costs.blocks[b].parameter_bytes]
        if not trainable:
            return begin
        zero = blocks[0]
        accumulate = costs.blocks[0].accumulate_seconds if relaxation.rounds > 1 else 0.0
        add(self.gradient_in - self._sum(zero.gradient, scale) - (accumulate / scale) * self._sum(zero.on_host) >= 0.0)
        whole = all(
            seconds > 0
            for b in trainable
            for option in relaxation.groups[relaxation.group_of[b]].optimizers
            if option.step_device == "device"
            for seconds in (costs.group(b, option)[0],)
        )
        serial = relaxation.mode == "serial"
        updated: Linear = self.gradient_in
        read: Linear = self.gradient_in
        link: Linear = 0.0
        reads: Linear = 0.0
        for b in range(n):
            block = blocks[b]
            start = end[b] - duration[b]
            if block.read or block.state_read:
                own = self._sum([*block.read, *block.state_read], scale)
                reads = self._named(f"read_until_{b}", reads + own)
                add(start - reads >= 0.0)
            if b < trainable[0]:
                continue
            if whole:
                add(start - self.gradient_in - device >= 0.0)
            after = model.add_variable(lb=0.0, name=f"updated_{b}")
            add(after - updated - self._sum(block.host_step, scale) >= 0.0)
            if block.state_read:
                got = model.add_variable(lb=0.0, name=f"state_{b}")
                add(got - read - self._sum(block.state_read, scale) >= 0.0)
                add(after - got - self._sum(block.host_step, scale) >= 0.0)
                read = got
            updated = after
            if not serial and whole:
                fetch = costs.h2d.seconds(costs.blocks[b].parameter_bytes) / scale
                arrived = model.add_variable(lb=0.0, name=f"arrived_{b}")
                fetched = fetch * self._sum(block.on_host)
                add(arrived - link - fetched >= 0.0)
                add(arrived - updated - fetched >= 0.0)
                add(start - arrived >= 0.0)
                link = arrived
        if serial and whole:
            add(begin - updated >= 0.0)
            add(begin - self.gradient_in - device >= 0.0)
            writes = [self._sum([*block.state_write, *block.parameter_write], scale) for block in blocks]
            add(begin - self.gradient_in - mathopt.fast_sum(writes) >= 0.0)
        return begin

    def _levels(
        self,
        kind: str,
        visits: list[tuple[str, int]],
        before: list[Linear],
        end: list[mathopt.Variable],
        duration: list[Linear],
        ahead: list[Linear],
    ) -> None:
        """Device bytes at the start of every visit."""
        model, relaxation, blocks = self.model, self.relaxation, self._blocks
        costs, scale, unit = relaxation.costs, self._scale, self._unit
        n = len(blocks)
        add = model.add_linear_constraint
        down = costs.d2h.bytes_per_second * scale / unit
        up = costs.h2d.bytes_per_second * scale / unit
        latency = 3 * self._window * costs.h2d.latency_seconds / scale
        cap = (costs.useful["device"] - relaxation.instance.phase("step").device_bytes) / unit
        static = self._expression(relaxation.memory["device"], unit)
        base = model.add_variable(lb=0.0, name=f"{kind}_static")
        add(base - static >= 0.0)
        kept: list[mathopt.Variable] = []
        sum_before: Linear = 0.0
        for b in range(n):
            total = model.add_variable(lb=0.0, name=f"{kind}_kept_{b}")
            own = self._sum([*blocks[b].on_device, *blocks[b].kept_parameters], unit)
            add(total - sum_before - own >= 0.0)
            kept.append(total)
            sum_before = total
        pending: Linear = model.add_variable(lb=0.0, name=f"{kind}_pending")
        start_pending = pending
        for p, (visit, b) in enumerate(visits):
            numbers, block = costs.blocks[b], blocks[b]
            wait = end[p] - before[p] - duration[p]
            flown = up * (ahead[p] - latency)
            left = down * (pending - wait)
            if p == 0:
                left = down * (pending - end[0] + duration[0])
            if visit == "forward":
                used = base + kept[b] + self._sum(block.parameters, unit) - self._sum(block.kept_parameters, unit)
                used = used + numbers.transient_forward_bytes / unit
            else:
                used = base + (kept[b - 1] if b else 0.0)
                used = used + self._sum([*block.on_device, *block.extra], unit)
                used = used + (numbers.transient_backward_bytes + numbers.gradient_bytes) / unit
            used = self._named(f"{kind}_used_{p}", used)
            for tail in (left, 0.0):
                for coming in (flown, 0.0):
                    add(used + tail + coming <= cap)
            later = model.add_variable(lb=0.0, name=f"{kind}_pending_{p}")
            if visit == "forward":
                out = [*block.saved_out, *(blocks[b + 1].boundary_out if b + 1 < n else [])]
            else:
                out = block.gradient
            made = self._sum(out, scale)
            add(later - made >= 0.0)
            add(later - pending + end[p] - before[p] - made >= 0.0)
            pending = later
        if relaxation.rounds == 1:
            add(start_pending - pending == 0.0)
            add(self.gradient_in - start_pending >= 0.0)
