"""Selection on a GPU, of 16- and 32-bit floats, equal to the reference.

Each reads the tensor twice. The first read counts, per block of a row, the entries whose key reaches each
bound; `exact` finds its bounds in the same read (`band`), but for short rows, which are read before, once for
each byte of a key. After a running sum of the counts over the blocks, the second read writes every kept entry
where it belongs and sets its bit. The host never waits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_compress.kernels import reference
from ds_compress.kernels.topk import sampling
from ds_compress.kernels.topk import triton_order_statistics as ranks
from ds_compress.kernels.topk import triton_threshold_histogram as band
from ds_compress.kernels.topk.keys import INFINITY, as_integers
from ds_compress.kernels.topk.triton_keys import key_of

BLOCK = 4096
"""Entries of one program, a multiple of 8; below 2^15, as two counts share an int32."""

WARPS = 8  # of a program; with half as many _write does not find room in the registers

LONGEST_ROW = 1 << 30
"""Longer rows, and floats of 8 bytes, are left to the reference: keys and places in a row are int32 here."""

NO_KEY = tl.constexpr(2**31 - 1)  # larger than the key of infinity


def exact(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """See `reference.exact`."""
    if not _takes(x):
        return reference.exact(x, k)
    d = x.shape[1]
    bits, infinity, block = as_integers(x), INFINITY[x.dtype], _block(d)
    stride, high, low = sampling.plan(d, k)
    with torch.cuda.device_of(x):
        if stride == 1:  # a short row is its own sample
            bounds = ranks.order_statistics(bits, infinity, 1, (k,))
            counts = _reaching(bits, bounds, infinity, block)
        else:
            bounds = ranks.order_statistics(bits, infinity, stride, (low, high))
            # the sample says nothing of keys beyond its largest and its smallest
            if low == triton.cdiv(d, stride):
                bounds[0].zero_()
            if high == 1:
                bounds[1].fill_(infinity + 1)
            bounds, counts = band.narrow(bits, bounds, infinity, k, block)
        return _chosen(x, bits, bounds, counts, k, block, spread=False, out=values)


def banded(x: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> tuple[Tensor, Tensor | None]:
    """See `reference.banded`."""
    if not _takes(x):
        return reference.banded(x, bounds, k)
    rows, d = x.shape
    bits, infinity, block = as_integers(x), INFINITY[x.dtype], _block(d)
    ascending = torch.empty(len(bounds), rows, dtype=torch.int32, device=x.device)
    for row, bound in zip(ascending, bounds):
        if isinstance(bound, Tensor):
            row.copy_(bound.flatten())
        else:
            row.fill_(bound)
    ascending = ascending.sort(dim=0).values
    with torch.cuda.device_of(x):
        counts = _reaching(bits, ascending, infinity, block)
        return _chosen(x, bits, ascending, counts, k, block, spread=True)


def sampled_band(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `reference.sampled_band`."""
    if not _takes(x):
        return reference.sampled_band(x, k)
    stride, high, low = sampling.plan(x.shape[1], k)
    with torch.cuda.device_of(x):
        at_least, above = ranks.order_statistics(as_integers(x), INFINITY[x.dtype], stride, (low, high))
    return above.unsqueeze(1) - 1, at_least.unsqueeze(1)


def _takes(x: Tensor) -> bool:
    return x.itemsize <= 4 and x.shape[1] <= LONGEST_ROW


def _block(d: int) -> int:
    return max(8, min(BLOCK, triton.next_power_of_2(d)))


def _reaching(bits: Tensor, bounds: Tensor, infinity: int, block: int) -> Tensor:
    """int32 [bounds, rows, blocks]: how many entries of each block reach each of `bounds`, int32 [bounds,
    rows]."""
    rows, d = bits.shape
    blocks = triton.cdiv(d, block)
    counts = torch.empty(len(bounds), rows, blocks, dtype=torch.int32, device=bits.device)
    _count[(rows * blocks,)](
        bits,
        bounds,
        counts,
        rows,
        d,
        blocks,
        BOUNDS=len(bounds),
        INFINITY=infinity,
        BLOCK=block,
        num_warps=WARPS,
    )
    return counts


