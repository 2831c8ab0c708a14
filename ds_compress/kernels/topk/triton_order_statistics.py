"""Order statistics of the keys of rows on a GPU, byte by byte, the highest byte first.

A histogram of the keys that begin as that of a rank does says which byte comes next. If rows are few, several
programs share one: one program alone would take longer than the rest of a selection.

`kth_largest` reads a long tensor once:

    order_statistics    two keys from a sample of the row, between which the k-th largest almost surely lies
    _candidates         the read: per block counts the entries above the band, and copies those inside (some
                        percent of the row) to a buffer as large as the tensor, contiguous for each row
    _histogram          over the candidates, once for each byte of a key
    _tally              per block counts the candidates above the k-th largest, and those equal to it

If the k-th largest of a row is not in its band, which data can force that knows the stride, all entries of
the row are candidates: the last two kernels then read them from the tensor. The device decides; the host does
not wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SPAN = 4096
"""Entries that a program looks at at a time, for histograms."""

SAMPLED = 1024
"""Entries of a sample that a program looks at at a time: they are far apart, and it waits for memory."""

PROGRAMS = 128
"""For the histogram of one row, at most."""

ENOUGH = 256
"""Ranks of all rows, from which on a program for each keeps a GPU busy."""

TILES = 8  # blocks that a program tallies: each program reads the histograms of its row
CHUNK = 256  # candidates of a block that are looked at at a time: a block seldom has more


def order_statistics(bits: Tensor, infinity: int, stride: int, ranks: tuple[int, ...]) -> Tensor:
    """Return a band of keys for each row, from a sample of its entries.

    Args:
        bits: [rows, d], the bits of floats as integers.
        infinity: key of inf; larger keys count as it.
        stride: every `stride`-th entry is in the sample.
        ranks: one or two ranks in the sample; 1 is the largest key.

    Returns:
        int32 [2, rows]: the key of the first rank, and the key of the last rank plus 1.
    """
    rows, d = bits.shape
    length, each = triton.cdiv(d, stride), rows * len(ranks)
    bounds = torch.empty(2, rows, dtype=torch.int32, device=bits.device)
    shape = (rows, d, stride, length)
    numbers = {"RANKS": len(ranks), "ROUNDS": bits.itemsize}
    if each >= ENOUGH or length <= SAMPLED:
        _alone[(each,)](
            bits, bounds, *shape, ranks[0], ranks[-1], INFINITY=infinity, SPAN=span_of(length), **numbers
        )
        return bounds
    span = min(SAMPLED, span_of(length))
    programs = min(PROGRAMS, triton.cdiv(length, span))
    histograms = torch.zeros(bits.itemsize * each * 256, dtype=torch.int32, device=bits.device)
    for i in range(bits.itemsize):
        _together[(each * programs,)](
            bits,
            histograms,
            *shape,
            programs,
            ranks[0],
            ranks[-1],
            ROUND=i,
            INFINITY=infinity,
            SPAN=span,
            **numbers,
        )
    _bounds[(each,)](histograms, bounds, rows, ranks[0], ranks[-1], **numbers)
    return bounds


def span_of(length: int) -> int:
    """Return how many entries a program reads at a time, if it reads up to `length`."""
    return min(SPAN, max(256, triton.next_power_of_2(length)))


@triton.jit(do_not_specialize=["rows", "d", "stride", "length", "first", "last"])
def _alone(
    bits,
    bounds,
    rows,
    d,
    stride,
    length,
    first,
    last,
    RANKS: tl.constexpr,
    ROUNDS: tl.constexpr,
    INFINITY: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Store the bounds of a row: one program for each of its ranks reads the whole sample."""
    row = (tl.program_id(0) // RANKS).to(tl.int64)
    number = tl.program_id(0) % RANKS
    prefix = tl.zeros([], tl.int32)
    rank = tl.where(number == 0, first, last)
    for i in tl.static_range(ROUNDS):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, length, SPAN):
            counts += _sampled(bits + row * d, start, stride, length, prefix, i, ROUNDS, INFINITY, SPAN)
        prefix, rank = descend(counts, prefix, rank)
    tl.store(bounds + row, prefix, mask=number == 0)
    tl.store(bounds + rows + row, prefix + 1, mask=number == RANKS - 1)


