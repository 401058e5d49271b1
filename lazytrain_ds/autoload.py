"""Hook the `deepspeed` package once it is imported, without importing it.

torch calls `autoload()` (entry point group `torch.backends`) at the end of `import torch`; `import lazytrain_ds` does
the same. `LAZYTRAIN_AUTOLOAD=0` turns both off; `TORCH_DEVICE_BACKEND_AUTOLOAD=0`, torch's own switch, only the first.

Nothing here may break `import torch`, `import deepspeed` or a run without the `"lazytrain"` block: an error in the
hooks is remembered, said in one line, and raised only where a config asks for LazyTrain. Standard library only.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["autoload", "failure"]

_PACKAGE = "deepspeed"
_OFF = ("0", "false", "off", "no")
_failure: Exception | None = None


def autoload() -> None:
    """Arrange that DeepSpeed is hooked when it has been imported, or hook it now. Never raises."""
    try:
        if os.environ.get("LAZYTRAIN_AUTOLOAD", "1").strip().lower() in _OFF:
            return
        package = sys.modules.get(_PACKAGE)
        if package is None or not hasattr(package, "initialize"):
            if not any(isinstance(finder, _DeepSpeedFinder) for finder in sys.meta_path):
                sys.meta_path.insert(0, _DeepSpeedFinder())
            # `import deepspeed` imports torch in its first lines, so this often runs halfway through that import.
            if package is not None and package.__spec__ is not None:
                _hook_when_loaded(package.__spec__)
        else:
            _hook(package)
    except Exception as error:
        _remember(error)


def failure() -> Exception | None:
    """What went wrong while hooking DeepSpeed, or None."""
    return _failure


class _DeepSpeedFinder(MetaPathFinder):
    """Finds nothing itself: marks the spec that the other finders find for `deepspeed`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _PACKAGE:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                try:
                    _hook_when_loaded(spec)
                except Exception as error:
                    _remember(error)
                return spec
        return None


class _WatchedSpec(ModuleSpec):
    """A spec that tells when the import system has finished with its module.

    The import system sets `_initializing` to False last, after the module ran or failed. It is the only signal that
    also reaches a package that is already half imported: its spec and loader are long chosen by then.
    """

    @property
    def _initializing(self) -> bool:
        return self.__dict__.get("_initializing", False)

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if value:
            return
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        package = sys.modules.get(_PACKAGE)
        if package is not None and hasattr(package, "initialize"):
            _hook(package)


def _hook_when_loaded(spec: ModuleSpec) -> None:
    if not isinstance(spec, _WatchedSpec):
        spec.__class__ = _WatchedSpec


def _hook(package: ModuleType) -> None:
    try:
        from lazytrain_ds.runtime import hooks

        hooks.install()
    except Exception as error:
        _remember(error)
        package.initialize = _refuse_block(package.initialize, error)  # type: ignore[attr-defined]


def _remember(error: Exception) -> None:
    global _failure
    if _failure is None:
        print(
            f"[lazytrain] could not hook DeepSpeed ({type(error).__name__}: {error}); "
            'runs without a "lazytrain" block are not affected',
            file=sys.stderr,
        )
    _failure = error


def _refuse_block(original: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """`deepspeed.initialize` after a failed installation: as before, except that a config with the block is refused."""

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        if _asks_for_lazytrain(original, args, kwargs):
            from lazytrain_ds.errors import UnsupportedError

            raise UnsupportedError(
                'the config has a "lazytrain" block, but LazyTrain could not hook DeepSpeed '
                f'({type(error).__name__}: {error}); repair the installation, or set "lazytrain": null'
            ) from error
        return original(*args, **kwargs)

    return initialize


def _asks_for_lazytrain(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        import inspect

        from lazytrain_ds.runtime.arguments import given_config, read_config

        block = read_config(given_config(inspect.signature(original).bind(*args, **kwargs).arguments)).get("lazytrain")
    except Exception:
        return False  # unreadable arguments: the original has its own error for them
    return block not in (None, False) and not (isinstance(block, dict) and block.get("enabled") is False)
