"""Where tables are printed."""

import shutil

from rich.console import Console


def console() -> Console:
    """As wide as the terminal; wide enough for every table where there is none."""
    return Console(width=shutil.get_terminal_size((160, 24)).columns)
