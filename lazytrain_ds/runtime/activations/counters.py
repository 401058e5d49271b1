"""What the activation runtime did, in bytes, seconds and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ActivationCounters"]


@dataclass
class ActivationCounters:
    """Sums since `reset`, except the two `held_*` tables, which show the last forward's end.

    `held_saved_bytes[block]`: unique storages inside the block that are on the device between forward and backward
    (block -1: everything outside wrapped blocks). `held_boundary_bytes[block]`: the same for the block's input.
    `offloaded_bytes[tier]`: unique storages sent to `host` or `nvme`. `stall_seconds[channel]`: compute waited for
    something to come back. `reruns`: forwards of a block to make a dropped boundary again; `recomputes`: forwards to
    make a block's saved tensors again.
    """

    held_saved_bytes: dict[int, int] = field(default_factory=dict)
    held_boundary_bytes: dict[int, int] = field(default_factory=dict)
    offloaded_bytes: dict[str, int] = field(default_factory=dict)
    offloaded_storages: int = 0
    prefetched_bytes: int = 0
    stall_seconds: dict[str, float] = field(default_factory=dict)
    reruns: int = 0
    recomputes: int = 0

    def offloaded(self, tier: str, byte_count: int) -> None:
        """One storage was sent away."""
        self.offloaded_bytes[tier] = self.offloaded_bytes.get(tier, 0) + byte_count
        self.offloaded_storages += 1

    def stalled(self, channel: str, seconds: float) -> None:
        """Compute waited."""
        if seconds > 0:
            self.stall_seconds[channel] = self.stall_seconds.get(channel, 0.0) + seconds

    def reset(self) -> None:
        """Start again from zero."""
        self.__init__()  # type: ignore[misc]
