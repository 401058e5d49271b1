"""Running a block a second time as it ran the first time: random numbers, autocast, buffers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = [
    "AutocastState",
    "Buffers",
    "PythonStates",
    "RandomState",
    "model_parallel_random_states",
    "replayed_model_parallel_states",
]

TRACKER_MODULE = "deepspeed.runtime.activation_checkpointing.checkpointing"


def _device_module(device: torch.device) -> Any:
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


@dataclass(frozen=True)
class RandomState:
    """The generators' states at one moment: CPU and, where there is one, the compute device."""

    device: torch.device
    cpu: torch.Tensor
    on_device: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """The present states."""
        module = _device_module(device)
        return cls(device, torch.get_rng_state(), None if module is None else module.get_rng_state(device))

    def set(self) -> None:
        """Make these the present states."""
        torch.set_rng_state(self.cpu)
        if self.on_device is not None:
            _device_module(self.device).set_rng_state(self.on_device, self.device)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Random numbers as they came after `capture`; afterwards the generators go on as if nothing had been."""
        present = RandomState.capture(self.device)
        self.set()
        try:
            yield
        finally:
            present.set()


@dataclass(frozen=True)
class PythonStates:
    """States of Python's and numpy's generators: `torch.utils.checkpoint` replays neither."""

    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> PythonStates:
        """The present states (numpy's only where somebody has imported it)."""
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), None if numpy is None else numpy.random.get_state())

    def set(self) -> None:
        """Make these the present states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Numbers as they came after `capture`; afterwards the generators go on as if nothing had been."""
        present = PythonStates.capture()
        self.set()
        try:
            yield
        finally:
            present.set()


def model_parallel_random_states() -> dict[str, Any] | None:
    """States of DeepSpeed's model-parallel generators, or None where none are in use."""
    module = sys.modules.get(TRACKER_MODULE)
    states = module.get_cuda_rng_tracker().get_states() if module is not None else {}
    return dict(states) or None


@contextlib.contextmanager
def replayed_model_parallel_states(states: dict[str, Any] | None) -> Iterator[None]:
    """The same for those generators."""
    if states is None:
        yield
        return
    tracker = sys.modules[TRACKER_MODULE].get_cuda_rng_tracker()
    present = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(present)


@dataclass(frozen=True)
class AutocastState:
    """Whether and how autocast is on, for the CPU and the compute device."""

    entries: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool

    @classmethod
    def capture(cls, device: torch.device) -> AutocastState:
        """The present state."""
        kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.amp.is_autocast_available(kind)]
        entries = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(entries, torch.is_autocast_cache_enabled())

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Autocast as it was, also where it was off."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.entries:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cache_enabled))
            yield


class Buffers:
    """Buffers of one module tree that its forward changes: a second run must see, and leave, the right values.

    Which ones is learnt from the first call, by comparing contents: batch normalisation changes its running statistics
    without telling autograd. Later calls are checked by version and identity only.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [(owner, name) for owner in module.modules() for name, buffer in owner._buffers.items()
                        if buffer is not None]  # fmt: skip
        self._changing: list[tuple[nn.Module, str]] = [
            (owner, name) for owner, name in self._places
            if isinstance(owner, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm))
        ]  # fmt: skip
        self._learnt = not self._places

    def present(self) -> list[torch.Tensor]:
        """The buffers as they are now."""
        return [buffer for owner, name in self._places if (buffer := owner._buffers.get(name)) is not None]

    def before(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Copies of what the coming call may change."""
        places = self._changing if self._learnt else self._places
        return [(owner, name, buffer.detach().clone()) for owner, name in places
                if (buffer := owner._buffers.get(name)) is not None]  # fmt: skip

    def after(self, copies: list[tuple[nn.Module, str, torch.Tensor]]) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """The copies that a second run needs."""
        if self._learnt:
            return copies
        self._learnt = True
        known = set(self._changing)
        needed = []
        for owner, name, copy in copies:
            now = owner._buffers.get(name)
            same = now is not None and now.shape == copy.shape and now.dtype == copy.dtype and torch.equal(now, copy)
            if not same or (owner, name) in known:
                needed.append((owner, name, copy))
        self._changing = [(owner, name) for owner, name, _ in needed]
        return needed

    @staticmethod
    @contextlib.contextmanager
    def replayed(copies: list[tuple[nn.Module, str, torch.Tensor]]) -> Iterator[None]:
        """The buffers as they were before the first run; afterwards as they are now, whatever the second run does."""
        present = [(owner, name, owner._buffers.get(name)) for owner, name, _ in copies]
        for owner, name, copy in copies:
            owner._buffers[name] = copy.clone()
        try:
            yield
        finally:
            for owner, name, buffer in present:
                owner._buffers[name] = buffer
