"""The terminal: tables of at most 100 columns, also where the output goes to a file or a pipe."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lazytrain_ds.errors import ConfigError

__all__ = ["WIDTH", "screen", "table", "write_json"]

WIDTH = 100
STDOUT = "-"


def screen() -> Console:
    """A console as wide as the terminal, but at most `WIDTH`; without a terminal `WIDTH`."""
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH
    return Console(width=width, highlight=False)


def table(title: str, *columns: str, left: int = 1) -> Table:
    """A table with its title on the left; the first `left` columns hold words, the others figures."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index < left else "right", overflow="fold")
    return made


def write_json(target: str | None, value: Any) -> bool:
    """Write `value` to the file `target`, or to stdout for "-". True if it went to stdout: print nothing else then."""
    if target is None:
        return False
    text = json.dumps(value, indent=1) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
        return True
    try:
        Path(target).expanduser().write_text(text)
    except OSError as error:
        raise ConfigError(f"--json: cannot write {target}: {error.strerror}") from error
    return False
