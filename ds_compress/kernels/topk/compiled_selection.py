"""Entries that reach a bound, and bit strings, by selection.cpp."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ds_compress.kernels.memory import scratch, unmade
from ds_compress.kernels.native.function import INTEGERS, NUMBER, SIZE, Buffer, Call, Function

_ROWS = Buffer((torch.int64,), ("rows",))
_set_bits = Function(
    "selection",
    "set_bits",
    indices=Buffer((torch.int64,), ("count",)),
    count=SIZE,
    packed=Buffer((torch.uint8,), ("n",), per=8),
    n=SIZE,
)
_list_bits = Function(
    "selection",
    "list_bits",
    packed=Buffer((torch.uint8,), ("n",), per=8),
    n=SIZE,
    most=SIZE,
    found=Buffer((torch.int64,), ("most",)),
)
_reaching = {
    dtype: Function(
        "selection",
        f"reaching{bits}",
        x=Buffer((dtype,), ("rows", "d")),
        rows=SIZE,
        d=SIZE,
        bounds=_ROWS,
        infinity=NUMBER,
        found=Buffer((torch.int64,), ("rows", "d")),
        keys=Buffer((dtype,), ("rows", "d")),
        counts=_ROWS,
    )
    for bits, dtype in INTEGERS.items()
}
_pick = {
    dtype: Function(
        "selection",
        f"pick{bits}",
        found=Buffer((torch.int64,), ("total",)),
        keys=Buffer((dtype,), ("total",)),
        total=SIZE,
        rows=SIZE,
        counts=_ROWS,
        lows=_ROWS,
        highs=_ROWS,
        k=SIZE,
        out=Buffer((torch.int64,), ("rows", "k")),
    )
    for bits, dtype in INTEGERS.items()
}


@lru_cache  # a message has the shape of the one before
def _listing(numel: int, count: int) -> tuple[Call, Tensor]:
    """What lists bits, and what the memory for their places is made from, see `unmade`."""
    return _list_bits.given(n=numel, most=count), unmade((count,), torch.int64)


def set_bits(indices: Tensor, numel: int) -> Tensor:
    """uint8 [ceil(numel / 8)] in which the bits `indices`, int64 [count], are set.

    Raises:
        IndexError: an index that is none of an entry.
    """
    packed = torch.zeros(-(-numel // 8), dtype=torch.uint8, device="cpu")
    done = _set_bits(indices=indices.contiguous(), count=indices.numel(), packed=packed, n=numel)
    if done < indices.numel():
        raise IndexError(f"index {indices[done]} came, of {numel} entries")
    return packed


def list_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    """int64 [count]: which of the first `numel` bits of `packed` are set, ascending; 0 where there are no
    more."""
    call, template = _listing(numel, count)
    found = torch.empty_like(template)
    call(packed.contiguous(), found)
    return found


@dataclass
class Candidates:
    """Entries of the rows of a tensor that reach a bound, in memory that the next ones of this thread take
    over."""

    found: Tensor
    """Flat indices, int64, ascending."""

    keys: Tensor
    """Their keys (see `keys`)."""

    counts: Tensor
    """int64 [rows]: how many there are of each row."""

    @classmethod
    def reaching(cls, bits: Tensor, bounds: Tensor, infinity: int) -> "Candidates":
        """Those of `bits`, floats as integers, [rows, d], whose key reaches `bounds` [rows]."""
        rows, d = bits.shape
        found, keys = scratch("found", (rows * d,), torch.int64), scratch("keys", (rows * d,), bits.dtype)
        counts = torch.empty(rows, dtype=torch.int64, device="cpu")
        total = _reaching[bits.dtype](
            x=bits,
            rows=rows,
            d=d,
            bounds=bounds.long().contiguous(),
            infinity=infinity,
            found=found,
            keys=keys,
            counts=counts,
        )
        return cls(found[:total], keys[:total], counts)

    def pick(self, low: Tensor, high: Tensor, k: int) -> Tensor | None:
        """Flat indices of those that reach `high` [rows] and as many between `low` and it as make k for each
        row, evenly spaced. None if some row has fewer than k or more than k that
        reach `high`."""
        rows = len(self.counts)
        chosen = torch.empty(rows * k, dtype=torch.int64, device="cpu")
        found = _pick[self.keys.dtype](
            found=self.found,
            keys=self.keys,
            total=len(self.found),
            rows=rows,
            counts=self.counts,
            lows=low.long().contiguous(),
            highs=high.long().contiguous(),
            k=k,
            out=chosen,
        )
        return chosen if found else None
