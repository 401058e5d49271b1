"""A plan laid out for the simulator: the visits of one micro-step, what is issued at each, and bytes that depend on
the position alone.

A *visit* is one use of a block by the compute channel: forward, re-run (of a block in a segment, without gradient) or
backward. Because transfers are issued in program order and channels are FIFO, all that time can change is how long
copies linger; every other byte is a function of the visit, so it is summed up here once per plan.
"""

from __future__ import annotations

from itertools import accumulate as running_sum
from typing import Final, Literal, NamedTuple

from lazytrain_ds.planning.costs import Costs
from lazytrain_ds.planning.plan import Plan

__all__ = ["BACKWARD", "FORWARD", "RERUN", "Executor", "Issue", "Offload", "Program", "Update"]

Executor = Literal["lazytrain", "published_megatrain"]

FORWARD: Final = 0
RERUN: Final = 1
BACKWARD: Final = 2

PARAMETER: Final = 0
BOUNDARY: Final = 1
SAVED: Final = 2
WRITE_BACK: Final = 3


class Issue(NamedTuple):
    """A transfer to the device: `slot` is where its arrival time is noted; sorts by need, then kind."""

    need: int
    kind: int
    block: int
    slot: int
    byte_count: int
    h2d_seconds: float
    read_seconds: float


class Offload(NamedTuple):
    """A transfer from the device in forward; `write_seconds` above 0 means it goes on to NVMe."""

    block: int
    slot: int
    byte_count: int
    d2h_seconds: float
    write_seconds: float


class Update(NamedTuple):
    """One sub-group's optimizer update."""

    block: int
    seconds: float
    on_device: bool
    read_seconds: float
    write_seconds: float
    parameter_d2h_seconds: float
    parameter_write_seconds: float
    state_bytes: int
    parameter_bytes: int
    trained_bytes: int


