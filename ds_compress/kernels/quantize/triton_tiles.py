"""The groups of one program in tiles: what packing joins lies at equal places of different tiles.

So no value moves to another thread. A group is cut into T tiles as wide as the narrowest plane of `bits`:

    group of G codes, b = 6 = 4 + 2, T = 4     | tile 0 | tile 1 | tile 2 | tile 3 |
    planes of the 4-bit piece                  |    plane 0      |    plane 1      |
    planes of the 2-bit piece                  |plane 0 |plane 1 |plane 2 |plane 3 |

A tile is WIDTH values of each of ROWS groups, in COLUMNS columns, the next power of two. More tiles than
packing needs, narrower ones, are less work: what a group needs once is done by the threads that share it, and
a butterfly between tiles is one addition, where one between threads takes a shuffle too.
"""

import triton
import triton.language as tl

from ds_compress.kernels.quantize import grid

LARGEST_LIMIT = tl.constexpr(grid.LARGEST_LIMIT)
SMALLEST_STEP = tl.constexpr(grid.SMALLEST_STEP)


@triton.jit
def places(n, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the program's rows, the columns of a tile, and [ROWS, COLUMNS] whether there is such a value."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    exists = (row < n)[:, None]
    if WIDTH < COLUMNS:
        exists &= column < WIDTH
    else:
        exists = tl.broadcast_to(exists, [ROWS, COLUMNS])
    return row, column, exists


@triton.jit
def store_piece(
    packed, codes, exists, BITS: tl.constexpr, PIECE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr
):
    """Store PIECE bits of each code, behind those of the wider pieces; a plane is `chunks` tiles long."""
    chunks: tl.constexpr = PIECE * TILES // 8
    shift: tl.constexpr = BITS // (2 * PIECE) * (2 * PIECE)  # bits in the wider pieces
    for chunk in tl.static_range(chunks):
        byte = _piece(codes[chunk], shift, BITS, PIECE)
        for plane in tl.static_range(1, 8 // PIECE):
            byte += _piece(codes[plane * chunks + chunk], shift, BITS, PIECE) << (PIECE * plane)
        tl.store(packed + shift * (TILES * WIDTH // 8) + chunk * WIDTH, byte.to(tl.uint8), mask=exists)


@triton.jit
def _piece(code, shift: tl.constexpr, BITS: tl.constexpr, PIECE: tl.constexpr):
    """PIECE bits of a code, which has no more than BITS."""
    return code if BITS == PIECE else (code >> shift) & ((1 << PIECE) - 1)


@triton.jit
def load_piece(
    packed, codes, exists, BITS: tl.constexpr, PIECE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr
):
    """Return `codes` with the bits that `store_piece` stored."""
    chunks: tl.constexpr = PIECE * TILES // 8
    shift: tl.constexpr = BITS // (2 * PIECE) * (2 * PIECE)
    stored = ()
    for chunk in tl.static_range(chunks):
        place = packed + shift * (TILES * WIDTH // 8) + chunk * WIDTH
        stored = stored + (tl.load(place, mask=exists, other=0).to(tl.int32),)
    joined = ()
    for t in tl.static_range(TILES):
        piece = (stored[t % chunks] >> (PIECE * (t // chunks))) & ((1 << PIECE) - 1)
        joined = joined + (codes[t] | (piece << shift),)
    return joined


@triton.jit
def rotate(values, diagonal, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """See `hadamard`: signs, then butterflies within tiles, then between them."""
    return _transformed(_signed(values, diagonal, TILES, COLUMNS), ROWS, TILES, COLUMNS)


@triton.jit
def rotate_back(values, diagonal, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """Invert `rotate`."""
    return _signed(_transformed(values, ROWS, TILES, COLUMNS), diagonal, TILES, COLUMNS)


@triton.jit
def _signed(values, diagonal, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply each tile by the diagonal of the rotation."""
    signed = ()
    for t in tl.static_range(TILES):
        signed = signed + (values[t] * tl.load(diagonal + t * COLUMNS + tl.arange(0, COLUMNS))[None, :],)
    return signed


@triton.jit
def _transformed(values, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    inside = ()
    for t in tl.static_range(TILES):
        inside = inside + (_butterflies(values[t], ROWS, COLUMNS),)
    for i in tl.static_range(3):
        if (1 << i) < TILES:
            inside = _between(inside, 1 << i, TILES)
    return inside


@triton.jit
def _between(values, DISTANCE: tl.constexpr, TILES: tl.constexpr):
    turned = ()
    for t in tl.static_range(TILES):
        if t & DISTANCE:
            turned = turned + (values[t ^ DISTANCE] - values[t],)
        else:
            turned = turned + (values[t] + values[t ^ DISTANCE],)
    return turned


@triton.jit
def _butterflies(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the unscaled transform of each row of a tile; COLUMNS is a power of two up to MAX_GROUP."""
    column = tl.arange(0, COLUMNS)[None, :]
    for i in tl.static_range(12):
        if (1 << i) < COLUMNS:
            # rounded once, as a sum or a difference is: times 1 or -1 is exact
            sign = tl.where((column & (1 << i)) != 0, -1.0, 1.0)
            tile = tl.fma(tile, sign, _across(tile, 1 << i, ROWS, COLUMNS))
    return tile


@triton.jit
def _across(tile, DISTANCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the values of `tile`, fp32, whose column differs in the bit DISTANCE.

    Computed as (own + other) - own on integers: the compiler reduces this to one shuffle, or to nothing if
    one thread holds both.
    """
    own = tl.reshape(tile.to(tl.int32, bitcast=True), [ROWS, COLUMNS // (2 * DISTANCE), 2, DISTANCE])
    other = tl.sum(own, 2, keep_dims=True) - own
    return tl.reshape(other, [ROWS, COLUMNS]).to(tl.float32, bitcast=True)


@triton.jit
def fp32(x: tl.constexpr):
    return tl.full([1], x, tl.float32)


@triton.jit
def filled(x, exists, value, WHOLE: tl.constexpr):
    """Fill the columns of `x` that do not exist with `value`; if rows are WHOLE, all columns exist."""
    return x if WHOLE else tl.where(exists, x, value)


@triton.jit
def limits(values, exists, TILES: tl.constexpr, WHOLE: tl.constexpr):
    """Return the smallest and the largest value of each row; nan if the row contains one, which tl.min and
    tl.max ignore. The result of a row that does not exist is undefined."""
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
def saturated(x, most):
    """Clamp the finite numbers of `x`, fp32, to `most`."""
    return tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -most), most), x)


@triton.jit
def at_least(x):
    """Return the smallest bfloat16 not below `x`, fp32, as fp32 (see `grid`)."""
    bits = x.to(tl.int32, bitcast=True)
    upper = (tl.where(bits < 0, bits, bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(x == x, upper, x)


@triton.jit
def draws(row, column, first, second, SIZE: tl.constexpr):
    """Return the upper 8 bits (int32) of draws for values at `row` and `column` of groups of SIZE values."""
    word = column % 64 // 4
    number = row * ((SIZE + 63) // 64) + column // 64
    factor = _hashed(16 + word, first, second) | 1
    words = _hashed(word, first, second) + factor * _hashed(64 + number, first, second)
    words ^= words >> 16
    return (words >> (column % 4 * 8).to(tl.uint32) & 255).to(tl.int32)


@triton.jit
def lower_of_draws(row, first, second, SIZE: tl.constexpr):
    """Return the lower 8 bits of draws of groups at `row`, and half of one, as a part of an upper one."""
    lower = _hashed(64 + row * ((SIZE + 63) // 64), first, second) >> 24
    return (lower.to(tl.int32).to(tl.float32) + 0.5) * (1 / 256)


@triton.jit
def _hashed(number, first, second):
    bits = number.to(tl.uint32) ^ first.to(tl.uint32)
    bits = (bits ^ (bits >> 17)) * 0xED5AD4BB ^ second.to(tl.uint32)
    bits = (bits ^ (bits >> 11)) * 0xAC4C1B51
    bits = (bits ^ (bits >> 15)) * 0x31848BAB
    return bits ^ bits >> 14
