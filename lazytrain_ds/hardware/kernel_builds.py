"""Lock files of torch's kernel builds.

DeepSpeed's operators are built at first use. An interrupted build leaves its lock, and every later run waits for it
without a word and without end.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BuildLock", "build_locks", "extensions_directory"]


@dataclass(frozen=True)
class BuildLock:
    """A lock file and when it was made (seconds since the epoch)."""

    path: Path
    made: float

    @property
    def kernel(self) -> str:
        """The operator that is built under this lock."""
        return self.path.parent.name

    def age_seconds(self, now: float | None = None) -> float:
        """How old it is."""
        return (time.time() if now is None else now) - self.made


def extensions_directory() -> Path:
    """Where torch builds kernels."""
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "torch_extensions"


def build_locks(root: Path | None = None) -> list[BuildLock]:
    """The lock files under `root` (default: where torch builds), those of builds that run right now among them."""
    root = extensions_directory() if root is None else root
    found = []
    for path in sorted(root.glob("**/lock")) if root.is_dir() else []:
        try:
            found.append(BuildLock(path, path.stat().st_mtime))
        except OSError:
            continue  # its build has just ended
    return found
