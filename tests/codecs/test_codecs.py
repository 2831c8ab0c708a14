"""The promises of the contract, for every registered codec: a codec added anywhere is tested here without
being named.

Each is tested with its defaults, its `examples`, and the rarer option sets that OPTIONS lists.
"""

from contextlib import contextmanager

import pytest
import torch

import ds_compress.codecs  # noqa: F401 - registers
from ds_compress.codec import CODECS, Context, TensorSpec, build, names
from ds_compress.errors import CompressionError

OPTIONS = {
    "quantize": [
        *({"bits": bits} for bits in (1, 2, 3, 5, 6, 7)),
        {"bits": 1, "scheme": "symmetric"},
        {"scheme": "symmetric", "scale_dtype": "fp32", "group_size": "channel"},
        {"bits": 8, "group_size": "tensor"},
        {"rounding": "stochastic"},
        {"bits": 1, "scheme": "symmetric", "hadamard": True, "rounding": "stochastic", "group_size": 16},
        {"group_size": 8, "mixed": {"share": 0.5}, "hadamard": True, "scheme": "symmetric"},
    ],
    "minmax": [{"bits": 1}],
    "acsgd": [{"bits": 1}],
    "fp8": [{"group_size": "channel", "format": "e5m2"}],
    "topk": [
        {"rows": "tensor", "indices": "bitmask", "values": "bf16"},
        {"density": 1.0},
        {"density": 0.01, "indices": "int16"},
        {"density": 0.7, "indices": "int32", "values": "fp16"},
        {"select": "block", "block_size": 8, "indices": "rice"},
    ],
    "randomk": [
        {"unbiased": True, "values": {"name": "quantize", "rounding": "stochastic"}},
        {"rows": "tensor"},
    ],
    "column": [{"density": 0.01, "values": "bf16"}],
}


def choices():
    for name in names():
        found = []
        for options in ({}, *CODECS.find(name, "codec").examples, *OPTIONS.get(name, ())):
            # index reuse is tested as the partner of a forward codec, below
            if options not in found and options.get("indices") != "reuse":
                found.append(options)
                yield {"name": name, **options}


CHOICES = list(choices())
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 4), (2, 7, 13), (4, 128), (2, 3, 256)]


def label(value):
    if isinstance(value, dict):
        return "-".join(f"{key}={item}" if key != "name" else item for key, item in value.items())
    return str(value).removeprefix("torch.")


every_codec = pytest.mark.parametrize("choice", CHOICES, ids=label)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=label)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=label)


def backward_of(choice):
    """The codec for the gradient: top-k once more, with the forward indices, or the same as forward."""
    return build({**choice, "indices": "reuse"} if choice["name"] == "topk" else choice)


class Boundary:
    """The two sides of a boundary; what passes between them is bytes."""

    def __init__(self, choice):
        forward = build(choice)
        self.codecs = {"forward": forward, "backward": backward_of(choice).paired(forward)}
        self.memories = {}, {}

    def exchange(self, activation, gradient, **place):
        """Send `activation` forward and then `gradient` of the same micro-batch back; what arrives.

        A warm-up message of the same shape has crossed before.
        """
        for memory in self.memories:
            warmup = normal(activation.shape, activation.dtype, seed=5)
            self.codecs["forward"].observe(warmup, Context(**place, memory=memory))
        stashes = {}, {}
        left, right = zip(stashes, self.memories)
        return (
            self._send(activation, left, right, direction="forward", **place),
            self._send(gradient, right, left, direction="backward", **place),
        )

    def _send(self, x, source, target, **place):
        codec, spec, before = self.codecs[place["direction"]], TensorSpec.of(x), x.clone()
        sender = Context(**place, stash=source[0], memory=source[1])
        receiver = Context(**place, stash=target[0], memory=target[1])
        observer = Context(**place, stash=dict(target[0]), memory=dict(target[1]))

        parts = codec.encode(x, sender)
        layout = codec.layout(spec)
        layout += codec.rest(parts[: len(layout)], spec)
        assert tuple((tuple(part.shape), part.dtype) for part in parts) == layout
        assert all(part.device == x.device for part in parts)
        assert same(x, before), "the input was modified"

        arrived = codec.decode(tuple(map(through_bytes, parts)), spec, receiver)
        assert TensorSpec.of(arrived) == spec
        assert same(arrived, codec.decode(parts, spec, observer)), "the parts hold more than their bytes"
        return arrived


