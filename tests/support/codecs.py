"""Send tensors through codecs and feedbacks, and compare what arrives."""

from contextlib import contextmanager

import pytest
import torch

from ds_compress.codec import CODECS, Codec, CodecOptions, Context, TensorSpec, build
from ds_compress.codecs.mixins import ObservesWarmup, VariableSizePayload, layers
from ds_compress.errors import CompressionError
from ds_compress.feedback import FEEDBACKS
from ds_compress.kernels.quantize.grid import Grid
from ds_compress.kernels.topk.reference import as_integers
from ds_compress.testing import relative_error


def roundtrip(choice, x, **context):
    """What arrives, the parts being what `layout` says."""
    return send(build(choice), x, Context(**context), Context(**context))


def goes_with(feedback, choice):
    """Whether a feedback may follow a codec."""
    try:
        FEEDBACKS.build(feedback, "feedback").wrap(build(choice))
    except CompressionError:
        return False
    return True


def bits_per_value(choice, x):
    return 8 * sum(part.nbytes for part in build(choice).encode(x, Context())) / x.numel()


def error_of(choice, x, **context):
    return relative_error(x, roundtrip(choice, x, **context))


@contextmanager
def own_codecs():
    """What is registered inside is forgotten at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CODECS, "_classes", dict(CODECS._classes))
        yield


def any_grid(bits: int, hadamard: bool, size: int, seed: int) -> Grid:
    """Return a grid for groups of `size`, rotated only where that is allowed."""
    return Grid(bits, hadamard and not size & (size - 1), seed)


def assert_same_bits(ours, theirs) -> None:
    """Tensors of the same dtypes, shapes and bits, but for those of nan, which are nan on both sides."""
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype and mine.shape == its.shape
        if mine.is_floating_point():
            assert torch.equal(mine.isnan(), its.isnan())
            mine, its = (as_integers(part.masked_fill(part.isnan(), 0)) for part in (mine, its))
        assert torch.equal(mine, its)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def send(codec, x, sender, receiver):
    """What arrives; the parts must be what `layout` says."""
    spec = TensorSpec.of(x)
    parts, layout = codec.encode(x, sender), codec.layout(spec)
    if isinstance(codec, VariableSizePayload):
        layout += codec.extra_payload(parts[: len(layout)], spec)
    assert tuple((tuple(part.shape), part.dtype) for part in parts) == layout
    out = codec.decode(parts, spec, receiver)
    assert TensorSpec.of(out) == spec
    return out


INPUTS = torch.tensor([[4.0, 3, 2, 1], [1, -2, 2, 0], [0, 1, -3, 2]])


def topk(density, rows="tensor"):
    return {"name": "topk", "density": density, "rows": rows}


SETTINGS = [topk(0.3), topk(0.3, "sample"), {"name": "quantize", "bits": 3, "group_size": 8}, "bf16"]


class Pair:
    """Sender and receiver of one channel, each with a memory of its own; the receiver is given what an extra
    packet would hold, whose rows are counted."""

    def __init__(self, codec, feedback, direction="forward"):
        self.codec = FEEDBACKS.build(feedback, "feedback").wrap(build(codec))
        self.direction = direction
        self.sender, self.receiver = {}, {}
        self.sent = self.dense = 0

    def _contexts(self, changes):
        place = {"direction": self.direction, "step": self.sent, **changes}
        self.sent += 1
        return Context(memory=self.sender, **place), Context(memory=self.receiver, **place)

    def __call__(self, x, **changes):
        """What the receiver gets for `x`."""
        sender, receiver = self._contexts(changes)
        before, spec = x.clone(), TensorSpec.of(x)
        parts = self.codec.encode(x, sender)
        assert torch.equal(x, before) or not x.isfinite().all()
        layout = self.codec.layout(spec)
        self.parts, self.extra = parts[: len(layout)], parts[len(layout) :]
        if isinstance(self.codec, VariableSizePayload):
            layout += self.codec.extra_payload(self.parts, spec)
        assert tuple((tuple(p.shape), p.dtype) for p in parts) == layout
        self.dense += sum(part.shape[0] for part in self.extra)
        decoded = self.codec.decode(tuple(p.clone() for p in parts), spec, receiver)
        assert decoded.dtype == x.dtype and decoded.shape == x.shape
        return decoded

    def observe(self, x, **changes):
        for ctx in self._contexts(changes):
            for layer in layers(self.codec, ObservesWarmup):
                layer.observe(x, ctx)

    def state(self, memory=None):
        (value,) = (self.sender if memory is None else memory).values()
        return value

    def state_of(self, number):
        """The buffer of a sample."""
        (row,) = (value for key, value in self.sender.items() if key.endswith(f"{number:016x}"))
        return row

    def in_step(self):
        return self.sender.keys() == self.receiver.keys() and all(
            torch.equal(self.sender[key], self.receiver[key]) for key in self.sender
        )


class FourBits(Codec):
    """The quantizer of LoCo's golden vector: symmetric, one scale for the tensor, steps of max / 7."""

    Options = CodecOptions
    name = "four_bits"

    def layout(self, spec):
        return ((spec.shape, torch.int8), ((), torch.float32))

    def encode(self, x, ctx):
        scale = x.abs().max() / 7
        return (x / scale).round().to(torch.int8), scale

    def decode(self, parts, spec, ctx):
        codes, scale = parts
        return codes * scale


def ids(*numbers):
    return torch.tensor(numbers)
