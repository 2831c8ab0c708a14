"""Kernels for GPUs, in Triton: the one place that imports it. `ds_compress.kernels.gpu` decides whether they
are used.

Under TRITON_INTERPRET=1, set before triton is imported, they serve CPU tensors too.
"""

from ds_compress.kernels.triton.bitstring import list_bits, pack_bits, unpack_bits
from ds_compress.kernels.triton.groups import dequantize, quantize, quantize_with_error
from ds_compress.kernels.triton.reuse import expand, gather
from ds_compress.kernels.triton.selection import banded, exact, sampled_band

__all__ = [
    "banded",
    "dequantize",
    "exact",
    "expand",
    "gather",
    "list_bits",
    "pack_bits",
    "quantize",
    "quantize_with_error",
    "sampled_band",
    "unpack_bits",
]
