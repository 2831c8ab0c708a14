"""The one exception class of the package."""

import difflib
from collections.abc import Iterable


class CompressionError(ValueError):
    """Whatever ds_compress refuses: the message is one line that names the place, what came and what is
    allowed."""


def in_one_line(error: BaseException) -> str:
    """`"ValueError: what it says first"`."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`" (did you mean 'topk'?)"` for the nearest name in `known`, or an empty string when none is near."""
    nearest = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
