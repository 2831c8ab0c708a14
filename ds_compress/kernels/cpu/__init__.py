"""The CPU: numpy, and C++ (`ds_compress.kernels.native`) for long tensors, where a compiler is found."""

from ds_compress.kernels.cpu.bitstring import list_bits, pack_bits, set_bits, unpack_bits
from ds_compress.kernels.cpu.entropy import decode_entropy, encode_entropy
from ds_compress.kernels.cpu.feedback import (
    advanced,
    changed,
    compensated,
    decode_int8,
    encode_int8,
    finite,
    renewed,
)
from ds_compress.kernels.cpu.fixed import decode_channels, decode_range, encode_channels, encode_range
from ds_compress.kernels.cpu.float8 import decode_float8, encode_float8
from ds_compress.kernels.cpu.groups import dequantize, quantize
from ds_compress.kernels.cpu.held import gather, received, scatter
from ds_compress.kernels.cpu.planes import join_bytes, sort_bytes
from ds_compress.kernels.cpu.selection import banded, exact, sampled_band
from ds_compress.kernels.cpu.stateful import dequantize_change, quantize_change, quantize_with_residual
from ds_compress.kernels.cpu.steps import choose, count_true
from ds_compress.kernels.cpu.units import decode_units, encode_units

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
