"""The one exception class of the package, and how its messages are made."""

import difflib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

REQUIRE = "DS_COMPRESS_REQUIRE"
"""Environment variable: 1 makes an engine that would train uncompressed an error."""

SHOWN = 80
"""How many characters of a value, or of a key, an error quotes."""


class CompressionError(ValueError):
    """An input that ds_compress refuses; its message is one line with the place, the value and what is
    allowed."""


def in_one_line(error: BaseException) -> str:
    """Format an error in one line: `"ValueError: what it says first"`, with the next line after a colon."""
    text = str(error) or ("its data has run out" if isinstance(error, StopIteration) else "")
    first, *more = f"{type(error).__name__}: {text}".splitlines()
    for line in map(str.strip, more):
        if line and not first.rstrip().endswith(":"):
            break
        first = f"{first.rstrip()} {line}".rstrip()
    return first


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Suggest `" (did you mean 'topk'?)"` for the nearest name in `known`, or an empty string when none is
    near."""
    text = word if isinstance(word, str) else shown(word)
    nearest = difflib.get_close_matches(text[:SHOWN], list(known), n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def shown(value: object) -> str:
    """Format `value` as an error quotes it: in one line, of at most `SHOWN` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of too many digits, lists too deep, ...
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def shown_key(key: object) -> str:
    """Format `key` as a part of a JSON path: as it is where it is a plain word or number, else quoted."""
    return key if isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,40}", key) else shown(key)


def shown_numbers(numbers: Iterable[int]) -> str:
    """Format ascending `numbers`, of three or more in a row the first and the last: `0-14, 20, 21`."""
    runs = itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0])
    rows = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{row[0]}-{row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows)


def shown_boundaries(numbers: Sequence[int]) -> str:
    """Format ascending `numbers` of boundaries: `boundary 3`, `boundaries 0-14, 20`."""
    return f"boundar{'y' if len(numbers) == 1 else 'ies'} {shown_numbers(numbers)}"


def differences(ours: Any, theirs: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield where two values of JSON types differ: the JSON path, from `path` on, and both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours | theirs:
            yield from differences(ours.get(key), theirs.get(key), f"{path}.{shown_key(key)}")
    elif ours != theirs:
        yield path, ours, theirs


def is_required() -> bool:
    """Return whether `REQUIRE` is set, to anything but 0."""
    return os.environ.get(REQUIRE, "0") not in ("", "0")


@contextmanager
def failures_at(place: str) -> Iterator[None]:
    """Convert other errors to a CompressionError that says where something failed that is not ours."""
    try:
        yield
    except CompressionError:
        raise
    except Exception as error:
        raise CompressionError(f"{place}: {in_one_line(error)}") from error


@contextmanager
def errors_at(path: str) -> Iterator[None]:
    """Begin the line of a CompressionError with `path`."""
    try:
        yield
    except CompressionError as error:
        raise CompressionError(f"{path}: {error}") from None
