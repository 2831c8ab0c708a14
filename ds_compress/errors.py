"""The one exception class of the package, and what makes it."""

import difflib
import os
from collections.abc import Iterable

REQUIRE = "DS_COMPRESS_REQUIRE"
"""Environment variable: 1 makes an engine that would train uncompressed an error."""


class CompressionError(ValueError):
    """Whatever ds_compress refuses: the message is one line that names the place, what came and what is
    allowed."""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`" (did you mean 'topk'?)"` for the nearest name in `known`, or an empty string when none is near."""
    nearest = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def is_required() -> bool:
    """Whether `REQUIRE` is set, to anything but 0."""
    return os.environ.get(REQUIRE, "0") not in ("", "0")
