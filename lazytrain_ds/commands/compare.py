"""`lazytrain compare`: two plans or runs side by side. Needs neither torch nor DeepSpeed."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from lazytrain_ds.report.comparison import difference_table, differences, figure_table, figures, numerics_line
from lazytrain_ds.report.explanation import headline
from lazytrain_ds.report.run_directory import read_source
from lazytrain_ds.report.screen import screen, write_json


def run(arguments: Namespace) -> int:
    """Print both sides; 0. ConfigError for a source that is none (status 2)."""
    first, second = read_source(arguments.first), read_source(arguments.second)
    unlike = differences(first, second)
    answer = {
        "first": first.name,
        "second": second.name,
        "numerics": numerics_line(first, second),
        "figures": [asdict(item) for item in figures(first, second)],
        "differences": [asdict(item) for item in unlike],
    }
    if write_json(arguments.json, answer):
        return 0
    console = screen()
    for letter, source in (("A", first), ("B", second)):
        console.print(f"{letter}  {source.name}: {headline(source)}", markup=False)
    console.print(numerics_line(first, second), markup=False)
    console.print(figure_table(first, second))
    if unlike:
        console.print(difference_table(unlike))
    elif first.plan.block_count == second.plan.block_count:
        console.print("no block is decided differently")
    return 0
