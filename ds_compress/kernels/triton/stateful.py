"""Quantization of messages that follow a state: the steps of `reference`, with the kernels of groups.py."""

from ds_compress.kernels.reference import feedback
from ds_compress.kernels.reference.stateful import Following
from ds_compress.kernels.triton import groups

_following = Following(groups, feedback)
quantize_with_residual = _following.quantize_with_residual
quantize_change = _following.quantize_change
dequantize_change = _following.dequantize_change