@triton.jit(do_not_specialize=["rows", "d", "stride", "length", "programs", "first", "last"])
def _together(
    bits,
    histograms,
    rows,
    d,
    stride,
    length,
    programs,
    first,
    last,
    RANKS: tl.constexpr,
    ROUND: tl.constexpr,
    ROUNDS: tl.constexpr,
    INFINITY: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Add part of a row's sample to histograms[ROUND, rank of a row]; several programs share a rank."""
    place, part = tl.program_id(0) // programs, tl.program_id(0) % programs
    row, each = (place // RANKS).to(tl.int64), rows * RANKS
    prefix, _ = walk(histograms, place, each, tl.where(place % RANKS == 0, first, last), ROUND)
    counts = tl.zeros([256], tl.int32)
    for start in range(part * SPAN, length, programs * SPAN):
        counts += _sampled(bits + row * d, start, stride, length, prefix, ROUND, ROUNDS, INFINITY, SPAN)
    tl.atomic_add(
        histograms + (ROUND * each + place) * 256 + tl.arange(0, 256), counts, mask=counts > 0, sem="relaxed"
    )


@triton.jit(do_not_specialize=["rows", "first", "last"])
def _bounds(histograms, bounds, rows, first, last, RANKS: tl.constexpr, ROUNDS: tl.constexpr):
    """Store the bounds of a row, from the histograms of all rounds."""
    row, number = tl.program_id(0) // RANKS, tl.program_id(0) % RANKS
    rank = tl.where(number == 0, first, last)
    key, _ = walk(histograms, tl.program_id(0), rows * RANKS, rank, ROUNDS)
    tl.store(bounds + row, key, mask=number == 0)
    tl.store(bounds + rows + row, key + 1, mask=number == RANKS - 1)


@triton.jit
def _sampled(
    entries,
    start,
    stride,
    length,
    prefix,
    ROUND: tl.constexpr,
    ROUNDS: tl.constexpr,
    INFINITY: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Return the histogram of one byte of SPAN sampled keys of a row, from `start` on."""
    place = start + tl.arange(0, SPAN)
    value = tl.load(entries + place.to(tl.int64) * stride, mask=place < length, other=0)
    return byte_histogram(key_of(value, INFINITY), place < length, prefix, ROUND, ROUNDS)


@triton.jit
def walk(histograms, row, rows, rank, ROUNDS: tl.constexpr):
    """Return the first ROUNDS bytes of the key of `rank`, and its rank among keys with the same bytes."""
    prefix = tl.zeros([], tl.int32)
    for i in tl.static_range(ROUNDS):
        counts = tl.load(histograms + (i * rows + row) * 256 + tl.arange(0, 256))
        prefix, rank = descend(counts, prefix, rank)
    return prefix, rank


@triton.jit
def descend(counts, prefix, rank):
    """Return `prefix` with the next byte of the key of `rank`, and its rank among keys that begin so.

    Args:
        counts: histogram of that byte over the keys that begin with `prefix`.
    """
    byte = tl.arange(0, 256)
    reaching = tl.cumsum(counts, 0, reverse=True)
    found = tl.sum((reaching >= rank).to(tl.int32), 0) - 1
    return prefix * 256 + found, rank - tl.sum(tl.where(byte > found, counts, 0), 0)


@triton.jit
def byte_histogram(key, exists, prefix, ROUND: tl.constexpr, ROUNDS: tl.constexpr):
    """Return the histogram, int32 [256], of byte ROUND of the keys that begin with `prefix`; 0 is the highest
    byte."""
    shift: tl.constexpr = 8 * (ROUNDS - 1 - ROUND)
    if ROUND > 0:
        exists &= (key >> (shift + 8)) == prefix
    return tl.histogram((key >> shift) & 255, 256, mask=exists)


def kth_largest(bits: Tensor, bounds: Tensor, infinity: int, k: int, block: int) -> tuple[Tensor, Tensor]:
    """Narrow a band of each row to its k-th largest key.

    Args:
        bits: [rows, d], the bits of floats as integers.
        bounds: int32 [2, rows], of the band; the key may lie outside it, which costs a search of the row.
        infinity: key of inf; larger keys count as it.
        block: entries of a block.

    Returns:
        The key and the key plus 1, int32 [2, rows]; and how many entries of each block are at least as large,
        int32 [2, rows, blocks].
    """
    rows, d = bits.shape
    blocks, span = triton.cdiv(d, block), span_of(d)
    programs = min(PROGRAMS, triton.cdiv(d, span))
    found = torch.empty_like(bits)
    layout = torch.empty(3, rows, blocks, dtype=torch.int32, device=bits.device)
    zeros = torch.zeros(2 * rows + bits.itemsize * rows * 256, dtype=torch.int32, device=bits.device)
    totals, histograms = zeros[: 2 * rows], zeros[2 * rows :]
    cut, counts = torch.empty_like(bounds), torch.empty_like(layout[:2])
    numbers = {"INFINITY": infinity, "ROUNDS": bits.itemsize}
    _candidates[(rows * blocks,)](
        bits, bounds, found, layout, totals, rows, d, blocks, INFINITY=infinity, BLOCK=block
    )
    for i in range(bits.itemsize):
        _histogram[(rows * programs,)](
            bits, found, totals, histograms, rows, d, programs, k, ROUND=i, SPAN=span, **numbers
        )
    programs = triton.cdiv(blocks, TILES)
    _tally[(rows * programs,)](
        bits,
        found,
        layout,
        totals,
        histograms,
        cut,
        counts,
        rows,
        d,
        blocks,
        programs,
        k,
        BLOCK=block,
        TILES=TILES,
        CHUNK=min(CHUNK, block),
        **numbers,
    )
    return cut, counts


@triton.jit(do_not_specialize=["rows", "d", "blocks"])
def _candidates(
    bits, bounds, found, layout, totals, rows, d, blocks, INFINITY: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the entries of a row that are in its band to found[row], those of a block side by side.

    layout[:, row, block] = how many entries of a block are above the band, how many inside, where those begin
    totals[:, row]        = how many entries of the row are above its band, and how many inside
    """
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    exists = column < d
    value = tl.load(bits + row * d + column, mask=exists, other=0)
    key, upper = key_of(value, INFINITY), tl.load(bounds + rows + row)
    inside = exists & (key >= tl.load(bounds + row)) & (key < upper)
    above_count = tl.sum((exists & (key >= upper)).to(tl.int32), 0)
    inside_count = tl.sum(inside.to(tl.int32), 0)
    tl.atomic_add(totals + row, above_count, sem="relaxed")
    start = tl.atomic_add(totals + rows + row, inside_count, sem="relaxed")
    slot = start + tl.cumsum(inside.to(tl.int32), 0) - 1
    tl.store(found + row * d + slot, value, mask=inside)
    place = row * blocks + block
    tl.store(layout + place, above_count)
    tl.store(layout + rows * blocks + place, inside_count)
    tl.store(layout + 2 * rows * blocks + place, start)


@triton.jit(do_not_specialize=["rows", "d", "programs", "k"])
def _histogram(
    bits,
    found,
    totals,
    histograms,
    rows,
    d,
    programs,
    k,
    ROUND: tl.constexpr,
    ROUNDS: tl.constexpr,
    INFINITY: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Add to histograms[ROUND, row] that of one byte of the candidates that begin as the k-th largest key
    does."""
    row, number = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    bracketed, rank = _bracketed(totals, row, rows, k)
    source, length = bits + row * d, d
    if bracketed:
        source, length = found + row * d, tl.load(totals + rows + row)
    prefix, rank = walk(histograms, row, rows, rank, ROUND)
    counts = tl.zeros([256], tl.int32)
    for start in range(number * SPAN, length, programs * SPAN):
        place = start + tl.arange(0, SPAN)
        key = key_of(tl.load(source + place, mask=place < length, other=0), INFINITY)
        counts += byte_histogram(key, place < length, prefix, ROUND, ROUNDS)
    tl.atomic_add(
        histograms + (ROUND * rows + row) * 256 + tl.arange(0, 256), counts, mask=counts > 0, sem="relaxed"
    )


@triton.jit(do_not_specialize=["rows", "d", "blocks", "programs", "k"])
def _tally(
    bits,
    found,
    layout,
    totals,
    histograms,
    cut,
    counts,
    rows,
    d,
    blocks,
    programs,
    k,
    ROUNDS: tl.constexpr,
    INFINITY: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store the k-th largest key of a row, and that plus 1, in cut[:, row].

    counts[:, row, block] = how many entries of the block are at least as large as each of the two
    """
    row, first = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs * TILES
    bracketed, rank = _bracketed(totals, row, rows, k)
    key, rank = walk(histograms, row, rows, rank, ROUNDS)
    for block in range(first, tl.minimum(first + TILES, blocks)):
        place = row * blocks + block
        source, above, start = bits + row * d, tl.zeros([], tl.int32), block * BLOCK
        length = tl.minimum(BLOCK, d - start)
        if bracketed:
            source, above = found + row * d, tl.load(layout + place)
            length, start = (
                tl.load(layout + rows * blocks + place),
                tl.load(layout + 2 * rows * blocks + place),
            )
        larger, equal = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
        for offset in range(0, length, CHUNK):
            number = offset + tl.arange(0, CHUNK)
            exists = number < length
            candidate = key_of(tl.load(source + start + number, mask=exists, other=0), INFINITY)
            larger += (exists & (candidate > key)).to(tl.int32)
            equal += (exists & (candidate == key)).to(tl.int32)
        above += tl.sum(larger, 0)
        tl.store(counts + place, above + tl.sum(equal, 0))
        tl.store(counts + rows * blocks + place, above)
    tl.store(cut + row, key, mask=first == 0)
    tl.store(cut + rows + row, key + 1, mask=first == 0)


@triton.jit
def _bracketed(totals, row, rows, k):
    """Return whether the k-th largest key of a row is in its band, and its rank among the candidates."""
    above, inside = tl.load(totals + row), tl.load(totals + rows + row)
    bracketed = (above < k) & (above + inside >= k)
    return bracketed, tl.where(bracketed, k - above, k)


@triton.jit
def key_of(bits, INFINITY: tl.constexpr):
    """Return keys, int32, that order floats by magnitude; `bits` are theirs, as 16-bit or 32-bit integers."""
    if bits.dtype.primitive_bitwidth == 16:
        key = bits.to(tl.int32) & 0x7FFF
    else:
        key = bits & 0x7FFFFFFF
    return tl.minimum(key, INFINITY)
