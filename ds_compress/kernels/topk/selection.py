"""Which entries of a tensor are kept: the selection, and how it is made."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_compress.kernels.backends import kernels
from ds_compress.kernels.topk.reference import as_mask


@dataclass(eq=False)
class Selection:
    """`count` of the `numel` entries of a flat tensor, in the order in which their values travel.

    Stored as indices or as bits, whichever was made first. The other is made when needed and not stored.
    """

    numel: int
    count: int

    entries: Tensor
    """int64 [count]: flat indices; or uint8 [ceil(numel / 8)]: bits, of ascending entries (see
    `reference`)."""

    values: Tensor | None = None
    """[count]: the kept entries, if they were selected by magnitude; None after `take`."""

    @classmethod
    def at(cls, indices: Tensor, numel: int) -> "Selection":
        """Return the selection of flat indices, int64 [count]. Coders need them distinct and ascending;
        `gather` and `scatter` do not."""
        return cls(numel, indices.numel(), indices)

    @classmethod
    def from_packet(cls, bits: Tensor, numel: int, count: int) -> "Selection":
        """Return the selection of bits in a packet, whose memory will be used again."""
        entries = bits.clone() if bits.is_cpu else kernels(bits.device).list_bits(bits, numel, count)
        return cls(numel, count, entries)

    @classmethod
    def joined(cls, selections: Sequence["Selection"]) -> "Selection":
        """Return the entries of all `selections`, one selection after the other. Entries may repeat."""
        return cls.at(torch.cat([each.indices for each in selections]), selections[0].numel)

    @property
    def is_packed(self) -> bool:
        """Whether the entries are stored as bits."""
        return self.entries.dtype == torch.uint8

    @property
    def indices(self) -> Tensor:
        if not self.is_packed:
            return self.entries
        return kernels(self.entries.device).list_bits(self.entries, self.numel, self.count)

    @property
    def bits(self) -> Tensor:
        if self.is_packed:
            return self.entries
        return kernels(self.entries.device).pack_bits(as_mask(self.entries, self.numel))

    def gather(self, x: Tensor) -> Tensor:
        """Return the kept entries of `x`, [count]."""
        return x.flatten().index_select(0, self.indices)

    def take(self, x: Tensor) -> Tensor:
        """Return `gather` of the tensor that the selection was made from, and drop the stored values, so that
        the stash of a message does not keep them."""
        values, self.values = self.values, None
        return self.gather(x) if values is None else values

    def scatter(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of `shape` with `values`, [count], at the kept entries and zeros elsewhere."""
        return kernels(values.device).scatter(values, self.entries, shape)


def largest(x: Tensor, k: int, values: Tensor | None = None) -> Selection:
    """Select the k entries of each row of `x` [rows, d] with the largest keys; of equal keys the lowest
    index.

    Args:
        values: see `select_largest` in reference.py.
    """
    rows, d = x.shape
    if k == d or not rows:
        return Selection.at(torch.arange(x.numel(), dtype=torch.int64, device=x.device), x.numel())
    return Selection(x.numel(), rows * k, *kernels(x.device).select_largest(x, k, values))
