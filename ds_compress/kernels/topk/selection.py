"""Which entries of a tensor are kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_compress.kernels.dispatch import kernels


@dataclass(eq=False)
class Selection:
    """`count` of the `numel` entries of a flat tensor, in the order in which their values travel.

    Held as indices or as bits, whichever was made first; the other is made when asked for, and not kept.
    """

    numel: int
    count: int

    held: Tensor
    """int64 [count]: flat indices; or uint8 [ceil(numel / 8)]: bits (see `reference.bitstring`), where those
    are ascending."""

    values: Tensor | None = None
    """[count]: the kept entries, where the kernel that selected them wrote them too; None after `take`."""

    @classmethod
    def at(cls, indices: Tensor, numel: int) -> "Selection":
        """That of flat indices, int64 [count]; coders need them distinct and ascending, `gather` and
        `scatter` not."""
        return cls(numel, indices.numel(), indices)

    @classmethod
    def received(cls, bits: Tensor, numel: int, count: int) -> "Selection":
        """That of bits in a packet, whose memory is used again."""
        return cls(numel, count, kernels(bits.device).received(bits, numel, count))

    @classmethod
    def joined(cls, selections: Sequence["Selection"]) -> "Selection":
        """The entries of all of them, one after the other; one that is in several stands there several
        times."""
        return cls.at(torch.cat([each.indices for each in selections]), selections[0].numel)

    @property
    def packed(self) -> bool:
        """Whether bits are held, so that nothing has to be made of indices."""
        return self.held.dtype == torch.uint8

    @property
    def indices(self) -> Tensor:
        held = self.held
        return kernels(held.device).list_bits(held, self.numel, self.count) if self.packed else held

    @property
    def bits(self) -> Tensor:
        held = self.held
        return held if self.packed else kernels(held.device).set_bits(held, self.numel)

    def gather(self, x: Tensor) -> Tensor:
        """[count]: the kept entries of `x`."""
        return x.flatten().index_select(0, self.indices)

    def take(self, x: Tensor) -> Tensor:
        """`gather` for the tensor that the selection was made from. Values that came with it go to the
        caller, so that a stash keeps the selection without them."""
        values, self.values = self.values, None
        return self.gather(x) if values is None else values

    def scatter(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Of `shape`: `values`, `count` of them, at the kept entries, zero elsewhere."""
        return kernels(values.device).scatter(values, self.held, shape)
