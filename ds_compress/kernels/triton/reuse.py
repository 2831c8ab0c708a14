"""What "indices": "reuse" does on a GPU: read entries at indices that both sides know.

Putting them back is `index_copy_` into zeros, which is already one kernel that does not wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
TILES = 8  # blocks that one program looks through


def gather(x: Tensor, selection: Tensor) -> Tensor:
    """The entries of `x`, of any float dtype and shape, at flat int64 indices [count], or nan in their place if any
    entry of `x` is not finite: an overflow outside of the selection must show too."""
    x, count = x.detach().contiguous(), selection.numel()
    overflow = torch.zeros(1, dtype=torch.int32, device=x.device)
    values = x.new_empty(count)
    with torch.cuda.device_of(x):
        if x.numel():
            _look[(triton.cdiv(x.numel(), BLOCK * TILES),)](x, overflow, x.numel(), BLOCK=BLOCK, TILES=TILES)
        if count:
            _gather[(triton.cdiv(count, BLOCK),)](x, selection.contiguous(), overflow, values, count, BLOCK=BLOCK)
    return values


@triton.jit(do_not_specialize=["numel"])
def _look(x, overflow, numel, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Set `overflow` if an entry is not finite."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
    found = tl.zeros([BLOCK], tl.int32)
    for i in range(TILES):
        place = start + i * BLOCK + tl.arange(0, BLOCK)
        value = _wide(tl.load(x + place, mask=place < numel, other=0))
        found |= (value - value != 0).to(tl.int32)  # nan for inf and nan, which is unequal to everything
    if tl.max(found, 0) > 0:
        tl.store(overflow, 1)


@triton.jit(do_not_specialize=["count"])
def _gather(x, selection, overflow, values, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(selection + place, mask=place < count, other=0)
    value = _wide(tl.load(x + index, mask=place < count, other=0))
    value = tl.where(tl.load(overflow) > 0, float("nan"), value)
    tl.store(values + place, value.to(values.dtype.element_ty), mask=place < count)


@triton.jit
def _wide(value):
    """`value` in at least fp32, which has every arithmetic operation."""
    if value.dtype.primitive_bitwidth < 32:
        value = value.to(tl.float32)
    return value
