"""LazyTrain for DeepSpeed: plans where everything lives before training, and runs ZeRO-3 by that plan.

Importing this package loads neither torch nor DeepSpeed; it does arrange that DeepSpeed is hooked when it is imported.
"""

from __future__ import annotations

from lazytrain_ds.autoload import autoload as _autoload

__version__ = "0.1.0"
__all__ = ["__version__"]

_autoload()
