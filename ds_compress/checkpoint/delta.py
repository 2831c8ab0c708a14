"""Encodes a tensor as 8-bit changes to another one, which the reader has."""

import torch
from torch import Tensor

from ds_compress.feedback.state import int8_decode
from ds_compress.kernels.feedback.reference import GROUP, grouped, int8_codes, int8_scales


def delta_encode(value: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """`value` as a change to `base`: int8 codes of its shape, and one fp32 scale for each group of values;
    finite.

    The step between two codes is that of `int8_encode` for the same value, not a fraction of the change. So
    the error is the same, at most half a step, after any number of changes, and where little has changed
    codes are small numbers, mostly 0, which zstd makes short. A group that is nearer to 0 than to `base` is a
    change to 0 instead: its scale comes with a minus sign.
    """
    new, old = grouped(value), grouped(base)
    near = (new - old).abs().amax(1) <= new.abs().amax(1)
    steps = int8_scales(new)
    change = new - torch.where(near[:, None], old, 0.0)
    return int8_codes(change, steps, value.shape), torch.where(near, steps, -steps)


def delta_decode(codes: Tensor, scales: Tensor, base: Tensor) -> Tensor:
    """Return the fp32 value, in base's shape, of what `delta_encode` returned."""
    if codes.numel() != base.numel():
        raise ValueError(f"{codes.numel()} codes came for a change to {base.numel()} values")
    near = (scales > 0).repeat_interleave(GROUP)[: base.numel()].view(base.shape)
    return torch.where(near, base.float(), 0.0) + int8_decode(codes.view(base.shape), scales.abs())
