"""What is refused: the one line of an error of ours."""

from collections.abc import Callable
from typing import Any

import pytest

from ds_compress.errors import CompressionError


def refusal(function: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return the line of the `CompressionError` that the call raises; fail unless it is one line."""
    with pytest.raises(CompressionError) as caught:
        function(*args, **options)
    line = str(caught.value)
    assert "\n" not in line
    return line
