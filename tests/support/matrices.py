"""Messages seen as matrices, of a rank or a spectrum, and codecs that send them."""

import torch
from hypothesis import strategies as st

from ds_compress.codec import Context, TensorSpec

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TOLERANCE = {"bf16": 2e-2, "fp32": 1e-5}


@st.composite
def any_shape(draw, longest=9):
    """A message of any shape and dtype, not contiguous."""
    shape = draw(st.lists(st.integers(0, longest), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randn([*shape, 2], generator=generator).to(dtype)[..., 0]


def observed(codec, *tensors, **context):
    """Contexts of both sides after a warm-up of `tensors`."""
    sides = Context(**context), Context(**context)
    for x in tensors:
        for side in sides:
            codec.observe(x, side)
    return sides


def send(codec, x, sender, receiver):
    """What arrives; the parts must be what `layout` says."""
    spec = TensorSpec.of(x)
    parts = codec.encode(x, sender)
    assert tuple((tuple(part.shape), part.dtype) for part in parts) == codec.layout(spec)
    out = codec.decode(parts, spec, receiver)
    assert TensorSpec.of(out) == spec
    return out


def relative_error(out, x):
    return ((out.double() - x.double()).norm() / x.double().norm()).item()


def of_rank(rank, n, h, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, rank, generator=generator) @ torch.randn(rank, h, generator=generator)


def with_spectrum(decay, n, h, seed=0):
    """n x h matrix with singular values near 1, decay, decay^2, ..."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.linalg.qr(torch.randn(h, h, generator=generator)).Q
    return (torch.randn(n, h, generator=generator) * decay ** torch.arange(h)) @ v.T


def drifting(step, h=32):
    """Rows whose directions turn by a little with every step, the strong ones into the weak ones."""
    angle, turn = torch.tensor(0.01 * step), torch.eye(h)
    cos, sin = angle.cos(), angle.sin()
    for strong in range(h // 4):
        weak = h - 1 - strong
        turn[strong, strong], turn[strong, weak], turn[weak, strong], turn[weak, weak] = cos, sin, -sin, cos
    rows = torch.randn(512, h, generator=torch.Generator().manual_seed(step))
    return (rows * 0.8 ** torch.arange(h)) @ turn
