"""Kernels for GPUs, in Triton: the one place that imports it. `ds_compress.kernels.dispatch` decides whether
they are used.

Under TRITON_INTERPRET=1, set before triton is imported, they serve CPU tensors too.
"""

from ds_compress.kernels.entropy.triton import decode_entropy, decode_units, encode_entropy, encode_units
from ds_compress.kernels.feedback.triton import dequantize_change, quantize_change, quantize_with_residual
from ds_compress.kernels.quantize.triton import dequantize, quantize
from ds_compress.kernels.reference import (
    advanced,
    changed,
    choose,
    compensated,
    count_true,
    decode_channels,
    decode_float8,
    decode_int8,
    decode_range,
    encode_channels,
    encode_float8,
    encode_int8,
    encode_range,
    finite,
    join_bytes,
    renewed,
    sort_bytes,
)
from ds_compress.kernels.topk.triton import banded, exact, sampled_band
from ds_compress.kernels.topk.triton_bitstring import list_bits, pack_bits, set_bits, unpack_bits
from ds_compress.kernels.topk.triton_gather_scatter import gather, received, scatter

__all__ = [
    "advanced",
    "banded",
    "changed",
    "choose",
    "compensated",
    "count_true",
    "decode_channels",
    "decode_entropy",
    "decode_float8",
    "decode_int8",
    "decode_range",
    "decode_units",
    "dequantize",
    "dequantize_change",
    "encode_channels",
    "encode_entropy",
    "encode_float8",
    "encode_int8",
    "encode_range",
    "encode_units",
    "exact",
    "finite",
    "gather",
    "join_bytes",
    "list_bits",
    "pack_bits",
    "quantize",
    "quantize_change",
    "quantize_with_residual",
    "received",
    "renewed",
    "sampled_band",
    "scatter",
    "set_bits",
    "sort_bytes",
    "unpack_bits",
]
