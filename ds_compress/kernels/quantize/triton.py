"""Quantization on a GPU: `reference.quantize` and `dequantize` in one kernel each, which read and write once.

A program holds some whole groups in registers, cut into `tiles`.

All results equal the reference bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_compress.kernels.memory import Parts
from ds_compress.kernels.quantize import reference
from ds_compress.kernels.quantize.bits import packed_size
from ds_compress.kernels.quantize.grid import Grid, key_halves
from ds_compress.kernels.quantize.hadamard import diagonal, largest_value
from ds_compress.kernels.quantize.triton_tiles import (
    LARGEST_LIMIT,
    SMALLEST_STEP,
    at_least,
    draws,
    fp32,
    limits,
    load_piece,
    lower_of_draws,
    places,
    rotate,
    rotate_back,
    saturated,
    store_piece,
)

__all__ = ["dequantize", "quantize"]

MAX_GROUP = 4096
"""Larger groups do not fit in the registers of one program; the reference serves them."""

VALUES = 4096  # of one program, where groups are that small

ORDINARY = tl.constexpr(2.0**64)
"""Steps and offsets up to this: no value is beyond its grid, nor was one too large for the rotation."""

LEAST_HALF = tl.constexpr(2.0**-150)
"""Half of the smallest subnormal number."""

TILE_BYTES = 64
"""Least bytes of a tile of a group, as it is read: two sectors of memory, by four threads 16 bytes each."""


def quantize(
    groups: Tensor, grid: Grid, dither: int | None = None, out: Parts | None = None, size: int | None = None
) -> Parts:
    groups = groups if size is None else groups.reshape(-1, size)
    if not len(groups) or groups.shape[1] > MAX_GROUP:
        return reference.quantize(groups, grid, dither, out)
    groups = groups.detach().contiguous()
    n, size = groups.shape
    if out is None:
        packed = groups.new_empty(n, packed_size(size, grid.bits), dtype=torch.uint8)
        out = packed, *(groups.new_empty(n, dtype=torch.bfloat16) for _ in range(2))
    programs, shape = _shape(n, size, grid, groups.itemsize)
    with torch.cuda.device_of(groups):
        _quantize[programs](
            groups,
            *key_halves(dither or 0),
            *out,
            diagonal(size, grid.key, groups.device) if grid.hadamard else None,
            n,
            TOP=grid.top,
            DITHERED=dither is not None,
            LARGEST_VALUE=largest_value(size),
            enable_fp_fusion=False,
            **shape,
        )
    return out


def dequantize(
    parts: Sequence[Tensor],
    grid: Grid,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] | None = None,
    dither: int | None = None,
) -> Tensor:
    n, size = parts[0].shape[0], parts[0].shape[1] * 8 // grid.bits
    if not n or size > MAX_GROUP:
        return reference.dequantize(parts, grid, dtype, shape, dither)
    packed, step, offset = (part.contiguous() for part in parts)
    values = torch.empty((n, size) if shape is None else shape, dtype=dtype, device=packed.device)
    programs, options = _shape(n, size, grid, values.itemsize)
    with torch.cuda.device_of(packed):
        _dequantize[programs](
            packed,
            *key_halves(dither or 0),
            step,
            offset,
            values,
            diagonal(size, grid.key, packed.device) if grid.hadamard else None,
            n,
            DITHERED=dither is not None,
            enable_fp_fusion=False,
            **options,
        )
    return values


def _shape(n: int, size: int, grid: Grid, itemsize: int) -> tuple[tuple[int], dict[str, Any]]:
    """How many programs are launched, and what the kernels are compiled for; `itemsize`: of the values."""
    tiles = 8 // (grid.bits & -grid.bits)  # the narrowest plane holds 8 / tiles bits of each code
    while tiles < 8 and size * itemsize % (2 * tiles * TILE_BYTES) == 0:
        tiles *= 2
    columns = triton.next_power_of_2(size // tiles)
    rows = max(1, VALUES // (columns * tiles))
    shape = {"ROWS": rows, "TILES": tiles, "WIDTH": size // tiles, "COLUMNS": columns, "BITS": grid.bits}
    return (triton.cdiv(n, rows),), shape


@triton.jit(do_not_specialize=["n", "first", "second"])
def _quantize(
    groups,
    first,
    second,
    packed,
    step,
    offset,
    diagonal,
    n,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    DITHERED: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
):
    """A tile of a group is WIDTH values, in COLUMNS columns.

    `diagonal` is None without a rotation; `first` and `second` are the halves of the dither's key.
    """
    row, place, exists = places(n, ROWS, WIDTH, COLUMNS)
    at = row[:, None] * (TILES * WIDTH) + place
    values = ()
    for t in tl.static_range(TILES):
        values = values + (tl.load(groups + at + t * WIDTH, mask=exists, other=0).to(tl.float32),)
    unrotated = values
    if diagonal is not None:
        values = rotate(values, diagonal, ROWS, TILES, COLUMNS)
    grid_step, start = _grids(values, exists, TILES, WIDTH, COLUMNS, TOP)
    if tl.max((grid_step + tl.abs(start) <= ORDINARY).to(tl.int32) ^ 1, 0) > 0:
        if diagonal is not None:
            cut_off = ()
            for t in tl.static_range(TILES):
                cut_off = cut_off + (saturated(unrotated[t], LARGEST_VALUE),)
            values = rotate(cut_off, diagonal, ROWS, TILES, COLUMNS)
            grid_step, start = _grids(values, exists, TILES, WIDTH, COLUMNS, TOP)
        if not DITHERED:
            outside = values
            values = ()
            for t in tl.static_range(TILES):
                within = tl.minimum(outside[t], (start + grid_step * TOP)[:, None])
                values = values + (tl.maximum(within, start[:, None]),)
    tl.store(step + row, grid_step.to(step.dtype.element_ty), mask=row < n)
    tl.store(offset + row, start.to(offset.dtype.element_ty), mask=row < n)

    inverse = tl.div_rn(fp32(1), tl.where(grid_step > 0, grid_step, 1.0))
    # of a range beyond that of fp32 the step is infinite: 0 for every finite value, never inf times 0
    first_value = tl.where(inverse > 0, start, 0.0)
    if DITHERED:
        lower = lower_of_draws(row, first, second, TILES * WIDTH)[:, None]
    codes = ()
    for t in tl.static_range(TILES):
        position = (values[t] - first_value[:, None]) * inverse[:, None]
        if DITHERED:
            within = tl.minimum(tl.where(position > 0, position, 0.0), fp32(TOP))
            draw = draws(row[:, None], place + t * WIDTH, first, second, TILES * WIDTH)
            codes = codes + (tl.minimum(((within * 256.0 + lower).to(tl.int32) + draw) >> 8, TOP),)
        else:
            # nothing to cut off: the grid covers the values, so a position is within 0 .. TOP but for its
            # rounding, which is less than what is left to TOP + 1
            codes = codes + ((position + 0.5).to(tl.int32),)
    packed += row[:, None] * (TILES * WIDTH * BITS // 8) + place
    for i in tl.static_range(4):
        if BITS & (8 >> i):
            store_piece(packed, codes, exists, BITS, 8 >> i, TILES, WIDTH)


@triton.jit
def _grids(
    values, exists, TILES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TOP: tl.constexpr
):
    """The steps of the grids of values and where these start, [ROWS]: see `minmax_scales`."""
    low, high = limits(values, exists, TILES, WIDTH == COLUMNS)
    # of zeros, +0
    low, high = saturated(low + 0.0, LARGEST_LIMIT), saturated(high + 0.0, LARGEST_LIMIT)
    start = -at_least(-low)
    width = high - start
    step = at_least(tl.div_rn(width, fp32(TOP)))
    # Triton 3.3 and 3.4 divide to 0 where the result is subnormal; from this width on it is not 0
    least = fp32((TOP + 1) * LEAST_HALF)
    return tl.where((width >= least) & (step < SMALLEST_STEP), SMALLEST_STEP, step), start


@triton.jit(do_not_specialize=["n", "first", "second"])
def _dequantize(
    packed,
    first,
    second,
    step,
    offset,
    values,
    diagonal,
    n,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    DITHERED: tl.constexpr,
):
    row, place, exists = places(n, ROWS, WIDTH, COLUMNS)
    packed += row[:, None] * (TILES * WIDTH * BITS // 8) + place
    codes = ()
    for _ in tl.static_range(TILES):
        codes = codes + (tl.zeros([ROWS, COLUMNS], tl.int32),)
    for i in tl.static_range(4):
        if BITS & (8 >> i):
            codes = load_piece(packed, codes, exists, BITS, 8 >> i, TILES, WIDTH)
    grid_step = tl.load(step + row, mask=row < n, other=0).to(tl.float32)
    start = tl.load(offset + row, mask=row < n, other=0).to(tl.float32)
    if DITHERED:
        start += (-127 - lower_of_draws(row, first, second, TILES * WIDTH)) * (1 / 256) * grid_step
    decoded = ()
    for t in tl.static_range(TILES):
        if DITHERED:
            draw = draws(row[:, None], place + t * WIDTH, first, second, TILES * WIDTH)
            value = ((codes[t] << 8) + (255 - draw)).to(tl.float32) * (1 / 256)
        else:
            value = codes[t].to(tl.float32)
        decoded = decoded + (value * grid_step[:, None] + start[:, None],)
    if diagonal is not None:
        decoded = rotate_back(decoded, diagonal, ROWS, TILES, COLUMNS)
    at = row[:, None] * (TILES * WIDTH) + place
    for t in tl.static_range(TILES):
        tl.store(values + at + t * WIDTH, decoded[t].to(values.dtype.element_ty), mask=exists)
