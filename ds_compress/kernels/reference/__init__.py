"""Plain torch, on any device: the specification of every backend, whose functions are these.

A set of entries of a flat tensor is held as int64 indices or as bits, see `bitstring`; `held` is one of the
two.
"""

from ds_compress.kernels.reference.bitstring import list_bits, pack_bits, set_bits, unpack_bits
from ds_compress.kernels.reference.entropy import decode_entropy, encode_entropy
from ds_compress.kernels.reference.feedback import (
    advanced,
    changed,
    compensated,
    decode_int8,
    encode_int8,
    finite,
    renewed,
)
from ds_compress.kernels.reference.fixed import decode_channels, decode_range, encode_channels, encode_range
from ds_compress.kernels.reference.float8 import decode_float8, encode_float8
from ds_compress.kernels.reference.groups import dequantize, quantize
from ds_compress.kernels.reference.held import gather, received, scatter
from ds_compress.kernels.reference.planes import join_bytes, sort_bytes
from ds_compress.kernels.reference.selection import banded, exact, sampled_band
from ds_compress.kernels.reference.stateful import dequantize_change, quantize_change, quantize_with_residual
from ds_compress.kernels.reference.steps import choose, count_true
from ds_compress.kernels.reference.units import decode_units, encode_units

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
