"""What the scales of grids are made of, from the values of groups in `tiles`, and their rounding."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, like):
    """`x`, fp32, rounded to nearest, ties to even, where `like` points at bfloat16."""
    if like.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, upper, x)
    return x


@triton.jit
def fp32(x: tl.constexpr):
    return tl.full([1], x, tl.float32)


@triton.jit
def limits(values, exists, TILES: tl.constexpr):
    """The smallest and the largest value of each row; nan if it holds one, which tl.min and tl.max pass
    over."""
    low = tl.where(exists, values[0], float("inf"))
    high = tl.where(exists, values[0], float("-inf"))
    unordered = values[0] != values[0]
    for t in tl.static_range(1, TILES):
        low = tl.minimum(low, tl.where(exists, values[t], float("inf")))
        high = tl.maximum(high, tl.where(exists, values[t], float("-inf")))
        unordered |= values[t] != values[t]
    nan = tl.max(unordered.to(tl.int32), 1) > 0
    return tl.where(nan, float("nan"), tl.min(low, 1)), tl.where(nan, float("nan"), tl.max(high, 1))


@triton.jit
def reach(values, exists, TILES: tl.constexpr, WIDTH: tl.constexpr, MEAN: tl.constexpr):
    """The largest, or the mean, magnitude of each row."""
    magnitudes = ()
    for t in tl.static_range(TILES):
        magnitudes = magnitudes + (tl.where(exists, tl.abs(values[t]), 0.0),)
    if MEAN:
        total = magnitudes[0]
        for t in tl.static_range(1, TILES):
            total += magnitudes[t]
        return tl.div_rn(tl.sum(total, 1), fp32(TILES * WIDTH))
    else:
        _, high = limits(magnitudes, exists, TILES)
        return high


@triton.jit
def at_least(x, scale):
    """`x`, fp32, or where `scale` points at bfloat16 the smallest one that is not below it (see `affine`)."""
    if scale.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        upper = (tl.where(bits < 0, bits, bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, upper, x)
    return x


@triton.jit
def step_from(least, scale):
    """The smallest step that is not below `least`, in the format that `scale` points at (see `affine`)."""
    step = at_least(least, scale)
    return tl.where((step > 0) & (step < 1.1754943508222875e-38), 1.1754943508222875e-38, step)
