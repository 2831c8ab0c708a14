"""Entries that both sides know: read out of a tensor, and put back."""

import torch
from torch import Tensor

from ds_compress.kernels.numerics import is_finite
from ds_compress.kernels.topk.bitstring import list_bits


def received(packed: Tensor, numel: int, count: int) -> Tensor:
    """What to hold of `packed`, uint8 [ceil(numel / 8)] in a packet, whose memory is used again; `count` of
    them are set."""
    return list_bits(packed, numel, count)


def gather(x: Tensor, held: Tensor, count: int) -> Tensor:
    """[count]: the entries of `x` that are held, or nan in their place if any entry of `x` is not finite.

    For sets that do not come from `x`: an overflow outside of them must show too.
    """
    return torch.where(is_finite(x), x.flatten().index_select(0, _indices(held, x.numel(), count)), torch.nan)


def scatter(values: Tensor, held: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Of `shape`: `values`, `count` of any float dtype, at the entries that are held, in their order; zero
    elsewhere."""
    y = values.new_zeros(shape)
    y.view(-1).index_copy_(0, _indices(held, y.numel(), values.numel()), values.reshape(-1))
    return y


def _indices(held: Tensor, numel: int, count: int) -> Tensor:
    return list_bits(held, numel, count) if held.dtype == torch.uint8 else held
