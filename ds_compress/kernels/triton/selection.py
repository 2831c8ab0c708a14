"""Selection on a GPU: `topk.exact` and `topk.banded` of 16- and 32-bit keys, equal to their references entry by entry.

The k-th largest key comes from histograms of its bytes, highest first: two passes over 16-bit keys, four over 32-bit
ones. One more pass counts, per block of a row, the entries that reach each bound; after a running sum of the counts,
the last one writes every kept index where it belongs. The host never waits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_compress.kernels import topk

BLOCK = 4096
"""Entries of one program; below 2^15, as two counts share an int32."""

NO_KEY = tl.constexpr(2**31 - 1)  # larger than the key of infinity

TILES = 8  # blocks that one program adds up in its histogram


def exact(size: Tensor, k: int) -> Tensor:
    """See `topk.exact`."""
    rows, d = size.shape
    if k == d or not rows or size.itemsize > 4:
        return topk.exact_reference(size, k)
    size = size.contiguous()
    rounds = size.itemsize
    block = min(BLOCK, triton.next_power_of_2(d))
    tiles = min(TILES, triton.cdiv(d, block))
    parts = triton.cdiv(d, block * tiles)
    totals = torch.zeros(rounds, rows, 256, dtype=torch.int32, device=size.device)
    bounds = torch.empty(2, rows, dtype=torch.int32, device=size.device)
    with torch.cuda.device_of(size):
        for i in range(rounds):
            _histogram[(rows * parts,)](
                size, totals, rows, d, parts, k, ROUND=i, ROUNDS=rounds, BLOCK=block, TILES=tiles
            )
        _kth_largest[(rows,)](totals, bounds, rows, k, ROUNDS=rounds)
    return compact(size, bounds, k, spread=False)


def banded(size: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Tensor:
    """See `topk.banded`."""
    rows, _ = size.shape
    if not rows or size.itemsize > 4:
        return topk.banded_reference(size, bounds, k)
    ascending = torch.empty(len(bounds), rows, dtype=torch.int32, device=size.device)
    for row, bound in zip(ascending, bounds):
        if isinstance(bound, Tensor):
            row.copy_(bound.flatten())
        else:
            row.fill_(bound)
    return compact(size.contiguous(), ascending.sort(dim=0).values, k, spread=True)


def compact(size: Tensor, bounds: Tensor, k: int, spread: bool) -> Tensor:
    """What `topk.banded` returns for `bounds`, int32 [bounds, rows], ascending; of the entries that reach equally many
    the first ones unless `spread`."""
    rows, d = size.shape
    block = min(BLOCK, triton.next_power_of_2(d))
    blocks = triton.cdiv(d, block)
    counts = torch.empty(len(bounds), rows, blocks, dtype=torch.int32, device=size.device)
    selection = torch.empty(rows * k, dtype=torch.int64, device=size.device)
    grid, shape = (rows * blocks,), {"BOUNDS": len(bounds), "BLOCK": block}
    with torch.cuda.device_of(size):
        _count[grid](size, bounds, counts, rows, d, blocks, **shape)
        reaching = counts.cumsum(2, dtype=torch.int32)
        _write[grid](size, bounds, reaching, selection, rows, d, blocks, k, SPREAD=spread, **shape)
    return selection


@triton.jit(do_not_specialize=["rows", "d", "parts", "k"])
def _histogram(
    size, totals, rows, d, parts, k,
    ROUND: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):
    """Add to totals[ROUND, row] the histogram of one byte of the keys that begin as the k-th largest does."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    start = (tl.program_id(0) % parts) * (BLOCK * TILES)
    prefix, _ = _walk(totals, row, rows, k, ROUND)
    shift: tl.constexpr = 8 * (ROUNDS - 1 - ROUND)
    counts = tl.zeros([256], tl.int32)
    for i in range(TILES):
        column = start + i * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(size + row * d + column, mask=column < d, other=0).to(tl.int32)
        candidate = column < d
        if ROUND > 0:
            candidate &= (key >> (shift + 8)) == prefix
        counts += tl.histogram((key >> shift) & 255, 256, mask=candidate)
    tl.atomic_add(totals + (ROUND * rows + row) * 256 + tl.arange(0, 256), counts, mask=counts > 0)


