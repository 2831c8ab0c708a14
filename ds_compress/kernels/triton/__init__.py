"""Kernels for GPUs, in Triton: the one place that imports it. `ds_compress.kernels.gpu` decides whether they are used.

Under TRITON_INTERPRET=1, set before triton is imported, they serve CPU tensors too.
"""

from ds_compress.kernels.triton.groups import dequantize, quantize

__all__ = ["dequantize", "quantize"]
