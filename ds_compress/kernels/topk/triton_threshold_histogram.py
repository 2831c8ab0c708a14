"""The k-th largest key of each row of a long tensor, which is read once for it.

    ranks.py            a sample of the row gives two keys, a band in which the k-th largest almost surely is
    _candidates         the read: per block counts what is above the band, and copies what is inside, some
                        percent of the row, to a scratch buffer as large as the tensor, where those of a row
                        stand side by side
    _histogram          byte by byte, highest first, over the candidates: once for each byte of a key
    _tally              per block counts the candidates that are above the k-th largest, and those that are it

Where the band of a row misses, which data can force that knows the stride, all its entries are candidates:
the last two kernels then read them where they are, in the tensor. What they do follows from counts on the
device; the host does not learn of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_compress.kernels.topk.triton_keys import key_of
from ds_compress.kernels.topk.triton_order_statistics import PROGRAMS, byte_histogram, span_of, walk

TILES = 8  # blocks that a program tallies: each program reads the histograms of its row
CHUNK = 256  # candidates of a block that are looked at at a time: a block seldom has more


def narrow(bits: Tensor, bounds: Tensor, infinity: int, k: int, block: int) -> tuple[Tensor, Tensor]:
    """From the bounds of a band to those of the k-th largest key alone, int32 [2, rows], and how many entries
    of each block of a row reach them, int32 [2, rows, blocks]."""
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
    """found[row] = the entries of the row in its band, those of a block side by side.

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
    """cut[:, row] = the k-th largest key and the next integer; counts[:, row, block] = how many entries reach
    them."""
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
    """Whether the k-th largest key of a row is in its band, and its rank among the candidates."""
    above, inside = tl.load(totals + row), tl.load(totals + rows + row)
    bracketed = (above < k) & (above + inside >= k)
    return bracketed, tl.where(bracketed, k - above, k)
