"""Quantization of messages that follow a state: the steps of `reference`, with the kernels of groups.py."""

from ds_compress.kernels.feedback import reference as feedback
from ds_compress.kernels.feedback.quantize_feedback import Following
from ds_compress.kernels.quantize import triton as groups

_following = Following(groups, feedback)
quantize_with_residual = _following.quantize_with_residual
quantize_change = _following.quantize_change
dequantize_change = _following.dequantize_change
