"""The CPU: numpy, and C++ (`ds_compress.kernels.native`) for long tensors, where a compiler is found."""

from ds_compress.kernels.cpu.bitstring import list_bits, pack_bits, set_bits, unpack_bits
from ds_compress.kernels.cpu.entropy import decode_entropy, encode_entropy
from ds_compress.kernels.cpu.float8 import decode_float8, encode_float8
from ds_compress.kernels.cpu.groups import dequantize, quantize, quantize_with_error
from ds_compress.kernels.cpu.selection import banded, exact, sampled_band
from ds_compress.kernels.cpu.steps import choose, count_true
from ds_compress.kernels.reference import gather, scatter

received = list_bits

__all__ = [
    "banded",
    "choose",
    "count_true",
    "decode_entropy",
    "decode_float8",
    "dequantize",
    "encode_entropy",
    "encode_float8",
    "exact",
    "gather",
    "list_bits",
    "pack_bits",
    "quantize",
    "quantize_with_error",
    "received",
    "sampled_band",
    "scatter",
    "set_bits",
    "unpack_bits",
]
