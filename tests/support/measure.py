"""What the tests of codecs measure."""

import torch

import ds_compress.codecs  # noqa: F401 - registers
from ds_compress.codec import Context, TensorSpec, build


def roundtrip(choice, x, **context):
    codec = build(choice)
    parts = codec.encode(x, Context(**context))
    return codec.decode(parts, TensorSpec.of(x), Context(**context))


def bits_per_value(choice, x):
    return 8 * sum(part.nbytes for part in build(choice).encode(x, Context())) / x.numel()


def relative_error(choice, x, **context):
    return ((roundtrip(choice, x, **context).double() - x.double()).norm() / x.double().norm()).item()


def residual_stream():
    """[4, 1024, 1024] like the hidden state of a transformer: Gaussian, with 6 of 1024 channels 20 times
    larger."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1024, 1024, generator=generator)
    x[..., torch.randperm(1024, generator=generator)[:6]] *= 20
    return x
