"""Entropy coding by `kernels.units`, in torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from ds_compress.kernels.entropy.format import Frame
from ds_compress.kernels.entropy.reference import decode_entropy, encode_entropy
from ds_compress.kernels.entropy.sorted_blocks import CLASS_BITS, CLASSES, PER_WORD, Units

Encode = Callable[[Tensor, Frame], Tensor]
Decode = Callable[[Tensor, Frame, torch.dtype], tuple[Tensor, Tensor]]


def encode_units(x: Tensor, frame: Frame, units: Units) -> Tensor:
    """The words, int16 [frame.words + units.words], of `x`, [frame.numel] of any float dtype."""
    return encode_units_by(encode_entropy, x, frame, units)


def decode_units(words: Tensor, frame: Frame, units: Units, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values, [frame.numel] of `dtype`, of `words`; and whether their code can have been encoded, a bool:
    if not, all values are nan. Any classes are an order of the units."""
    return decode_units_by(decode_entropy, words, frame, units, dtype)


def encode_units_by(encode: Encode, x: Tensor, frame: Frame, units: Units) -> Tensor:
    """By the coder of a backend."""
    whole, rest = x.split([units.count * units.size, frame.numel - units.count * units.size])
    values = whole.view(units.size, units.count).T if units.columns else whole.view(units.count, units.size)
    largest = values.abs().amax(1).float()  # exact, in whatever order they are compared
    largest = torch.where(largest.isnan(), torch.inf, largest)
    rank = (largest.view(torch.int32) >> 16).short().argsort(descending=True, stable=True)
    number = torch.arange(units.count, dtype=torch.int64, device=x.device)
    classes = torch.empty_like(rank).scatter_(0, rank, number * CLASSES // units.count)
    code = encode(torch.cat([values[_order(classes)].reshape(-1), rest]), frame)
    return torch.cat([code, _packed(classes)])


def decode_units_by(
    decode: Decode, words: Tensor, frame: Frame, units: Units, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """By the coder of a backend."""
    values, valid = decode(words[: frame.words], frame, dtype)
    order = _order(_unpacked(words[frame.words :], units.count))
    whole, rest = values.split([units.count * units.size, frame.numel - units.count * units.size])
    placed = torch.empty_like(whole.view(units.count, units.size))
    placed.index_copy_(0, order, whole.view(units.count, units.size))
    if units.columns:
        placed = placed.T
    return torch.cat([placed.reshape(-1), rest]), valid


def _order(classes: Tensor) -> Tensor:
    """int64 [units]: those of class 0 first, and so on."""
    return classes.to(torch.uint8).argsort(stable=True)


def _packed(classes: Tensor) -> Tensor:
    """int16, PER_WORD of `classes` each."""
    filled = torch.nn.functional.pad(classes, (0, -len(classes) % PER_WORD)).view(-1, PER_WORD)
    return (filled << _shifts(classes.device)).sum(1).to(torch.int16)


def _unpacked(words: Tensor, units: int) -> Tensor:
    """int32 [units]."""
    return (words.int().unsqueeze(1) >> _shifts(words.device) & CLASSES - 1).view(-1)[:units]


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 16, CLASS_BITS, dtype=torch.int32, device=device)