def _chosen(
    x: Tensor,
    bits: Tensor,
    bounds: Tensor,
    counts: Tensor,
    k: int,
    block: int,
    spread: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `banded` returns for ascending bounds, its values in `out` if there is some; of the entries that
    reach equally many the first ones unless `spread`. As bits, but for rows that share a byte, two programs
    of which would have to write it together."""
    rows, d = x.shape
    if rows == 1 or d % 8 == 0:
        held = torch.empty(triton.cdiv(x.numel(), 8), dtype=torch.uint8, device=x.device)
    else:
        held = torch.empty(rows * k, dtype=torch.int64, device=x.device)
    values = torch.empty(rows * k, dtype=x.dtype, device=x.device) if out is None else out
    _write[(rows * counts.shape[2],)](
        bits,
        bounds,
        counts.cumsum(2, dtype=torch.int32),
        held,
        as_integers(values),
        rows,
        d,
        counts.shape[2],
        k,
        SPREAD=spread,
        BOUNDS=len(bounds),
        INFINITY=INFINITY[x.dtype],
        BLOCK=block,
        num_warps=WARPS,
    )
    return held, values


@triton.jit(do_not_specialize=["rows", "d", "blocks"])
def _count(
    bits, bounds, counts, rows, d, blocks, BOUNDS: tl.constexpr, INFINITY: tl.constexpr, BLOCK: tl.constexpr
):
    """counts[i, row, block] = how many entries of the block reach bounds[i, row]."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    key = key_of(tl.load(bits + row * d + column, mask=column < d, other=0), INFINITY)
    for i in tl.static_range(BOUNDS):
        reached = (key >= tl.load(bounds + i * rows + row)) & (column < d)
        tl.store(counts + (i * rows + row) * blocks + block, tl.sum(reached.to(tl.int32), 0))


@triton.jit(do_not_specialize=["rows", "d", "blocks", "k"])
def _write(
    bits,
    bounds,
    reaching,
    held,
    values,
    rows,
    d,
    blocks,
    k,
    SPREAD: tl.constexpr,
    BOUNDS: tl.constexpr,
    INFINITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the kept entries of a block to `values`, and to `held` their indices or, if it is uint8, their
    bits; `reaching` is the running sum of the counts over the blocks of a row.

    `level` bounds are reached by at least k entries. What reaches more of them is above and kept; what
    reaches exactly that many is tied and fills the room that is left.
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
    above_before = tl.load(
        reaching + upper * blocks + block - 1, mask=(level < BOUNDS) & (block > 0), other=0
    )
    above_total = tl.load(reaching + (upper + 1) * blocks - 1, mask=level < BOUNDS, other=0)
    tied_before -= above_before
    tied_total -= above_total
    room = k - above_total

    column = block * BLOCK + tl.arange(0, BLOCK)
    exists = column < d
    value = tl.load(bits + row * d + column, mask=exists, other=0)
    key = key_of(value, INFINITY)
    above = exists & (key >= tl.load(bounds + upper, mask=level < BOUNDS, other=NO_KEY))
    tied = exists & ~above & (key >= tl.load(bounds + lower, mask=level > 0, other=0))
    both = tl.cumsum((above.to(tl.int32) << 16) + tied.to(tl.int32), 0)
    rank = tied_before + (both & 0xFFFF)
    filled = _filled(rank, room, tied_total, SPREAD)
    kept = above | (tied & (filled > _filled(rank - 1, room, tied_total, SPREAD)))
    slot = row * k + above_before + (both >> 16) + filled - 1
    tl.store(values + slot, value, mask=kept)
    if held.dtype.element_ty == tl.uint8:
        byte = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
        eight = tl.reshape(kept.to(tl.int32), [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :]
        tl.store(held + row * (d // 8) + byte, tl.sum(eight, 1).to(tl.uint8), mask=byte * 8 < d)
    else:
        tl.store(held + slot, row * d + column, mask=kept)


@triton.jit
def _filled(rank, room, tied, SPREAD: tl.constexpr):
    """How many of the first `rank` tied entries are kept."""
    if SPREAD:
        return rank.to(tl.int64) * room // tl.maximum(tied, 1)
    else:
        return tl.minimum(rank, room)
