"""The k largest magnitudes of each row by exact.cpp."""

from functools import lru_cache

import torch
from torch import Tensor

from ds_compress.kernels.memory import scratch, unmade
from ds_compress.kernels.native.function import NUMBER, SIZE, Buffer, Function
from ds_compress.kernels.topk import sampling
from ds_compress.kernels.topk.keys import INFINITY

_WORD = 64

_exact = {
    dtype: Function(
        "kth_largest",
        f"exact{8 * dtype.itemsize}",
        x=Buffer((dtype,), ("rows", "d")),
        rows=SIZE,
        d=SIZE,
        words=SIZE,
        k=SIZE,
        stride=range(1, 1 << 62),
        first=range(1, 1 << 62),
        last=range(1, 1 << 62),
        infinity=NUMBER,
        space=Buffer((dtype,), ("words", _WORD)),
        packed=Buffer((torch.uint8,), ("rows", "d"), per=8),
        values=Buffer((dtype,), ("rows", "k")),
    )
    for dtype in INFINITY
}


class Plan:
    """How the k largest of each row of [rows, d] floats of one dtype are found; 0 < k <= d."""

    def __init__(self, dtype: torch.dtype, rows: int, d: int, k: int):
        stride, first, last = sampling.first_look(d, k)
        words = -(-d // _WORD)
        self.call = _exact[dtype].given(
            rows=rows,
            d=d,
            words=words,
            k=k,
            stride=stride,
            first=first,
            last=last,
            infinity=INFINITY[dtype],
        )
        self.space = (words * _WORD,)
        # what new memory is made from, see `unmade`
        self.packed = unmade((-(-rows * d // 8),), torch.uint8)
        self.values = unmade((rows * k,), dtype)


_plan = lru_cache(Plan)  # a message has the shape of the one before


def exact(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.exact`; as bits, uint8 [ceil(rows * d / 8)], and the kept entries [rows * k].
    0 < k <= d."""
    plan = _plan(x.dtype, *x.shape, k)
    packed = torch.empty_like(plan.packed)
    values = torch.empty_like(plan.values) if values is None else values
    plan.call(x.contiguous(), scratch("keys", plan.space, x.dtype), packed, values)
    return packed, values