@triton.jit(do_not_specialize=["rows", "k"])
def _kth_largest(totals, bounds, rows, k, ROUNDS: tl.constexpr):
    """bounds[:, row] = the k-th largest key, and the next integer."""
    row = tl.program_id(0).to(tl.int64)
    key, _ = _walk(totals, row, rows, k, ROUNDS)
    tl.store(bounds + row, key)
    tl.store(bounds + rows + row, key + 1)


@triton.jit
def _walk(totals, row, rows, k, ROUNDS: tl.constexpr):
    """The first ROUNDS bytes of the k-th largest key of a row, and its rank among the keys that begin with them."""
    prefix = tl.zeros([], tl.int32)
    rank = prefix + k
    byte = tl.arange(0, 256)
    for i in tl.static_range(ROUNDS):
        counts = tl.load(totals + (i * rows + row) * 256 + byte)
        reaching = tl.cumsum(counts, 0, reverse=True)
        found = tl.sum((reaching >= rank).to(tl.int32), 0) - 1
        rank -= tl.sum(tl.where(byte > found, counts, 0), 0)
        prefix = prefix * 256 + found
    return prefix, rank


@triton.jit(do_not_specialize=["rows", "d", "blocks"])
def _count(size, bounds, counts, rows, d, blocks, BOUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """counts[i, row, block] = how many entries of the block reach bounds[i, row]."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(size + row * d + column, mask=column < d, other=0).to(tl.int32)
    for i in tl.static_range(BOUNDS):
        reached = (key >= tl.load(bounds + i * rows + row)) & (column < d)
        tl.store(counts + (i * rows + row) * blocks + block, tl.sum(reached.to(tl.int32), 0))


@triton.jit(do_not_specialize=["rows", "d", "blocks", "k"])
def _write(
    size, bounds, reaching, selection, rows, d, blocks, k,
    SPREAD: tl.constexpr, BOUNDS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write the kept indices of a block; `reaching` is the running sum of the counts over the blocks of a row.

    `level` bounds are reached by at least k entries. What reaches more of them is above and kept; what reaches exactly
    that many is tied and fills the room that is left.
    """
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    level = tl.zeros([], tl.int32)
    for i in tl.static_range(BOUNDS):
        level += (tl.load(reaching + (i * rows + row + 1) * blocks - 1) >= k).to(tl.int32)
    lower, upper = (level - 1) * rows + row, level * rows + row  # places of the bounds round the tied entries
    tied_before = tl.load(reaching + lower * blocks + block - 1, mask=(level > 0) & (block > 0), other=0)
    tied_before = tl.where(level > 0, tied_before, block * BLOCK)
    tied_total = tl.load(reaching + (lower + 1) * blocks - 1, mask=level > 0, other=0)
    tied_total = tl.where(level > 0, tied_total, d)
    above_before = tl.load(reaching + upper * blocks + block - 1, mask=(level < BOUNDS) & (block > 0), other=0)
    above_total = tl.load(reaching + (upper + 1) * blocks - 1, mask=level < BOUNDS, other=0)
    tied_before -= above_before
    tied_total -= above_total
    room = k - above_total

    column = block * BLOCK + tl.arange(0, BLOCK)
    exists = column < d
    key = tl.load(size + row * d + column, mask=exists, other=0).to(tl.int32)
    above = exists & (key >= tl.load(bounds + upper, mask=level < BOUNDS, other=NO_KEY))
    tied = exists & ~above & (key >= tl.load(bounds + lower, mask=level > 0, other=0))
    both = tl.cumsum((above.to(tl.int32) << 16) + tied.to(tl.int32), 0)
    rank = tied_before + (both & 0xFFFF)
    filled = _filled(rank, room, tied_total, SPREAD)
    kept = above | (tied & (filled > _filled(rank - 1, room, tied_total, SPREAD)))
    slot = above_before + (both >> 16) + filled - 1
    tl.store(selection + row * k + slot, row * d + column, mask=kept)


@triton.jit
def _filled(rank, room, tied, SPREAD: tl.constexpr):
    """How many of the first `rank` tied entries are kept."""
    if SPREAD:
        return rank.to(tl.int64) * room // tl.maximum(tied, 1)
    else:
        return tl.minimum(rank, room)
