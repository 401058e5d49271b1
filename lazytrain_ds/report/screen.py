"""The terminal: tables of at most 100 columns, also where the output goes to a file or a pipe."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lazytrain_ds.errors import ConfigError

__all__ = ["WIDTH", "screen", "table", "working", "write_json"]

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


@contextmanager
def working(what: str) -> Iterator[None]:
    """While planning: a spinner on a terminal (on stderr: stdout may be JSON), and the solver's own lines silenced."""
    with Console(stderr=True).status(f"{what} ..."), _solver_silenced():
        yield


@contextmanager
def _solver_silenced() -> Iterator[None]:
    """HiGHS, as OR-Tools builds it, prints a debugging line to the process's stdout now and then.

    The file descriptor is redirected, not `sys.stdout`; for commands only, which do nothing else meanwhile.
    """
    sys.stdout.flush()
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)


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
