"""What a codec encodes into memory that is there is what new memory gets; what is large is made there."""

import itertools

import pytest
import torch

from ds_compress.cli.bench import contexts
from ds_compress.codec import Codec, TensorSpec, build, names
from ds_compress.codecs.mixins import ObservesWarmup, layers
from ds_compress.feedback import FEEDBACKS, FeedbackCodec
from ds_compress.kernels import native
from ds_compress.kernels.backends import cpu, reference, using
from ds_compress.kernels.memory import fill
from ds_compress.testing import _tensors, settings_of
from tests.support.codecs import assert_same_bits, goes_with
from tests.support.refusals import refusal

CHOICES = [setting for name in names() for setting in settings_of(name) if name != "lossless"]
"""Without that of which the second packet has a size of its own."""
MORE = [
    {"name": "quantize", "rounding": "stochastic"},
    *({"name": "minmax", "bits": bits} for bits in (3, 5)),
    {"name": "fp8", "group_size": 24},
]
FEEDBACK = ["ef", "ef21", "loco", "ef_mixed", "aqsgd", {"name": "ef", "dtype": "int8"}]


def primed(codec, x):
    """Contexts of sender and receiver; what a feedback takes over from an earlier message is there, too."""
    made = contexts(codec, x)
    ids = codec.feedback.sample_ids if isinstance(codec, FeedbackCodec) else None
    for ctx in made:
        ctx.sample_ids = torch.arange(ids.count([TensorSpec.of(x)])) if ids else None
        for layer in layers(codec, ObservesWarmup):
            layer.observe(x, ctx)
    return made


def both(codec, shape, dtype=torch.float32):
    """What the second of two messages is in memory that is there, and in new memory."""
    found = []
    for given in (True, False):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        ctx, _ = primed(codec, x)
        codec.encode(x / 2, ctx)
        layout = codec.layout(TensorSpec.of(x))
        out = tuple(torch.full(shape, 77, dtype=dtype) for shape, dtype in layout) if given else None
        parts = codec.encode_into(x, ctx, out)
        if given:
            fill(out, parts)
        found.append(out if given else parts)
    return found


@pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("choice", CHOICES + MORE, ids=str)
def test_codecs(choice, backend, monkeypatch):
    monkeypatch.setattr(native, "LONG", 0)
    with using(backend):
        for shape in ((3, 7), (40, 128), (2, 3, 0)):
            assert_same_bits(*both(build(choice), shape))


@pytest.mark.parametrize("feedback", FEEDBACK, ids=str)
@pytest.mark.parametrize(
    "codec", ["bf16", "fp8", {"name": "topk", "density": 0.3}, {"name": "quantize", "bits": 4}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_feedbacks(feedback, codec, dtype):
    both_sides = FEEDBACKS.build(feedback, "feedback").wrap(build(codec))
    assert_same_bits(*both(both_sides, (40, 128), dtype))


@pytest.mark.parametrize("choice", ["bf16", "fp16", "fp8", {"name": "quantize", "bits": 8}], ids=str)
@pytest.mark.parametrize("feedback", ["none", "ef"])
def test_what_is_large_is_made_where_it_is_to_be(choice, feedback, monkeypatch):
    """And not copied there."""
    codec, x = FEEDBACKS.build(feedback, "feedback").wrap(build(choice)), torch.randn(40, 128)
    out = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in codec.layout(TensorSpec.of(x)))
    ctx, _ = primed(codec, x)
    assert codec.encode(x, ctx, out)[0] is out[0]


def places(things):
    """The addresses of what the tensors in `things` lie in."""
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(things)}


# what goes back is not cloned
CALLED = [setting for setting in CHOICES if setting.get("indices") != "reuse"]
PAIRS = [pair for pair in itertools.product(["none", *FEEDBACK], CALLED) if goes_with(*pair)]


@pytest.mark.parametrize("feedback, choice", PAIRS, ids=str)
@pytest.mark.extended(keep=30)
def test_what_is_decoded_is_the_callers(feedback, choice):
    """The engine hands it to the model without a copy: what codec or feedback goes on with is not in it."""
    both_sides, x = FEEDBACKS.build(feedback, "feedback").wrap(build(choice)), torch.randn(4, 40, 128)
    sender, receiver = primed(both_sides, x)
    for _ in range(3):
        parts = tuple(part.clone() for part in both_sides.encode(x, sender))
        arrived = both_sides.decode(parts, TensorSpec.of(x), receiver)
        own, kept = places(arrived), places([receiver.memory, receiver.stash])
        assert own <= places(parts) or not own & kept


class WithoutOut(Codec):
    """Does not support memory for its payload."""

    name = "without_out"

    def layout(self, spec):
        return (((4,), torch.float32), ((), torch.int64))

    def encode(self, x, ctx):
        return x.view(-1)[:4], torch.tensor(7)

    decode = None


class IgnoresOut(WithoutOut):
    """Supports memory for its payload, and uses other memory."""

    def encode(self, x, ctx, out=None):
        return super().encode(x, ctx)


class WithoutOutAgain(IgnoresOut):
    encode = WithoutOut.encode


@pytest.mark.parametrize(
    "kind, supports", [(WithoutOut, False), (IgnoresOut, True), (WithoutOutAgain, False)]
)
def test_a_payload_made_in_other_memory_is_copied_to_the_packet(kind, supports):
    codec, x = kind(), torch.arange(8.0)
    assert codec.supports_out == supports
    out = torch.zeros(4), torch.zeros((), dtype=torch.int64)
    fill(out, codec.encode_into(x, None, out))
    assert torch.equal(out[0], x[:4]) and out[1] == 7
    assert "payload of" in refusal(fill, (torch.zeros(3), out[1]), codec.encode_into(x, None, out))
