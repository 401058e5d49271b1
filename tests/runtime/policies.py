"""Policies as a user writes them: named in a config as "tests.runtime.policies:Class". Not a test module."""

from __future__ import annotations

from dataclasses import replace

from lazytrain_ds.runtime.policy import ActivationAction, BlockAction, PlanPolicy, Policy


class KeepMatmuls(PlanPolicy):
    """Our plan, except that blocks keep the outputs of their matrix products and recompute the rest."""

    def activations(self, block: int) -> ActivationAction:
        action = super().activations(block)
        if self.blocks[block].kind != "block":
            return action
        return replace(action, kind="selective", ops=("aten.mm.default",), boundary="host", saved_tier="host")


class OnDemand(Policy):
    """Every method of its own: no prefetch, everything streamed, everything recomputed, a serial step."""

    def before_forward(self, block: int) -> BlockAction:
        return BlockAction(release=(block,))

    before_rerun = before_backward = before_forward

    def reruns_before_backward(self, block: int) -> bool:
        return False

    def activations(self, block: int) -> ActivationAction:
        kind = "boundary" if self.blocks[block].kind == "block" else "keep"
        return ActivationAction(kind, (), "device", "device", 0)

    def parameter_tier(self, block: int) -> str:
        return "host"

    def sub_group(self, block: int):
        return self.plan.blocks[block].optimizer

    def optimizer_step(self) -> str:
        return "serial"


class NotAPolicy:
    def __init__(self, *arguments: object) -> None:
        pass
