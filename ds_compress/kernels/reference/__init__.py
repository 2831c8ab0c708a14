"""Plain torch, on any device: the specification of every backend, whose functions are these.

A set of entries of a flat tensor is held as int64 indices or as bits, see `bitstring`; `held` is one of the
two.
"""

from ds_compress.kernels.entropy.reference import decode_entropy, encode_entropy
from ds_compress.kernels.entropy.reference_sorted_blocks import decode_units, encode_units
from ds_compress.kernels.feedback.quantize_feedback import (
    dequantize_change,
    quantize_change,
    quantize_with_residual,
)
from ds_compress.kernels.feedback.reference import (
    advanced,
    changed,
    compensated,
    decode_int8,
    encode_int8,
    finite,
    renewed,
)
from ds_compress.kernels.fp8.reference import decode_float8, encode_float8
from ds_compress.kernels.lossless.reference import join_bytes, sort_bytes
from ds_compress.kernels.quantize.fixed_point import (
    decode_channels,
    decode_range,
    encode_channels,
    encode_range,
)
from ds_compress.kernels.quantize.reference import dequantize, quantize
from ds_compress.kernels.topk.bitstring import list_bits, pack_bits, set_bits, unpack_bits
from ds_compress.kernels.topk.gather_scatter import gather, received, scatter
from ds_compress.kernels.topk.reference import banded, exact, sampled_band
from ds_compress.kernels.topk.small_ops import choose, count_true

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
