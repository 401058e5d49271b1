"""Numbers of an instance at one micro-batch, per block, looked up once for simulator, bounds and MILP.

Everything is a plain list indexed by block, so that the simulator's inner loop touches no dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazytrain_ds.planning.instance import BlockClass, Instance, OptimizerMode
from lazytrain_ds.planning.plan import SubGroupPlan
from lazytrain_ds.planning.schema import PHASES, TIERS, TierName

__all__ = ["BlockNumbers", "Costs", "optimizer_seconds", "state_bytes"]


def _split(instance: Instance, block_class: BlockClass, group: SubGroupPlan) -> tuple[tuple[int, OptimizerMode], ...]:
    """(parameters, mode) pairs of a sub-group: the quantizable part and the part that always stays fp32."""
    mode = instance.optimizer_mode(group.step_device, group.precision)
    if mode is None or block_class.trainable_count == 0:
        return ()
    rest = instance.optimizer_mode(group.step_device, "fp32") or mode
    quantized = block_class.quantizable_count if group.precision == "8bit" else 0
    return ((quantized, mode), (block_class.trainable_count - quantized, rest))


def optimizer_seconds(instance: Instance, block_class: BlockClass, group: SubGroupPlan) -> float:
    """Seconds of one update of a block of `block_class` under `group` (0 where nothing is trainable)."""
    return sum(count * mode.seconds_per_parameter for count, mode in _split(instance, block_class, group))


def state_bytes(instance: Instance, block_class: BlockClass, group: SubGroupPlan) -> int:
    """Bytes of master copy and moments of one block under `group`."""
    parts = _split(instance, block_class, group)
    return int(sum(count * mode.state_bytes_per_parameter for count, mode in parts) + 0.5)


def _trained_bytes(block_class: BlockClass) -> int:
    """Trainable parameters' share of the block's flat buffers."""
    if block_class.trainable_count == block_class.parameter_count:
        return block_class.parameter_bytes
    return -(-block_class.parameter_bytes * block_class.trainable_count // block_class.parameter_count)


@dataclass(frozen=True)
class BlockNumbers:
    """One block's figures at one micro-batch (bytes and seconds; see BlockClass and BlockCosts for their meaning).

    `trained_bytes`: the part of `parameter_bytes` that an update changes; frozen weights lie apart.
    """

    forward_seconds: float
    backward_seconds: float
    boundary_bytes: int
    transient_forward_bytes: int
    transient_backward_bytes: int
    parameter_bytes: int
    trained_bytes: int
    gradient_bytes: int
    full_kept_bytes: int
    accumulation_bytes: int
    accumulate_seconds: float
    trainable: bool


class Costs:
    """The per-block numbers of `instance` at `micro_batch`, and its rates and caps.

    `choices[block][name]` is (kept bytes, offloadable bytes, recompute seconds, needs input, is the boundary kind).
    `useful`: the caps, but no more than any plan can need, so that models scaled and limited by it do not depend on
    what a machine happens to have free beyond that.
    """

    def __init__(self, instance: Instance, micro_batch: int) -> None:
        self.instance = instance
        self.micro_batch = micro_batch
        self.rounds = instance.rounds(micro_batch)
        by_class: dict[str, BlockNumbers] = {}
        menus: dict[str, dict[str, tuple[int, int, float, bool, bool]]] = {}
        for block_class in instance.classes:
            costs = block_class.at(micro_batch)
            trainable = block_class.trainable_count
            by_class[block_class.name] = BlockNumbers(
                forward_seconds=costs.forward_seconds,
                backward_seconds=costs.backward_seconds,
                boundary_bytes=costs.boundary_bytes,
                transient_forward_bytes=costs.transient_forward_bytes,
                transient_backward_bytes=costs.transient_backward_bytes,
                parameter_bytes=block_class.parameter_bytes,
                trained_bytes=_trained_bytes(block_class),
                gradient_bytes=block_class.gradient_bytes if trainable else 0,
                full_kept_bytes=costs.menu[0].kept_bytes,
                accumulation_bytes=int(instance.accumulation_bytes_per_parameter * trainable + 0.5),
                accumulate_seconds=instance.host_accumulate_seconds_per_parameter * trainable,
                trainable=trainable > 0,
            )
            menus[block_class.name] = {
                choice.name: (
                    choice.kept_bytes,
                    choice.offloadable_bytes,
                    choice.recompute_seconds,
                    choice.needs_input,
                    choice.kind == "boundary",
                )
                for choice in costs.menu
            }
        self.blocks = [by_class[name] for name in instance.order]
        self.choices = [menus[name] for name in instance.order]
        self.classes = [instance.block_class(block) for block in range(instance.block_count)]
        self.borrowed: dict[int, list[int]] = {}
        for block, owner in instance.borrows:
            if block != owner:
                self.borrowed.setdefault(block, []).append(owner)
        self.caps = {name: instance.tier(name).usable_bytes for name in TIERS}
        self.useful = {name: min(self.caps[name], most) for name, most in self._most().items()}
        self.h2d = instance.channel("h2d")
        self.d2h = instance.channel("d2h")
        self.nvme_read = instance.channel("nvme_read")
        self.nvme_write = instance.channel("nvme_write")
        self._groups: dict[tuple[str, SubGroupPlan], tuple[float, int]] = {}

    def _most(self) -> dict[TierName, int]:
        """At least as many bytes per tier as any plan at this micro-batch can need, phases included."""
        instance, on_nvme = self.instance, self.caps["nvme"] > 0
        phases = [instance.phase(name) for name in PHASES]
        device = instance.fixed_device_bytes + max(phase.device_bytes for phase in phases)
        host = instance.fixed_host_bytes + max(phase.host_bytes for phase in phases)
        nvme = max(phase.nvme_bytes for phase in phases)
        groups = [SubGroupPlan(mode.step_device, mode.precision, mode.step_device) for mode in instance.optimizer_modes]
        staged = visiting = gradients = 0
        for block, numbers in enumerate(self.blocks):
            states = max((state_bytes(instance, self.classes[block], group) for group in groups), default=0)
            activations = numbers.boundary_bytes + max(choice[0] for choice in self.choices[block].values())
            # In backward what was dropped is made again while what came back is still there.
            device += numbers.parameter_bytes + numbers.accumulation_bytes + states + numbers.gradient_bytes
            device += 2 * (numbers.boundary_bytes + max(activations, numbers.full_kept_bytes))
            gradients = max(gradients, numbers.gradient_bytes)
            visiting = max(visiting, numbers.transient_forward_bytes, numbers.transient_backward_bytes)
            # What lives on NVMe is in host memory on its way there and back, both at once at worst.
            host += numbers.parameter_bytes + numbers.accumulation_bytes + states
            host += activations * (2 if on_nvme else 1)
            nvme += numbers.parameter_bytes + states + activations
            staged = max(staged, numbers.gradient_bytes + (states + numbers.parameter_bytes if on_nvme else 0))
        return {"device": device + visiting + 2 * gradients, "host": host + 2 * staged, "nvme": nvme}

    def group(self, block: int, group: SubGroupPlan) -> tuple[float, int]:
        """(update seconds, state bytes) of a block's sub-group."""
        key = (self.instance.order[block], group)
        found = self._groups.get(key)
        if found is None:
            block_class = self.classes[block]
            found = (
                optimizer_seconds(self.instance, block_class, group),
                state_bytes(self.instance, block_class, group),
            )
            self._groups[key] = found
        return found
