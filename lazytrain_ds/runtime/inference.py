"""Evaluation and generation between training steps: blocks that fit stay on the device from one forward to the next.

A plan made for training streams blocks because activations and their gradients need the room. A forward without
gradient keeps none of those, and generation visits every block once per token, so here the blocks of the first visits
stay, in forward order, as long as memory lasts (always the same ones: keeping the latest used would evict each block
just before its next turn). The next training visit finds none of them left.
"""

from __future__ import annotations

from lazytrain_ds.runtime.parameters import ParameterStore
from lazytrain_ds.runtime.policy import Policy

__all__ = ["KeptForInference"]

# Of the cap, left free for what nobody announces: activations of larger batches, the cache of keys and values.
RESERVE_SHARE = 0.25


class KeptForInference:
    """Which blocks stay between forwards without gradient. Used by the coordinator alone, under its lock."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._kept: list[int] = []
        self._largest_bytes = max((block.byte_count for block in store.blocks), default=0)

    def offer(self, index: int, policy: Policy) -> None:
        """A visit of this block ends: keep it if there is room for the slot that streams the others in its place."""
        block = self._store.blocks[index]
        if block.stays or block.state != "present":
            return
        if self._free_bytes(policy) >= self._largest_bytes:
            block.kept = True
            self._kept.append(index)

    def make_room(self, policy: Policy) -> None:
        """A visit without gradient begins: where memory has become short, let blocks go, the latest kept first."""
        while self._kept and self._free_bytes(policy) < 0:
            self._store.let_go(self._kept.pop())

    def let_go(self) -> None:
        """A training visit begins: all that is kept goes."""
        while self._kept:
            self._store.let_go(self._kept.pop())

    def _free_bytes(self, policy: Policy) -> int:
        """Bytes under the cap beyond what is in use, a forward's own needs and the reserve."""
        instance, micro_batch = policy.instance, policy.plan.micro_batch
        cap = instance.tier("device").usable_bytes
        transient = max(block_class.at(micro_batch).transient_forward_bytes for block_class in instance.classes)
        reserve = max(int(RESERVE_SHARE * cap), instance.fixed_device_bytes + transient)
        return cap - reserve - self._store.device.allocated_bytes()
