"""Words of earlier releases are refused with the new one: no config is misread, none is guessed at."""

import pytest

from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.feedback import Feedback
from tests.config.test_bad_blocks import block_with

OLD = [
    ("forward.codec", {"name": "quantize", "scale": "symmetric"}, ".scale: unknown key, now 'scheme'"),
    (
        "boundaries.2.backward.codec",
        {"name": "quantize", "scheme": "minmax"},
        ".scheme: 'minmax' is not allowed, now 'asymmetric'; ",
    ),
    (
        "backward.codec",
        {"name": "topk", "scope": "tensor"},
        ".scope: unknown key, now 'rows'; allowed: density, values, ",
    ),
    ("backward.codec", {"name": "randomk", "scope": "tensor"}, ".scope: unknown key, now 'rows'"),
    (
        "forward.feedback",
        {"name": "ef", "scope": "slot"},
        ".scope: 'slot' is not allowed, now 'micro_batch'; allowed: 'boundary', ",
    ),
    (
        "forward.feedback",
        {"name": "aqsgd", "scope": "batch"},
        ".scope: 'batch' is not allowed, now 'micro_batch'; allowed: 'sample', ",
    ),
    (
        "forward.feedback",
        {"name": "aqsgd", "store": "disk"},
        ".store: unknown key, now 'offload'; allowed: scope, ids, ",
    ),
    ("forward.feedback", {"name": "aqsgd", "folder": "/tmp"}, ".folder: unknown key, now 'offload'"),
    (
        "forward.feedback",
        {"name": "aqsgd", "offload": {"device": "disk"}},
        ".offload.device: 'disk' is not allowed (removed: use 'cpu', and max_gb); allowed: 'none', ",
    ),
    ("mirror_check", 5, ": unknown key, now 'state_check_every'; allowed: enabled, "),
    ("guard.action", "loosen", ": 'loosen' is not allowed, now 'relax'; allowed: 'warn', "),
    (
        "forward.feedback",
        {"name": "aqsgd", "first": "none"},
        ".first: unknown key, now 'first_visit'; allowed: scope, ids, ",
    ),
    (
        "forward.codec",
        {"name": "quantize", "hadamard": "auto"},
        ".hadamard: 'auto' is not allowed: should be a valid boolean",
    ),
]
"""JSON path, what is there, how the message goes on after the path."""


@pytest.mark.parametrize("path, value, line", OLD)
def test_an_old_word_is_refused_with_the_new_one(path, value, line):
    with pytest.raises(CompressionError) as caught:
        Config(block_with(path, value))
    assert str(caught.value).startswith(f"ds_compress.{path}{line}")


def test_a_word_that_means_something_else_there_is_only_unknown():
    with pytest.raises(CompressionError, match=r"codec.scale: unknown key; allowed: bits"):
        Config({"forward": {"codec": {"name": "minmax", "scale": "symmetric"}}})


def test_an_old_attribute_of_a_feedback_is_refused_with_the_new_one():
    with pytest.raises(CompressionError, match="feedback Mine: 'mirrors' is now 'has_mirrored_state'"):
        type("Mine", (Feedback,), {"mirrors": True})
