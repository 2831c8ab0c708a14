"""Show the progress of a run: a bar on a terminal, a line every few percent elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

LINES = 25
"""Lines that a run prints if its output goes to a file."""


class Progress:
    """Show the progress of a run: a bar on a terminal, `LINES` lines in a log file."""

    def __init__(
        self, title: str, steps: int, done: int = 0, output: TextIO | None = None, shown: bool = True
    ):
        """Start a bar; `done`: steps of an earlier part of the run; `shown`: whether it is written."""
        self._title, self._steps, self._first, self._done = title, steps, done, done
        self._output, self._shown = output or sys.stderr, shown
        self._started = time.monotonic()
        self._written = done * LINES // max(steps, 1)
        self._bar: tqdm | None = None
        if shown and self._output.isatty():
            self._bar = tqdm(total=steps, initial=done, desc=title, unit="step", file=self._output)

    def update(self, done: int, values: Mapping[str, str]) -> None:
        """Show progress: `done` steps in all; `values` are shown after them."""
        if self._bar is not None:
            self._bar.set_postfix(values, refresh=False)
            self._bar.update(done - self._done)
        elif self._shown and done > self._done and done * LINES // self._steps > self._written:
            self._written = done * LINES // self._steps
            each = (time.monotonic() - self._started) / (done - self._first)
            rest = " ".join(f"{name}={value}" for name, value in values.items())
            left = tqdm.format_interval(each * (self._steps - done))
            self.say(f"{self._title}: {done}/{self._steps} steps, {left} left {rest}".rstrip())
        self._done = done

    def say(self, line: str) -> None:
        """Print a line of its own, above a bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._output)
        elif self._shown:
            print(line, file=self._output, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