def through_bytes(part):
    raw = bytearray(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(part.dtype).view(part.shape)


def same(a, b):
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def normal(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def refusal_in_one_line():
    """A codec may refuse a tensor, with a reason."""
    try:
        yield
    except CompressionError as error:
        assert len(str(error).splitlines()) == 1


def test_options_are_of_registered_codecs():
    assert set(OPTIONS) <= set(names())


@every_codec
def test_ordinary_messages_are_not_refused(choice):
    for dtype in DTYPES[:3]:
        Boundary(choice).exchange(normal((2, 4, 256), dtype), normal((2, 4, 256), dtype, seed=1))


@every_codec
@every_dtype
@every_shape
def test_any_shape_and_dtype(choice, dtype, shape):
    with refusal_in_one_line():
        for arrived in Boundary(choice).exchange(normal(shape, dtype), normal(shape, dtype, seed=1)):
            assert arrived.isfinite().all()


@every_codec
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 256)], ids=label)
def test_equal_contexts_give_equal_bytes(choice, shape):
    x, g = normal(shape), normal(shape, seed=1)
    with refusal_in_one_line():
        one, other = Boundary(choice), Boundary(choice)
        for step in range(2):
            pairs = zip(one.exchange(x, g, step=step, seed=7), other.exchange(x, g, step=step, seed=7))
            assert all(same(a, b) for a, b in pairs)


@every_codec
@every_dtype
def test_memory_order_does_not_matter(choice, dtype):
    wide = normal((6, 4, 256), dtype)
    for x in (
        wide.transpose(0, 1),
        wide[:, :, ::2],
        wide[1::3].permute(2, 1, 0),
        wide[:, :1].expand(-1, 4, -1),
    ):
        with refusal_in_one_line():
            strided = Boundary(choice).exchange(x, x)
            dense = Boundary(choice).exchange(x.contiguous(), x.contiguous())
            assert all(same(a, b) for a, b in zip(strided, dense))


@every_codec
@every_dtype
def test_zeros_stay_zeros(choice, dtype):
    for shape in SHAPES:
        zeros = torch.zeros(shape, dtype=dtype)
        with refusal_in_one_line():
            assert all(same(arrived, zeros) for arrived in Boundary(choice).exchange(zeros, zeros))


@every_codec
@every_dtype
def test_constants_stay_finite(choice, dtype):
    small, large = (6e-5, 6.5e4) if dtype == torch.float16 else (1e-30, 1e30)
    for value in (1.0, -0.3, small, large):
        x = torch.full((4, 128), value, dtype=dtype)
        with refusal_in_one_line():
            assert all(arrived.isfinite().all() for arrived in Boundary(choice).exchange(x, x))


@every_codec
@every_dtype
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=label)
def test_non_finite_stays_visible(choice, dtype, value):
    for shape in [(1,), (3, 5), (2, 3, 256)]:
        ordinary, alone = normal(shape, dtype), normal(shape, dtype)
        alone.view(-1)[alone.numel() // 2] = value
        for bad in (alone, torch.full(shape, value, dtype=dtype)):
            with refusal_in_one_line():
                assert not Boundary(choice).exchange(bad, ordinary)[0].isfinite().all()
                assert not Boundary(choice).exchange(ordinary, bad)[1].isfinite().all()


@every_codec
@every_dtype
def test_scale_passes_through(choice, dtype):
    """C(s x) = s C(x) from 1e-30 to 1e30, with powers of two for s, since they cost no precision
    themselves."""
    powers, spacing = ((-3, 3), 2.0**-24) if dtype == torch.float16 else ((-98, -40, -3, 3, 40, 98), 0)
    x, g = normal((2, 4, 256), dtype), normal((2, 4, 256), dtype, seed=1)
    with refusal_in_one_line():
        plain = Boundary(choice).exchange(x, g)
        for power in powers:
            scaled = Boundary(choice).exchange(x * 2.0**power, g * 2.0**power)
            for arrived, once in zip(scaled, plain):
                expected = once.double() * 2.0**power
                tolerance = 1e-6 * expected.abs().max() + spacing
                assert (arrived.double() - expected).abs().max() <= tolerance
