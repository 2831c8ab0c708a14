"""Blocks by the hundred."""

import pytest

from ds_compress.codec import CODECS
from ds_compress.config import KEY, Block, Config
from ds_compress.errors import CompressionError
from ds_compress.feedback import FEEDBACKS


def options_models():
    """(path to a model in the block, its class, a block with that model's object filled in by a function)."""
    yield KEY, Block, lambda own: own
    for name, field in Block.model_fields.items():
        if name in ("policy", "link", "checkpoint", "monitor", "forward", "backward"):
            yield f"{KEY}.{name}", field.annotation, lambda own, name=name: {name: own}
    for direction in ("forward", "backward"):
        for registry in (CODECS, FEEDBACKS):
            for name in registry.names():
                kind = registry.kind
                yield (
                    f"{KEY}.{direction}.{kind}",
                    registry.find(name, "").Options,
                    (
                        lambda own, name=name, direction=direction, kind=kind: {
                            direction: {kind: {"name": name, **own}}
                        }
                    ),
                )


def generated_bad_blocks():
    """Every option of every model with values that none allows, and an unknown option for every model."""
    for path, model, block in options_models():
        yield f"{path}.no_such_option", block({"no_such_option": 1})
        for name in model.model_fields:
            for wrong in ([], {"no_such_option": 1}, -1e300, b"bytes"):
                yield f"{path}.{name}", block({name: wrong})


def test_generated_bad_blocks():
    count = 0
    for path, block in generated_bad_blocks():
        with pytest.raises(CompressionError) as caught:
            Config(block)
            pytest.fail(f"accepted: {block}")
        message = str(caught.value)
        assert message.startswith(path) and "\n" not in message, (block, message)
        count += 1
    assert count >= 200
