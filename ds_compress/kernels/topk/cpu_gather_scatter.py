"""Entries that both sides know: `reference` in C++ (gather_scatter.cpp) where bits hold many of them."""

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.feedback.cpu import finite
from ds_compress.kernels.topk import compiled_gather_scatter as compiled
from ds_compress.kernels.topk.cpu_bitstring import list_bits


def received(packed: Tensor, numel: int, count: int) -> Tensor:
    """See `reference.received`."""
    if native.serves("gather_scatter", numel):
        return packed.clone()
    return list_bits(packed, numel, count)


def gather(x: Tensor, held: Tensor, count: int) -> Tensor:
    """See `reference.gather`."""
    if held.dtype == torch.uint8 and native.serves("gather_scatter", x.numel()):
        return torch.where(finite(x), compiled.gather(x, held, count), torch.nan)
    return reference.gather(x, held, count)


def scatter(values: Tensor, held: Tensor, shape: tuple[int, ...]) -> Tensor:
    """See `reference.scatter`; of damaged bits, which hold another number of entries, all that fit."""
    if held.dtype == torch.uint8:
        move = compiled.scattering(values.dtype, shape, values.numel())
        if native.serves("gather_scatter", move.template.numel()):
            y = torch.empty_like(move.template)
            move.call(values.contiguous(), held, y)
            return y
    return reference.scatter(values, held, shape)
