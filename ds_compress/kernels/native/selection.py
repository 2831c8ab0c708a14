"""Entries that reach a bound, and bit strings, by selection.cpp."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_compress.kernels.memory import scratch
from ds_compress.kernels.native import call


def set_bits(indices: Tensor, numel: int) -> Tensor:
    """uint8 [ceil(numel / 8)] in which the bits `indices`, int64 [count], are set."""
    packed = torch.zeros(-(-numel // 8), dtype=torch.uint8, device="cpu")
    call("selection", "set_bits", indices, indices.numel(), packed)
    return packed


def list_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    """int64 [count]: which of the first `numel` bits of `packed` are set, ascending; 0 where there are no
    more."""
    found = torch.zeros(count, dtype=torch.int64, device="cpu")
    call("selection", "list_bits", packed.contiguous(), numel, count, found)
    return found


@dataclass
class Candidates:
    """Entries of the rows of a tensor that reach a bound, in memory that the next ones of this thread take
    over."""

    found: Tensor
    """Flat indices, int64, ascending."""

    keys: Tensor
    """Their keys (see `topk.keys`)."""

    counts: Tensor
    """int64 [rows]: how many there are of each row."""

    @classmethod
    def reaching(cls, bits: Tensor, bounds: Tensor, infinity: int) -> "Candidates":
        """Those of `bits`, floats as integers, [rows, d], whose key reaches `bounds` [rows]."""
        found, keys = (
            scratch("found", (bits.numel(),), torch.int64),
            scratch("keys", (bits.numel(),), bits.dtype),
        )
        counts = torch.empty(len(bits), dtype=torch.int64, device="cpu")
        name = f"reaching{8 * bits.itemsize}"
        total = call(
            "selection", name, bits, *bits.shape, bounds.long().contiguous(), infinity, found, keys, counts
        )
        return cls(found[:total], keys[:total], counts)

    def pick(self, low: Tensor, high: Tensor, k: int, spread: bool) -> Tensor | None:
        """Flat indices of those that reach `high` [rows] and as many between `low` and it as make k for each
        row: the first ones, or evenly spaced ones. None if some row has fewer than k or more than k that
        reach `high`."""
        chosen = torch.empty(len(self.counts) * k, dtype=torch.int64, device="cpu")
        bounds = low.long().contiguous(), high.long().contiguous()
        rows = self.found, self.keys, len(self.counts), self.counts
        found = call("selection", f"pick{8 * self.keys.itemsize}", *rows, *bounds, k, spread, chosen)
        return chosen if found else None
