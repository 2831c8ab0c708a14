"""The CPU: numpy, and C++ (`ds_compress.kernels.native`) for long tensors, where a compiler is found."""

from ds_compress.kernels.entropy.cpu import decode_entropy, encode_entropy
from ds_compress.kernels.entropy.cpu_sorted_blocks import decode_units, encode_units
from ds_compress.kernels.feedback.cpu import (
    advanced,
    changed,
    compensated,
    decode_int8,
    encode_int8,
    finite,
    renewed,
)
from ds_compress.kernels.feedback.cpu_quantize_feedback import (
    dequantize_change,
    quantize_change,
    quantize_with_residual,
)
from ds_compress.kernels.fp8.cpu import decode_float8, encode_float8
from ds_compress.kernels.lossless.cpu import join_bytes, sort_bytes
from ds_compress.kernels.quantize.cpu import dequantize, quantize
from ds_compress.kernels.quantize.cpu_fixed_point import (
    decode_channels,
    decode_range,
    encode_channels,
    encode_range,
)
from ds_compress.kernels.topk.cpu import banded, exact, sampled_band
from ds_compress.kernels.topk.cpu_bitstring import list_bits, pack_bits, set_bits, unpack_bits
from ds_compress.kernels.topk.cpu_gather_scatter import gather, received, scatter
from ds_compress.kernels.topk.cpu_small_ops import choose, count_true

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
