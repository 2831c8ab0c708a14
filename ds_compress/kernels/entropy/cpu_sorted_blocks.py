"""Entropy coding of sorted units on the CPU: `reference` in C++ (entropy.cpp)."""

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.entropy import compiled_sorted_blocks as compiled
from ds_compress.kernels.entropy.format import Frame
from ds_compress.kernels.entropy.sorted_blocks import Units


def encode_units(x: Tensor, frame: Frame, units: Units) -> Tensor:
    """See `reference.encode_units`."""
    if not native.serves("entropy", x.numel()):
        return reference.encode_units(x, frame, units)
    return compiled.encode(x if x.dtype in compiled.FLOATS else x.float(), frame, units)


def decode_units(words: Tensor, frame: Frame, units: Units, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `reference.decode_units`."""
    if not native.serves("entropy", frame.numel):
        return reference.decode_units(words, frame, units, dtype)
    made = dtype if dtype in compiled.FLOATS else torch.float32
    values, valid = compiled.decode(words, frame, units, made)
    if not valid:
        values = values.fill_(torch.nan)
    return values.to(dtype), torch.tensor(valid, dtype=torch.bool, device="cpu")
