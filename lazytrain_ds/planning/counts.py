"""The vocabulary of the count model: which options a group of equal blocks has, how often each is taken, and rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lazytrain_ds.planning.costs import BlockNumbers
from lazytrain_ds.planning.plan import SubGroupPlan
from lazytrain_ds.planning.schema import TierName

__all__ = ["ActivationOption", "Group", "Key", "Phase", "Row"]

Phase = Literal["first", "forward", "backward", "micro", "later", "step"]
Kind = Literal["activation", "parameter", "optimizer", "write_back", "parameter_out", "refetch"]


class Key(NamedTuple):
    """A count: blocks of `group` whose `kind` of decision is number `option`."""

    group: int
    kind: Kind
    option: int = 0


class ActivationOption(NamedTuple):
    choice: str
    saved: TierName
    boundary: str


@dataclass
class Group:
    """Equal blocks whose position does not matter to the model (or a single block whose does)."""

    blocks: list[int]
    numbers: BlockNumbers
    activations: list[ActivationOption]
    parameters: list[tuple[TierName, bool]]
    optimizers: list[SubGroupPlan]

    def __post_init__(self) -> None:
        self.activation_index = {option: index for index, option in enumerate(self.activations)}
        self.parameter_index = {option: index for index, option in enumerate(self.parameters)}
        self.optimizer_index = {option: index for index, option in enumerate(self.optimizers)}

    @property
    def size(self) -> int:
        return len(self.blocks)


@dataclass
class Row:
    """`target` is at least `constant` plus the sum of coefficient times count (seconds, or bytes for a tier)."""

    name: str
    constant: float = 0.0
    terms: dict[Key, float] = field(default_factory=dict)

    def add(self, key: Key, coefficient: float) -> None:
        if coefficient:
            self.terms[key] = self.terms.get(key, 0.0) + coefficient

    def subtract(self, other: Row, parts: float = 1.0) -> None:
        """Take `other`, divided by `parts`, away from this row."""
        self.constant -= other.constant / parts
        for key, coefficient in other.terms.items():
            self.add(key, -coefficient / parts)

    def value(self, counts: dict[Key, float]) -> float:
        terms, total = self.terms, self.constant
        for key, count in counts.items():
            coefficient = terms.get(key)
            if coefficient is not None:
                total += coefficient * count
        return total
