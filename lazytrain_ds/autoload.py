"""Entry point of the `torch.backends` group: torch calls `autoload()` at the end of `import torch`."""

from __future__ import annotations


def autoload() -> None:
    """Arrange that the `deepspeed` package is hooked when it is imported. Never raises, imports nothing heavy."""
