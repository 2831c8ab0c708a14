"""The k largest magnitudes of each row by exact.cpp."""

import torch
from torch import Tensor

from ds_compress.kernels.keys import INFINITY, as_integers
from ds_compress.kernels.memory import scratch
from ds_compress.kernels.native.function import INTEGERS, NUMBER, SIZE, Buffer, Function

_exact = {
    dtype: Function(
        "exact",
        f"exact{bits}",
        x=Buffer((dtype,), ("rows", "d")),
        rows=SIZE,
        d=SIZE,
        k=SIZE,
        stride=range(1, 1 << 62),
        first=range(1, 1 << 62),
        last=range(1, 1 << 62),
        infinity=NUMBER,
        keys=Buffer((dtype,), ("d",)),
        packed=Buffer((torch.uint8,), ("rows", "d"), per=8),
        values=Buffer((dtype,), ("rows", "k")),
    )
    for bits, dtype in INTEGERS.items()
}


def exact(x: Tensor, k: int, sample: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """See `reference.exact`: as bits, uint8 [ceil(rows * d / 8)], and the kept entries [rows * k].

    Args:
        sample: as `sampling.first_look` has it; of a stride of 1 nothing is looked at first. 0 < k <= d.
    """
    (rows, d), bits = x.shape, as_integers(x.detach())
    stride, first, last = sample
    packed = torch.zeros(-(-rows * d // 8), dtype=torch.uint8, device="cpu")
    values = torch.empty(rows * k, dtype=x.dtype, device="cpu")
    _exact[bits.dtype](
        x=bits,
        rows=rows,
        d=d,
        k=k,
        stride=stride,
        first=first,
        last=last,
        infinity=INFINITY[x.dtype],
        keys=scratch("keys", (d,), bits.dtype),
        packed=packed,
        values=values.view(bits.dtype),
    )
    return packed, values
