"""Selection of the largest magnitudes, bit strings, gather and scatter in PyTorch: the specification.

A set of entries of a flat tensor is stored as int64 indices or as bits: bit j of byte i belongs to entry 8 *
i + j, and unused bits are zero. `entries` is one of the two.

Magnitudes are compared by their `keys`: the bits of a float without its sign grow with its magnitude. So one
set of functions serves all dtypes, and nan is no special case.
"""

import math

import torch
from torch import Tensor

from ds_compress.kernels.numerics import is_finite

__all__ = ["gather", "list_bits", "pack_bits", "scatter", "select_largest", "unpack_bits"]

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}

INFINITY: dict[torch.dtype, int] = {
    dtype: int(torch.tensor(math.inf, dtype=dtype, device="cpu").view(_INTEGER[dtype.itemsize]).item())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""The key of infinity; no key is larger."""


def keys(x: Tensor) -> Tensor:
    """Return integers of the size of x's elements that order as |x| does; nan has the key of infinity."""
    bits = as_integers(x)
    return (bits & torch.iinfo(bits.dtype).max).clamp_(max=INFINITY[x.dtype])


def as_integers(x: Tensor) -> Tensor:
    """Return the bits of x's elements as signed integers of their size."""
    return x.contiguous().view(_INTEGER[x.element_size()])


def pack_bits(bits: Tensor) -> Tensor:
    """Return bools [n] as uint8 [ceil(n / 8)]."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.uint8).view(-1, 8)
    return (padded << torch.arange(8, device=bits.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Return the first `numel` bits of uint8 [m] as bools."""
    bits = packed.unsqueeze(1) >> torch.arange(8, device=packed.device, dtype=torch.uint8)
    return (bits & 1).bool().flatten()[:numel]


def list_bits(packed: Tensor, numel: int, count: int) -> Tensor:
    """Return the ascending int64 indices of the `count` bits that are set among the first `numel` of
    `packed`."""
    return positions(unpack_bits(packed, numel), count)


def as_mask(indices: Tensor, numel: int) -> Tensor:
    """Return bools [numel], true at `indices`, int64 [count]."""
    mask = torch.zeros(numel, dtype=torch.bool, device=indices.device)
    return mask.scatter_(0, indices, True)


def positions(mask: Tensor, count: int) -> Tensor:
    """Return the ascending int64 indices of the `count` true entries of `mask` [n].

    Unlike `nonzero` it does not make the host wait for the data; entries beyond `count` are left out.
    """
    slot = torch.where(mask, mask.cumsum(0) - 1, count).clamp_(max=count)
    found = torch.zeros(count + 1, dtype=torch.int64, device=mask.device)
    return found.scatter_(0, slot, torch.arange(mask.numel(), dtype=torch.int64, device=mask.device))[:count]


def gather(x: Tensor, entries: Tensor, count: int) -> Tensor:
    """Return the `entries` of `x`, [count], or nan for each of them if any entry of `x` is not finite.

    For sets that were not made from `x`: an overflow outside of them must be visible too.
    """
    kept = x.flatten().index_select(0, _indices(entries, x.numel(), count))
    return torch.where(is_finite(x), kept, torch.nan)


def scatter(values: Tensor, entries: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of `shape` with `values`, [count] of any float dtype, at `entries`, and zeros
    elsewhere."""
    y = values.new_zeros(shape)
    y.view(-1).index_copy_(0, _indices(entries, y.numel(), values.numel()), values.reshape(-1))
    return y


def _indices(entries: Tensor, numel: int, count: int) -> Tensor:
    return list_bits(entries, numel, count) if entries.dtype == torch.uint8 else entries


def select_largest(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select the k entries of each row of `x` [rows, d] with the largest keys; of equal keys the lowest
    index.

    Args:
        k: above 0.
        values: contiguous memory [rows * k] for the values of the entries; new memory if None.

    Returns:
        The entries, ascending; and their values.
    """
    # `torch.topk` does not specify which of equal entries it returns: only the k-th value is taken from it
    size = keys(x)
    cut = size.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, tied = size > cut, size == cut
    tied &= tied.cumsum(1, dtype=torch.int32) <= k - above.count_nonzero(1).unsqueeze(1)
    entries = positions((above | tied).flatten(), len(x) * k)
    kept = x.flatten().index_select(0, entries)
    return entries, kept if values is None else values.copy_(kept)
