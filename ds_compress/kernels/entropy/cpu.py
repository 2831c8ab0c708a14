"""Entropy coding on the CPU: `reference` in C++ (entropy.cpp)."""

import torch
from torch import Tensor

from ds_compress.kernels import native, reference
from ds_compress.kernels.entropy import compiled
from ds_compress.kernels.entropy.format import Frame


def encode_entropy(x: Tensor, frame: Frame) -> Tensor:
    """See `reference.encode_entropy`."""
    if not native.serves("entropy", x.numel()):
        return reference.encode_entropy(x, frame)
    return compiled.encode(x if x.dtype in compiled.FLOATS else x.float(), frame)


def decode_entropy(words: Tensor, frame: Frame, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `reference.decode_entropy`."""
    if not native.serves("entropy", frame.numel):
        return reference.decode_entropy(words, frame, dtype)
    values, valid = compiled.decode(words, frame, dtype if dtype in compiled.FLOATS else torch.float32)
    if not valid:
        values = values.fill_(torch.nan)
    return values.to(dtype), torch.tensor(valid, dtype=torch.bool, device="cpu")
