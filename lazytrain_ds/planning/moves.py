"""The plan space as local moves: set one aspect of some blocks to another value, and keep the plan valid.

An *aspect* is one decision of a block: its menu choice, the home of its saved tensors, of its boundary (or these three
at once: its activation), its parameters, its sub-group, its leads. A move takes the blocks of one class that have value
`a`, picks some (the earliest, the latest, or evenly spread ones) and gives them value `b`; `normalize` then repairs
what no longer goes together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from lazytrain_ds.planning.instance import ActivationChoice, Instance
from lazytrain_ds.planning.plan import BlockPlan, Plan, SubGroupPlan
from lazytrain_ds.planning.schema import TIERS, TierName

__all__ = ["Aspect", "Freedom", "Space", "activations_of", "pick", "with_lead"]

Aspect = Literal[
    "activation", "choice", "saved", "boundary", "parameters", "optimizer", "parameter_lead", "activation_lead"
]


@dataclass(frozen=True)
class Freedom:
    """Which decisions are open; the rest stay as in the plan one starts from."""

    activations: bool = True
    placement: bool = True

    @property
    def aspects(self) -> tuple[Aspect, ...]:
        open_aspects: list[Aspect] = []
        if self.activations:
            open_aspects.append("activation")
        if self.placement:
            open_aspects += ["parameters", "optimizer"]
        return tuple(open_aspects)

    @property
    def leads(self) -> tuple[Aspect, ...]:
        """The prefetch leads among the open decisions."""
        leads: list[Aspect] = []
        if self.placement:
            leads.append("parameter_lead")
        if self.activations:
            leads.append("activation_lead")
        return tuple(leads)


def pick(candidates: list[int], count: int, pattern: str) -> list[int]:
    """`count` of `candidates`: the "early" or "late" ones, or "spread" evenly."""
    if count <= 0:
        return []
    if count >= len(candidates):
        return list(candidates)
    if pattern == "early":
        return candidates[:count]
    if pattern == "late":
        return candidates[-count:]
    step = len(candidates) / count
    return [candidates[int((index + 0.5) * step)] for index in range(count)]


def with_lead(plan: Plan, field: str, lead: int) -> Plan:
    """`plan` with `field` ("parameter_lead" or "activation_lead") of all blocks set to `lead`."""
    return replace(plan, blocks=tuple(replace(block, **{field: lead}) for block in plan.blocks))  # type: ignore[arg-type]


def activations_of(block: BlockPlan, other: BlockPlan) -> BlockPlan:
    """`block` with the activation decisions of `other`."""
    return replace(
        block,
        choice=other.choice,
        boundary=other.boundary,
        saved_tier=other.saved_tier,
        activation_lead=other.activation_lead,
    )


class Space:
    """Values every aspect may take under `instance.allowed`, and how a value is put into a BlockPlan."""

    def __init__(self, instance: Instance, micro_batch: int) -> None:
        self.instance = instance
        self.micro_batch = micro_batch
        allowed = instance.allowed
        self.choices: dict[str, dict[str, Any]] = {}
        self.values: dict[tuple[str, Aspect], tuple[Any, ...]] = {}
        groups = [
            SubGroupPlan(tier, mode.precision, mode.step_device)
            for tier in allowed.optimizer_tiers
            for mode in instance.optimizer_modes
            if (tier == "device") == (mode.step_device == "device")
        ]
        absent = {tier for tier in TIERS if instance.tier(tier).usable_bytes == 0}
        for block_class in instance.classes:
            name = block_class.name
            menu = block_class.at(micro_batch).menu
            self.choices[name] = {choice.name: choice for choice in menu}
            usable = [choice for choice in menu if choice.kind in allowed.choice_kinds or len(menu) == 1]
            self.values[name, "choice"] = tuple(choice.name for choice in usable)
            offloadable = any(choice.offloadable_bytes for choice in usable)
            saved = [tier for tier in allowed.saved_tiers if tier not in absent]
            self.values[name, "saved"] = tuple(saved) if offloadable else ()
            homes: list[str] = [tier for tier in allowed.boundary_tiers if tier not in absent]
            if allowed.drop_boundaries and allowed.longest_segment > 1 and menu[-1].kind == "boundary":
                homes.append("dropped")
            self.values[name, "boundary"] = tuple(homes)
            self.values[name, "activation"] = tuple(self._activations(name, usable))
            tiers = [tier for tier in allowed.parameter_tiers if tier not in absent]
            parameters = [(tier, False) for tier in tiers]
            parameters += [(tier, True) for tier in tiers if tier != "device"]
            self.values[name, "parameters"] = tuple(parameters) if block_class.parameter_bytes else ()
            leads = tuple(range(allowed.longest_lead + 1))
            self.values[name, "parameter_lead"] = leads if block_class.parameter_bytes else ()
            self.values[name, "activation_lead"] = leads
            fitting = [group for group in groups if group.tier not in absent]
            if block_class.quantizable_count == 0 and any(group.precision == "fp32" for group in fitting):
                fitting = [group for group in fitting if group.precision == "fp32"]
            self.values[name, "optimizer"] = tuple(fitting) if block_class.trainable_count else ()
        self._default_home: TierName = next(tier for tier in TIERS if tier in allowed.boundary_tiers)
        self._default_saved: TierName = next(tier for tier in TIERS if tier in allowed.saved_tiers)

    def _activations(self, name: str, usable: list[ActivationChoice]) -> Iterator[tuple[str, str, str]]:
        """Every (choice, saved tier, boundary home) that goes together."""
        for choice in usable:
            homes = self.values[name, "boundary"] if choice.needs_input else ("device",)
            for saved in self.values[name, "saved"] if choice.offloadable_bytes else ("device",):
                for home in homes:
                    if home != "dropped" or choice.kind == "boundary":
                        yield choice.name, saved, home

    def get(self, block: BlockPlan, aspect: Aspect) -> Any:
        """The block's value of `aspect`."""
        if aspect == "activation":
            return block.choice, block.saved_tier, block.boundary
        if aspect == "choice":
            return block.choice
        if aspect == "saved":
            return block.saved_tier
        if aspect == "boundary":
            return block.boundary
        if aspect == "parameters":
            return block.parameter_tier, block.keep_parameters
        if aspect == "optimizer":
            return block.optimizer
        return block.parameter_lead if aspect == "parameter_lead" else block.activation_lead

    def put(self, block: BlockPlan, aspect: Aspect, value: Any) -> BlockPlan:
        """The block with `aspect` set to `value`."""
        if aspect == "activation":
            return replace(block, choice=value[0], saved_tier=value[1], boundary=value[2])
        if aspect == "choice":
            return replace(block, choice=value)
        if aspect == "saved":
            return replace(block, saved_tier=value)
        if aspect == "boundary":
            return replace(block, boundary=value)
        if aspect == "parameters":
            return replace(block, parameter_tier=value[0], keep_parameters=value[1])
        if aspect == "optimizer":
            return replace(block, optimizer=value)
        if aspect == "parameter_lead":
            return replace(block, parameter_lead=value)
        return replace(block, activation_lead=value)

    def normalize(self, blocks: list[BlockPlan]) -> list[BlockPlan]:
        """`blocks` repaired in place: nothing offloaded that is not there, no dropped boundary outside a segment."""
        order = self.instance.order
        longest = self.instance.allowed.longest_segment
        run = 0
        previous_kind = ""
        for index, block in enumerate(blocks):
            choice = self.choices[order[index]][block.choice]
            if block.saved_tier != "device" and not choice.offloadable_bytes:
                block = blocks[index] = replace(block, saved_tier="device")
            elif choice.offloadable_bytes and block.saved_tier not in self.instance.allowed.saved_tiers:
                block = blocks[index] = replace(block, saved_tier=self._default_saved)
            run += 1
            if block.boundary == "dropped":
                valid = choice.kind == "boundary" and previous_kind == "boundary" and run <= longest
                if not valid:
                    block = blocks[index] = replace(block, boundary=self._default_home)
            elif not choice.needs_input and block.boundary != "device":
                block = blocks[index] = replace(block, boundary="device")
            elif choice.needs_input and block.boundary not in self.instance.allowed.boundary_tiers:
                block = blocks[index] = replace(block, boundary=self._default_home)
            if block.boundary != "dropped":
                run = 1
            previous_kind = choice.kind
        return blocks

    def moved(self, plan: Plan, chosen: list[int], aspect: Aspect, value: Any) -> Plan:
        """`plan` with `aspect` of the chosen blocks set to `value`."""
        blocks = list(plan.blocks)
        for index in chosen:
            blocks[index] = self.put(blocks[index], aspect, value)
        return replace(plan, blocks=tuple(self.normalize(blocks)))

    def holders(self, plan: Plan, name: str, aspect: Aspect) -> dict[Any, list[int]]:
        """Blocks of class `name` by their value of `aspect`; only blocks for which the aspect means something."""
        result: dict[Any, list[int]] = {}
        for index, block in enumerate(plan.blocks):
            if self.instance.order[index] != name:
                continue
            choice = self.choices[name][block.choice]
            if aspect == "saved" and not choice.offloadable_bytes:
                continue
            if aspect == "boundary" and not choice.needs_input:
                continue
            if aspect == "parameter_lead" and block.resident and block.optimizer.step_device == "device":
                continue
            if aspect == "activation_lead" and block.saved_tier == "device" and block.boundary in ("device", "dropped"):
                continue
            result.setdefault(self.get(block, aspect), []).append(index)
        return result

    def pairs(self, plan: Plan, aspects: tuple[Aspect, ...]) -> Iterator[tuple[str, Aspect, Any, Any]]:
        """(class, aspect, from, to) of every move kind that some block can make."""
        for aspect in aspects:
            for block_class in self.instance.classes:
                values = self.values[block_class.name, aspect]
                if len(values) < 2:
                    continue
                for source in self.holders(plan, block_class.name, aspect):
                    for target in values:
                        if target != source:
                            yield block_class.name, aspect, source, target
