"""Words of earlier releases are refused with the new one: no config is misread, none is guessed at."""

import pytest

from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.feedback import Feedback

OLD = [
    (
        {"forward": {"codec": {"name": "quantize", "scale": "symmetric"}}},
        "ds_compress.forward.codec.scale: unknown key, now 'scheme'",
    ),
    (
        {"boundaries": {"2": {"backward": {"codec": {"name": "quantize", "scheme": "minmax"}}}}},
        "ds_compress.boundaries.2.backward.codec.scheme: 'minmax' is not allowed, now 'asymmetric'; ",
    ),
    (
        {"backward": {"codec": {"name": "topk", "scope": "tensor"}}},
        "ds_compress.backward.codec.scope: unknown key, now 'rows'; allowed: density, values, ",
    ),
    (
        {"backward": {"codec": {"name": "randomk", "scope": "tensor"}}},
        "ds_compress.backward.codec.scope: unknown key, now 'rows'",
    ),
    (
        {"forward": {"feedback": {"name": "ef", "scope": "slot"}}},
        "ds_compress.forward.feedback.scope: 'slot' is not allowed, now 'micro_batch'; allowed: 'boundary', ",
    ),
    (
        {"forward": {"feedback": {"name": "aqsgd", "scope": "batch"}}},
        "ds_compress.forward.feedback.scope: 'batch' is not allowed, now 'micro_batch'; allowed: 'sample', ",
    ),
    (
        {"forward": {"feedback": {"name": "aqsgd", "store": "disk"}}},
        "ds_compress.forward.feedback.store: unknown key, now 'offload'; allowed: scope, ids, ",
    ),
    (
        {"forward": {"feedback": {"name": "aqsgd", "folder": "/tmp"}}},
        "ds_compress.forward.feedback.folder: unknown key, now 'offload'",
    ),
    (
        {"forward": {"feedback": {"name": "aqsgd", "offload": {"device": "disk"}}}},
        "ds_compress.forward.feedback.offload.device: 'disk' is not allowed, now 'nvme'; allowed: 'none', ",
    ),
    (
        {"mirror_check": 5},
        "ds_compress.mirror_check: unknown key, now 'state_check_every'; allowed: enabled, ",
    ),
    (
        {"guard": {"action": "loosen"}},
        "ds_compress.guard.action: 'loosen' is not allowed, now 'relax'; allowed: 'warn', ",
    ),
    (
        {"forward": {"feedback": {"name": "aqsgd", "first": "none"}}},
        "ds_compress.forward.feedback.first: unknown key, now 'first_visit'; allowed: scope, ids, ",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "hadamard": "auto"}}},
        "ds_compress.forward.codec.hadamard: 'auto' was removed; allowed: true, false, or codec 'entropy', ",
    ),
]


@pytest.mark.parametrize("block, line", OLD, ids=[line.split(":")[0] for _, line in OLD])
def test_an_old_word_is_refused_with_the_new_one(block, line):
    with pytest.raises(CompressionError) as caught:
        Config(block)
    assert str(caught.value).startswith(line)


def test_a_word_that_means_something_else_there_is_only_unknown():
    with pytest.raises(CompressionError, match=r"codec.scale: unknown key; allowed: bits"):
        Config({"forward": {"codec": {"name": "minmax", "scale": "symmetric"}}})


def test_an_old_attribute_of_a_feedback_is_refused_with_the_new_one():
    with pytest.raises(CompressionError, match="feedback Mine: 'mirrors' is now 'has_mirrored_state'"):
        type("Mine", (Feedback,), {"mirrors": True})
