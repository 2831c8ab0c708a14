"""Where tables are printed, and what is kept out of there."""

import contextlib
import logging
import shutil
import sys
from collections.abc import Iterator

from rich.console import Console


def console() -> Console:
    """As wide as the terminal; wide enough for every table where there is none."""
    return Console(width=shutil.get_terminal_size((160, 24)).columns)


@contextlib.contextmanager
def importing_deepspeed() -> Iterator[None]:
    """Keep apart from what a command prints that DeepSpeed, when it is imported, warns where there is no GPU,
    and from then on logs to what is stdout now."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)
