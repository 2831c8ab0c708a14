"""Order statistics of the keys of rows, byte by byte, highest first: a histogram of the keys that begin as
that of a rank does says how that one goes on.

Where rows are few, many programs share one: one alone would take longer than all the rest of a selection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_compress.kernels.topk.triton_keys import key_of

SPAN = 4096
"""Entries that a program looks at at a time, for histograms."""

SAMPLED = 1024
"""Entries of a sample that a program looks at at a time: they are far apart, and it waits for memory."""

PROGRAMS = 128
"""For the histogram of one row, at most."""

ENOUGH = 256
"""Ranks of all rows, from which on a program for each keeps a GPU busy."""


def order_statistics(bits: Tensor, infinity: int, stride: int, ranks: tuple[int, ...]) -> Tensor:
    """Two bounds, int32 [2, rows], from every `stride`-th entry of each row of `bits` [rows, d]: the key of
    the first rank among them, 1 for the largest; and the smallest one above that of the last rank."""
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
    """Of a program that looks at up to `length` entries: how many at a time."""
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
    """One program for each rank of a row; with one rank both bounds are round its key."""
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
    """Several programs for each rank of a row add to histograms[ROUND, rank of a row] what they see."""
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
    """As `_alone`, from the histograms of all rounds."""
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
    """The histogram of SPAN sampled keys of a row from `start` on."""
    place = start + tl.arange(0, SPAN)
    value = tl.load(entries + place.to(tl.int64) * stride, mask=place < length, other=0)
    return byte_histogram(key_of(value, INFINITY), place < length, prefix, ROUND, ROUNDS)


@triton.jit
def walk(histograms, row, rows, rank, ROUNDS: tl.constexpr):
    """The first ROUNDS bytes of the key of `rank` among the candidates, and its rank among those that begin
    so."""
    prefix = tl.zeros([], tl.int32)
    for i in tl.static_range(ROUNDS):
        counts = tl.load(histograms + (i * rows + row) * 256 + tl.arange(0, 256))
        prefix, rank = descend(counts, prefix, rank)
    return prefix, rank


@triton.jit
def descend(counts, prefix, rank):
    """`prefix` and the next byte of the key of `rank`, whose histogram is `counts`; and its rank among those
    keys."""
    byte = tl.arange(0, 256)
    reaching = tl.cumsum(counts, 0, reverse=True)
    found = tl.sum((reaching >= rank).to(tl.int32), 0) - 1
    return prefix * 256 + found, rank - tl.sum(tl.where(byte > found, counts, 0), 0)


@triton.jit
def byte_histogram(key, exists, prefix, ROUND: tl.constexpr, ROUNDS: tl.constexpr):
    """int32 [256]: the histogram of byte ROUND, counted from the highest, of the keys that begin with
    `prefix`."""
    shift: tl.constexpr = 8 * (ROUNDS - 1 - ROUND)
    if ROUND > 0:
        exists &= (key >> (shift + 8)) == prefix
    return tl.histogram((key >> shift) & 255, 256, mask=exists)
