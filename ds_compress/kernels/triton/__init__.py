"""Kernels for GPUs, in Triton: the one place that imports it. `ds_compress.kernels.gpu` decides whether they are used.

Under TRITON_INTERPRET=1, set before triton is imported, they serve CPU tensors too.
"""

from ds_compress.kernels.triton.bitstring import pack_bits, positions, unpack_bits
from ds_compress.kernels.triton.groups import dequantize, quantize, quantize_with_error
from ds_compress.kernels.triton.reuse import gather
from ds_compress.kernels.triton.selection import banded, exact

__all__ = [
    "banded", "dequantize", "exact", "gather", "pack_bits", "positions", "quantize", "quantize_with_error",
    "unpack_bits",
]
