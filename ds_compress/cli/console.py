"""Print tables, and keep what DeepSpeed logs out of standard output."""

import contextlib
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

WIDTH_OF_FILES = 160


def terminal_width() -> int:
    """Return the columns of the terminal; enough for every table where there is none."""
    return shutil.get_terminal_size((WIDTH_OF_FILES, 24)).columns


def show(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print `rows`, which have the same columns: as a table where the terminal is wide enough for it, else
    value by value. Nothing is cut."""
    columns = list(rows[0]) if rows else []
    table = Table(*columns)
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=terminal_width(), markup=False, emoji=False)
    print(title)
    if console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width:
        console.print(table)
        return
    widest = max(map(len, columns))
    for row in rows:
        print("\n".join(["", *(f"{name:<{widest}}  {value}" for name, value in row.items())]))


@contextlib.contextmanager
def importing_deepspeed() -> Iterator[None]:
    """Keep stdout clean while the block imports DeepSpeed: drop its warnings, log to stderr."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)