class Program:
    """Compiled form of `plan`: lists indexed by visit; byte totals per micro-step and per optimizer step."""

    def __init__(self, costs: Costs, plan: Plan, executor: Executor = "lazytrain") -> None:
        self.costs = costs
        self.plan = plan
        self.block_count = len(plan.blocks)
        self.rounds = plan.rounds
        self.serial = plan.optimizer_step == "serial"
        self._executor = executor
        self._lay_out_visits()
        count = len(self.visits)
        self._device = [0] * (count + 1)
        self._host = [0] * (count + 1)
        self.start_extra = [0] * count
        self.issues: list[list[Issue]] = [[] for _ in range(count)]
        self.write_backs: list[list[Issue]] = [[] for _ in range(count)]
        self.needs: list[list[int]] = [[] for _ in range(count)]
        self.offloads: list[list[Offload]] = [[] for _ in range(count)]
        self.tails: list[list[Offload]] = [[] for _ in range(count)]
        self.first_offloads: list[Offload] = []
        self.device_static = costs.instance.fixed_device_bytes
        self.host_static = costs.instance.fixed_host_bytes
        self.nvme_static = 0
        self.updates: list[Update] = []
        self._place_parameters()
        self._place_activations()
        self._place_gradients_and_states()
        for items in self.issues:
            if len(items) > 1:
                items.sort()
        self.device_base = self._running(self._device)
        self.host_base = self._running(self._host)
        self._total()

    # ---- layout

    def _lay_out_visits(self) -> None:
        plan, blocks = self.plan, self.costs.blocks
        n = self.block_count
        published = self._executor == "published_megatrain"
        visits: list[tuple[int, int]] = [(FORWARD, block) for block in range(n)]
        self.turn = n
        self.backward_position = [0] * n
        self.rerun_position: dict[int, int] = {}
        self.segment_entry: dict[int, int] = {}
        for start, stop in reversed(plan.segments()):
            self.segment_entry[start] = len(visits)
            reruns = stop - start - 1
            if published and reruns:
                reruns += 1
            for block in range(start, start + reruns):
                self.rerun_position[block] = len(visits)
                visits.append((RERUN, block))
            for block in range(stop - 1, start - 1, -1):
                self.backward_position[block] = len(visits)
                visits.append((BACKWARD, block))
        self.visits = visits
        self.compute_seconds: list[float] = []
        self.recompute_seconds: list[float] = []
        choices = self.costs.choices
        for kind, block in visits:
            if kind == FORWARD:
                self.compute_seconds.append(blocks[block].forward_seconds)
                self.recompute_seconds.append(0.0)
            elif kind == RERUN:
                self.compute_seconds.append(0.0)
                self.recompute_seconds.append(blocks[block].forward_seconds)
            else:
                self.compute_seconds.append(blocks[block].backward_seconds)
                self.recompute_seconds.append(choices[block][plan.blocks[block].choice][2])

    def _hold(self, array: list[int], first: int, last: int, byte_count: int) -> None:
        array[first] += byte_count
        array[last + 1] -= byte_count

    @staticmethod
    def _running(steps: list[int]) -> list[int]:
        return list(running_sum(steps[:-1]))

    # ---- parameters

    def _place_parameters(self) -> None:
        costs, plan, n = self.costs, self.plan, self.block_count
        uses: list[list[int]] = [[] for _ in range(n)]
        for position, (_, block) in enumerate(self.visits):
            uses[block].append(position)
            for owner in costs.borrowed.get(block, ()):
                uses[owner].append(position)
        published = self._executor == "published_megatrain"
        for unit in range(n):
            decided = plan.blocks[unit]
            numbers = costs.blocks[unit]
            byte_count = numbers.parameter_bytes
            if byte_count == 0:
                continue
            positions = uses[unit]
            lead = decided.parameter_lead
            host_stepped = numbers.trainable and decided.optimizer.step_device == "host"
            h2d_seconds = costs.h2d.seconds(byte_count)
            if decided.parameter_tier == "device":
                self.device_static += byte_count
                if host_stepped:
                    self.host_static += byte_count
                    first = positions[0]
                    back = Issue(first, WRITE_BACK, unit, unit, byte_count, h2d_seconds, 0.0)
                    self.write_backs[max(0, first - lead)].append(back)
                    for position in positions:
                        if position < self.turn:
                            self.needs[position].append(unit)
                continue
            from_nvme = decided.parameter_tier == "nvme"
            read_seconds = costs.nvme_read.seconds(byte_count) if from_nvme else 0.0
            if from_nvme:
                self.nvme_static += byte_count
            else:
                self.host_static += byte_count
            own_backward = self.backward_position[unit]
            keep = decided.keep_parameters
            begin = max(0, positions[0] - lead)
            issue, previous = begin, positions[0]
            self._fetch(unit, begin, previous, byte_count, h2d_seconds, read_seconds)
            for position in positions[1:]:
                useless = published and self.visits[previous][0] == RERUN and self.visits[position] == (BACKWARD, unit)
                held = position - lead <= previous or position == previous + 1
                held = held or (keep and unit <= previous and position <= own_backward)
                if useless or not held:
                    self._hold(self._device, issue, previous, byte_count)
                    issue = max(previous + 1, position - lead)
                    self._fetch(unit, issue, position, byte_count, h2d_seconds, read_seconds)
                previous = position
            self._hold(self._device, issue, previous, byte_count)
            for position in positions:
                self.needs[position].append(unit)

    def _fetch(self, unit: int, at: int, need: int, byte_count: int, h2d: float, read: float) -> None:
        self.issues[at].append(Issue(need, PARAMETER, unit, unit, byte_count, h2d, read))
        if read:
            self._hold(self._host, at, need, byte_count)

    # ---- activations

    def _place_activations(self) -> None:
        costs, n, device = self.costs, self.block_count, self._device
        for index, block in enumerate(self.plan.blocks):
            numbers = costs.blocks[index]
            kept, offloadable, _, needs_input, _ = costs.choices[index][block.choice]
            backward = self.backward_position[index]
            byte_count = numbers.boundary_bytes
            if block.boundary == "dropped":
                device[index] += byte_count
                device[index + 1] -= byte_count
                self._hold(device, self.rerun_position[index - 1] + 1, backward, byte_count)
            elif not needs_input:
                device[index] += byte_count
                device[index + 1] -= byte_count
            elif block.boundary == "device":
                self._hold(device, index, backward, byte_count)
            elif byte_count:
                device[index] += byte_count
                device[index + 1] -= byte_count
                entry = self.segment_entry[index]
                self._offload(index, n + index, BOUNDARY, block.boundary, byte_count, entry, block.activation_lead)
            self.start_extra[index] += numbers.transient_forward_bytes + kept
            if kept:
                stays = kept if block.saved_tier == "device" else kept - offloadable
                if stays:
                    self._hold(device, index + 1, backward, stays)
                if block.saved_tier != "device" and offloadable:
                    lead = block.activation_lead
                    self._offload(index, 2 * n + index, SAVED, block.saved_tier, offloadable, backward, lead)
            recompute = numbers.full_kept_bytes - kept
            self.start_extra[backward] += numbers.transient_backward_bytes + max(0, recompute)
        for block_index, position in self.rerun_position.items():
            self.start_extra[position] += costs.blocks[block_index].transient_forward_bytes

    def _offload(self, block: int, slot: int, kind: int, tier: str, byte_count: int, need: int, lead: int) -> None:
        costs = self.costs
        d2h_seconds, h2d_seconds = costs.d2h.seconds(byte_count), costs.h2d.seconds(byte_count)
        read = write = 0.0
        at = max(self.turn, need - lead)
        if tier == "nvme":
            read, write = costs.nvme_read.seconds(byte_count), costs.nvme_write.seconds(byte_count)
            self.nvme_static += byte_count
            self._hold(self._host, at, need, byte_count)
        else:
            self.host_static += byte_count
        offload = Offload(block, slot, byte_count, d2h_seconds, write)
        # A boundary's producer is the block before; its bytes are needed on the device until its own forward ends.
        if kind == BOUNDARY and block == 0:
            self.first_offloads.append(offload)
        elif kind == BOUNDARY:
            self.offloads[block - 1].append(offload)
        else:
            self.offloads[block].append(offload)
        self.tails[block].append(offload)
        self.issues[at].append(Issue(need, kind, block, slot, byte_count, h2d_seconds, read))
        self._hold(self._device, at, self.backward_position[block], byte_count)
        self.needs[need].append(slot)

    # ---- gradients and optimizer states

    def _place_gradients_and_states(self) -> None:
        costs, plan = self.costs, self.plan
        self.gradient: list[tuple[int, float, float]] = []
        largest_gradient = largest_state = largest_write = 0
        for index, block in enumerate(plan.blocks):
            numbers = costs.blocks[index]
            if not numbers.trainable:
                self.gradient.append((0, 0.0, 0.0))
                continue
            group = block.optimizer
            on_device = group.step_device == "device"
            seconds, states = costs.group(index, group)
            backward = self.backward_position[index]
            self.start_extra[backward] += numbers.gradient_bytes
            gradient = (0, 0.0, 0.0)
            if on_device:
                self.device_static += numbers.accumulation_bytes + states
            else:
                self.host_static += numbers.accumulation_bytes
                gradient = (
                    numbers.gradient_bytes,
                    costs.d2h.seconds(numbers.gradient_bytes),
                    numbers.accumulate_seconds,
                )
                largest_gradient = max(largest_gradient, numbers.gradient_bytes)
            self.gradient.append(gradient)
            read = write = parameter_d2h = parameter_write = 0.0
            if group.tier == "host":
                self.host_static += states
            elif group.tier == "nvme":
                self.nvme_static += states
                read, write = costs.nvme_read.seconds(states), costs.nvme_write.seconds(states)
                largest_state = max(largest_state, states)
            if on_device and not block.resident:
                parameter_d2h = costs.d2h.seconds(numbers.parameter_bytes)
            if block.parameter_tier == "nvme":
                parameter_write = costs.nvme_write.seconds(numbers.trained_bytes)
                largest_write = max(largest_write, numbers.parameter_bytes)
            self.updates.append(
                Update(
                    index,
                    seconds,
                    on_device,
                    read,
                    write,
                    parameter_d2h,
                    parameter_write,
                    states if group.tier == "nvme" else 0,
                    numbers.parameter_bytes,
                    numbers.trained_bytes,
                )
            )
        for block_index, owners in costs.borrowed.items():
            for owner in owners:
                gradient_bytes = costs.blocks[owner].gradient_bytes
                first, last = self.backward_position[block_index], self.backward_position[owner]
                if gradient_bytes and first < last:
                    self.start_extra[first] += gradient_bytes
                    if last > first + 1:
                        self._hold(self._device, first + 1, last - 1, gradient_bytes)
        # Two staging buffers each: gradients to be added on the host, states under update, parameters being written.
        self.host_static += 2 * (largest_state + largest_write)
        if self.rounds > 1:
            self.host_static += 2 * largest_gradient

    # ---- totals

    def _total(self) -> None:
        """Bytes and busy seconds per channel and optimizer step; they do not depend on timing."""
        rounds = self.rounds
        h2d_bytes = d2h_bytes = read_bytes = write_bytes = 0
        h2d = d2h = read = write = host = 0.0
        for issues in self.issues:
            for _, _, _, _, byte_count, seconds, read_seconds in issues:
                h2d_bytes += byte_count
                h2d += seconds
                if read_seconds:
                    read_bytes += byte_count
                    read += read_seconds
        for offloads in (*self.offloads, self.first_offloads):
            for _, _, byte_count, seconds, write_seconds in offloads:
                d2h_bytes += byte_count
                d2h += seconds
                if write_seconds:
                    write_bytes += byte_count
                    write += write_seconds
        for byte_count, seconds, accumulate in self.gradient:
            d2h_bytes += byte_count
            d2h += seconds
            host += accumulate
        # So far one micro-step (the first one adds no gradient); from here on what happens once a step.
        h2d_bytes, d2h_bytes, read_bytes, write_bytes = (
            rounds * value for value in (h2d_bytes, d2h_bytes, read_bytes, write_bytes)
        )
        h2d, d2h, read, write, host = rounds * h2d, rounds * d2h, rounds * read, rounds * write, (rounds - 1) * host
        for backs in self.write_backs:
            for back in backs:
                h2d_bytes += back.byte_count
                h2d += back.h2d_seconds
        self.device_step_seconds = 0.0
        for update in self.updates:
            if update.on_device:
                self.device_step_seconds += update.seconds
            else:
                host += update.seconds
            if update.read_seconds:
                read_bytes += update.state_bytes
                read += update.read_seconds
                write_bytes += update.state_bytes
                write += update.write_seconds
            if update.parameter_d2h_seconds:
                d2h_bytes += update.parameter_bytes
                d2h += update.parameter_d2h_seconds
            if update.parameter_write_seconds:
                write_bytes += update.trained_bytes
                write += update.parameter_write_seconds
        self.moved: dict[str, tuple[int, float]] = {
            "h2d": (h2d_bytes, h2d),
            "d2h": (d2h_bytes, d2h),
            "nvme_read": (read_bytes, read),
            "nvme_write": (write_bytes, write),
            "host": (0, host),
        }
        self.step_compute_seconds = rounds * sum(self.compute_seconds)
        self.step_recompute_seconds = rounds * sum(self.recompute_seconds)
