"""Entries that a bit string holds, by held.cpp."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.kernels.memory import unmade
from ds_compress.kernels.native.function import SIZE, Buffer, Call, Function
from ds_compress.kernels.topk.keys import INFINITY

_BITS = Buffer((torch.uint8,), ("n",), per=8)

_gather = {
    dtype: Function(
        "gather_scatter",
        f"gather{8 * dtype.itemsize}",
        x=Buffer((dtype,), ("n",)),
        n=range(1, 1 << 62),
        packed=_BITS,
        count=SIZE,
        out=Buffer((dtype,), ("count",)),
    )
    for dtype in INFINITY
}
_scatter = {
    dtype: Function(
        "gather_scatter",
        f"scatter{8 * dtype.itemsize}",
        values=Buffer((dtype,), ("count",)),
        count=SIZE,
        packed=_BITS,
        n=SIZE,
        y=Buffer((dtype,), ("n",)),
    )
    for dtype in INFINITY
}


class Move(NamedTuple):
    """A function, and what it writes to."""

    call: Call
    template: Tensor
    """What new memory is made from, see `unmade`."""


@lru_cache  # a message has the shape of the one before
def _gathering(dtype: torch.dtype, n: int, count: int) -> Move:
    return Move(_gather[dtype].given(n=n, count=count), unmade((count,), dtype))


@lru_cache
def scattering(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> Move:
    """What gets `count` values, bits, and memory of `shape`: it puts the values to the first entries that are
    held, in their order, and zeros elsewhere."""
    template = unmade(shape, dtype)
    return Move(_scatter[dtype].given(n=template.numel(), count=count), template)


def gather(x: Tensor, packed: Tensor, count: int) -> Tensor:
    """[count]: the first entries of `x`, floats, that are held; its first one where there are no more."""
    call, template = _gathering(x.dtype, x.numel(), count)
    out = torch.empty_like(template)
    call(x.contiguous(), packed, out)
    return out
