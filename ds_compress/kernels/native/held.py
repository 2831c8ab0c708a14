"""Entries that a bit string holds, by held.cpp."""

import torch
from torch import Tensor

from ds_compress.kernels.keys import as_integers
from ds_compress.kernels.native.function import INTEGERS, SIZE, Buffer, Function

_BITS = Buffer((torch.uint8,), ("n",), per=8)

_gather = {
    dtype: Function(
        "held",
        f"gather{bits}",
        x=Buffer((dtype,), ("n",)),
        n=range(1, 1 << 62),
        packed=_BITS,
        count=SIZE,
        out=Buffer((dtype,), ("count",)),
    )
    for bits, dtype in INTEGERS.items()
}
_scatter = {
    dtype: Function(
        "held",
        f"scatter{bits}",
        values=Buffer((dtype,), ("count",)),
        count=SIZE,
        packed=_BITS,
        n=SIZE,
        y=Buffer((dtype,), ("n",)),
    )
    for bits, dtype in INTEGERS.items()
}


def gather(x: Tensor, packed: Tensor, count: int) -> Tensor:
    """[count]: the first entries of `x`, floats, that are held; its first one where there are no more."""
    bits = as_integers(x.detach())
    out = torch.empty(count, dtype=x.dtype, device="cpu")
    _gather[bits.dtype](
        x=bits, n=x.numel(), packed=packed.contiguous(), count=count, out=out.view(bits.dtype)
    )
    return out


def scatter(values: Tensor, packed: Tensor, numel: int) -> Tensor:
    """[numel]: `values`, floats, [count], at the first entries that are held, in their order; zero
    elsewhere."""
    bits = as_integers(values.detach())
    y = torch.empty(numel, dtype=values.dtype, device="cpu")
    _scatter[bits.dtype](
        values=bits, count=values.numel(), packed=packed.contiguous(), n=numel, y=y.view(bits.dtype)
    )
    return y
