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
def filled(x, exists, value, WHOLE: tl.constexpr):
    """`x`, with `value` in the columns that do not exist; all of them do where rows are WHOLE."""
    return x if WHOLE else tl.where(exists, x, value)


@triton.jit
def limits(values, exists, TILES: tl.constexpr, WHOLE: tl.constexpr):
    """The smallest and the largest value of each row; nan if it holds one, which tl.min and tl.max pass
    over. Of a row that does not exist, anything."""
    low = filled(values[0], exists, float("inf"), WHOLE)
    high = filled(values[0], exists, float("-inf"), WHOLE)
    for t in tl.static_range(1, TILES):
        low = tl.minimum(low, filled(values[t], exists, float("inf"), WHOLE))
        # one instruction, where a comparison of every value is two more
        here = filled(values[t], exists, float("-inf"), WHOLE)
        high = tl.maximum(high, here, propagate_nan=tl.PropagateNan.ALL)
    nan = tl.max((high != high).to(tl.int32), 1) > 0
    return tl.where(nan, float("nan"), tl.min(low, 1)), tl.where(nan, float("nan"), tl.max(high, 1))


@triton.jit
def reach(values, exists, TILES: tl.constexpr, WIDTH: tl.constexpr, MEAN: tl.constexpr, WHOLE: tl.constexpr):
    """The largest, or the mean, magnitude of each row."""
    magnitudes = ()
    for t in tl.static_range(TILES):
        magnitudes = magnitudes + (filled(tl.abs(values[t]), exists, 0.0, WHOLE),)
    if MEAN:
        total = magnitudes[0]
        for t in tl.static_range(1, TILES):
            total += magnitudes[t]
        return tl.div_rn(tl.sum(total, 1), fp32(TILES * WIDTH))
    else:
        _, high = limits(magnitudes, exists, TILES, WHOLE)
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
