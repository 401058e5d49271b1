"""What a trace says about each block of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lazytrain_ds.workload.operators import Operator


@dataclass(frozen=True)
class BlockTrace:
    """One block in one forward and backward of one micro-batch. Bytes and FLOPs; see `BlockCosts` for the words.

    `kept`: sizes of the unique storages autograd packed inside the block, without parameters, buffers and the
    block's inputs. `needs_input`: whether autograd packed the block's input itself. `rerun_operators`: how many of
    `forward` a recompute executes before everything packed is there again (a non-reentrant checkpoint stops then).
    `chained`: its input is the previous block's output, so that re-running that block makes it. `calls`: forwards
    seen (0: the block did not run).
    """

    boundary_bytes: int
    output_bytes: int
    kept: tuple[int, ...]
    needs_input: bool
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    rerun_operators: int
    transient_forward_bytes: int
    transient_backward_bytes: int
    chained: bool
    calls: int

    @property
    def kept_bytes(self) -> int:
        """Bytes kept when nothing is recomputed."""
        return sum(self.kept)

    @property
    def forward_flops(self) -> int:
        """Matmul, convolution and attention FLOPs of the forward."""
        return sum(operator.flops for operator in self.forward)

    def scaled(self, share: float) -> BlockTrace:
        """The same block with `share` times the tokens, everything taken to grow in proportion."""

        def operators(some: tuple[Operator, ...]) -> tuple[Operator, ...]:
            return tuple(
                replace(
                    operator,
                    flops=int(operator.flops * share),
                    bytes_moved=int(operator.bytes_moved * share),
                    made_bytes=tuple(int(size * share) for size in operator.made_bytes),
                )
                for operator in some
            )

        return replace(
            self,
            boundary_bytes=int(self.boundary_bytes * share),
            output_bytes=int(self.output_bytes * share),
            kept=tuple(int(size * share) for size in self.kept),
            forward=operators(self.forward),
            backward=operators(self.backward),
            transient_forward_bytes=int(self.transient_forward_bytes * share),
            transient_backward_bytes=int(self.transient_backward_bytes * share),
        )

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for blocks that cost the same."""
        return (self.boundary_bytes, self.kept, self.needs_input, self.forward_flops, len(self.forward))


@dataclass(frozen=True)
class ForwardTrace:
    """Traces of all blocks of a table, in its order.

    `order`: module names by first call (for `find_blocks(..., order=)`). `shared_bytes`: inputs that blocks share
    (masks, rotary tables, an encoder's output), alive all along. `loose_bytes`: kept outside every block.
    """

    blocks: tuple[BlockTrace, ...]
    order: tuple[str, ...]
    shared_bytes: int
    loose_bytes: int
    input_bytes: int
    notes: tuple[str, ...] = ()

    def scaled(self, share: float) -> ForwardTrace:
        """The same forward with `share` times the tokens, everything but parameters taken to grow in proportion."""
        return replace(
            self,
            blocks=tuple(block.scaled(share) for block in self.blocks),
            shared_bytes=int(self.shared_bytes * share),
            loose_bytes=int(self.loose_bytes * share),
            input_bytes=int(self.input_bytes * share),
        )
