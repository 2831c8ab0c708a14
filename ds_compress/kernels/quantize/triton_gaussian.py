"""The grid of `kernels.gaussian` in tiles, which groups whose size is a power of two fill."""

import triton
import triton.language as tl

from ds_compress.kernels.quantize.triton_tiles import tree_sum


@triton.jit
def gaussian_codes(
    values,
    LEVELS: tl.constexpr,
    BOUNDARIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The codes, int32, and the scale of each row, fp32 [ROWS], before it is rounded."""
    largest = values[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for t in tl.static_range(1, TILES):
        largest = tl.maximum(largest, values[t].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(largest, 1)
    exponent = tl.minimum(tl.maximum((largest >> 23) - 127, -126), 126)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    scaled, squares = (), ()
    for t in tl.static_range(TILES):
        x = values[t] * down[:, None]
        scaled = scaled + (x,)
        squares = squares + (x * x,)
    mean = tree_sum(squares, ROWS, TILES, COLUMNS) * (1.0 / (TILES * COLUMNS))
    codes, products, energies = (), (), ()
    for t in tl.static_range(TILES):
        place = tl.zeros([ROWS, COLUMNS], tl.int32)
        level = tl.full([ROWS, COLUMNS], LEVELS[0], tl.float32)
        for j in tl.static_range(len(LEVELS) - 1):
            beyond = squares[t] > (mean * BOUNDARIES[j])[:, None]
            place += beyond.to(tl.int32)
            level = tl.where(beyond, LEVELS[j + 1], level)
        codes = codes + (tl.where(scaled[t] < 0, len(LEVELS) - 1 - place, len(LEVELS) + place),)
        products = products + (tl.abs(scaled[t]) * level,)
        energies = energies + (level * level,)
    fitted = tl.div_rn(tree_sum(products, ROWS, TILES, COLUMNS), tree_sum(energies, ROWS, TILES, COLUMNS))
    scale = fitted * up
    return codes, scale + (scale - scale)


@triton.jit
def gaussian_values(codes, scale, LEVELS: tl.constexpr, TILES: tl.constexpr):
    """The values, fp32, of codes."""
    decoded = ()
    for t in tl.static_range(TILES):
        below = codes[t] < len(LEVELS)
        place = tl.where(below, ~codes[t], codes[t]) & (len(LEVELS) - 1)  # they are as many as a power of two
        value = tl.zeros(codes[t].shape, tl.float32) + (scale * LEVELS[0])[:, None]
        for j in tl.static_range(1, len(LEVELS)):
            value = tl.where(place >= j, (scale * LEVELS[j])[:, None], value)
        decoded = decoded + (tl.where(below, -value, value),)
    return decoded
