"""Fused feedback on a GPU: the steps of the reference, with the kernels of quantize/triton.py."""

from ds_compress.kernels.feedback import reference
from ds_compress.kernels.quantize import triton as quantize

__all__ = ["dequantize_change", "quantize_change", "quantize_with_residual"]

_fused = reference.FusedFeedback(quantize)
quantize_with_residual = _fused.quantize_with_residual
quantize_change = _fused.quantize_change
dequantize_change = _fused.dequantize_change
