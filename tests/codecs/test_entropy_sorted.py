"""Codec entropy with "contexts": tables for values of each size, and which have which, in one packet."""

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from tests.support import messages as captured
from tests.support.codecs import bits_per_value, error_of, roundtrip


def mean(measure, choice, messages):
    return sum(measure(choice, x) for x in messages) / len(messages)


@pytest.mark.parametrize(
    "model, direction, contexts, bits, saved",
    [
        ("transformer", 0, "columns", 3.5, 0.2),
        ("transformer", 1, "rows", 3.5, 0.2),
        ("cnn", 0, "columns", 2.0, 0.2),
        ("cnn", 1, "rows", 1.5, 0.15),
    ],
)
def test_saves_bits_on_messages_of_models(model, direction, contexts, bits, saved):
    """The error of `bits` in so much less, what says which table is whose included."""
    messages = getattr(captured, model)()[direction]
    ours, plain = ({"name": "entropy", "bits": b} for b in (bits - saved, bits))
    ours["contexts"] = contexts
    assert mean(bits_per_value, ours, messages) <= bits - saved
    assert mean(error_of, ours, messages) <= mean(error_of, plain, messages)


@pytest.mark.parametrize("contexts", ["rows", "columns"])
@pytest.mark.parametrize("shape", [(70, 96), (2, 33, 250), (64, 8, 5, 5), (5000,), (4097, 1)], ids=str)
def test_every_value_comes_back_to_its_place(shape, contexts):
    """Also those behind the last whole run; with 6 bits none is further off than a step."""
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) - 1234
    y = roundtrip({"name": "entropy", "bits": 6, "contexts": contexts}, x)
    assert (y - x).abs().max() < 0.03 * x.abs().max()


@pytest.mark.parametrize("contexts", ["rows", "columns"])
def test_short_messages_are_coded_as_without(contexts):
    for shape in ((64, 63), (4, 4000), (100,)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        if contexts == "rows" and x.numel() >= 4096:
            continue
        codes = [
            build({"name": "entropy", "bits": 2, **more}).encode(x, Context())[0]
            for more in ({"contexts": contexts}, {})
        ]
        assert torch.equal(*codes)


@pytest.mark.parametrize("contexts", ["rows", "columns"])
def test_whatever_classes_come_are_an_order(contexts):
    """Damage to them moves values, and never reads or writes beside them."""
    x = torch.randn(80, 96, generator=torch.Generator().manual_seed(0))
    codec, spec = build({"name": "entropy", "contexts": contexts}), TensorSpec.of(x)
    (code,) = codec.encode(x, Context())
    words = {"rows": 15, "columns": 12}[contexts]
    damaged = code.clone()
    damaged[-words:] = torch.randint(-(2**15), 2**15, (words,)).short()
    arrived, moved = (codec.decode((each,), spec, Context()) for each in (code, damaged))
    assert torch.equal(arrived.flatten().sort().values, moved.flatten().sort().values)
    assert not torch.equal(arrived, moved)
