"""Wrap our codecs and the libraries that `peers` compares as functions of one tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bitsandbytes.functional as bnb
import openzl.ext as openzl
import torch
import zstandard
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto.runtime_pb2 import CompressionType
from torch import Tensor
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from ds_compress.cli.bench import contexts
from ds_compress.codec import TensorSpec, build
from ds_compress.codecs.mixins import VariableSizePayload

PACKAGES = ("torch", "torchao", "bitsandbytes", "hivemind", "openzl", "zstandard", "numpy")
OURS = (
    {"name": "bf16"},
    {"name": "fp8"},
    {"name": "quantize", "bits": 8},
    {"name": "quantize", "bits": 7},
    {"name": "quantize", "bits": 4},
    {"name": "quantize", "bits": 4, "group_size": 64},
    {"name": "quantize", "bits": 4, "hadamard": True},
    {"name": "quantize", "bits": 2},
    {"name": "topk"},
    {"name": "topk", "indices": "int32"},
    {"name": "lossless"},
)


@dataclass
class Method:
    """encode gives anything that decode turns back into the tensor; bits of what would be sent of it, per
    value."""

    name: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    nbytes: Callable[[Any], int]
    ours: bool = False


def ours(x: Tensor) -> list[Method]:
    methods = []
    for choice in OURS:
        if choice["name"] == "bf16" and x.dtype == torch.bfloat16:
            continue  # it has nothing to do
        codec, spec = build(choice), TensorSpec.of(x)
        sender, receiver = contexts(codec, x)
        if isinstance(codec, VariableSizePayload):
            packet = None
        else:
            packet = tuple(map(Tensor.clone, codec.encode(x, sender)))
        options = ", ".join(f"{key}={value}" for key, value in choice.items() if key != "name")
        methods.append(
            Method(
                f"{codec.name}({options})",
                lambda x, codec=codec, ctx=sender, out=packet: codec.encode_into(x, ctx, out),
                lambda parts, codec=codec, ctx=receiver: codec.decode(parts, spec, ctx),
                sum_bytes,
                ours=True,
            )
        )
    return methods


def peers(x: Tensor) -> list[Method]:
    dtype, shape, k = x.dtype, x.shape, x.numel() // 10
    methods = [
        Method("torch.topk + int32", lambda x: sparse(x, k), lambda parts: dense(parts, x), sum_bytes),
        Method(
            "torch.kthvalue mask (not packed)",
            lambda x: kthvalue_mask(x, k),
            lambda masked: masked.clone(),
            lambda masked: k * (dtype.itemsize + 4),
        ),
        Method(
            "torch float8_e4m3fn",
            lambda x: x.to(torch.float8_e4m3fn),
            lambda q: q.to(dtype),
            lambda q: q.nbytes,
        ),
    ]
    if dtype == torch.float32:
        methods.append(
            Method("torch bfloat16", lambda x: x.bfloat16(), lambda q: q.float(), lambda q: q.nbytes)
        )
    for bits, name in ((8, "byte"), (4, "4bit"), (2, "2bit")):
        pack = getattr(torch.ops.quantized, f"embedding_bag_{name}_prepack")
        unpack = getattr(torch.ops.quantized, f"embedding_bag_{name}_unpack")
        methods.append(
            Method(
                f"torch fbgemm rows of 128, {bits} bits",
                lambda x, pack=pack: pack(x.float().view(-1, 128)),
                lambda packed, unpack=unpack: unpack(packed).view(shape).to(dtype),
                lambda packed: packed.nbytes,
            )
        )
    for bits in (8, 4, 2):
        methods.append(
            Method(
                f"AC-SGD, {bits} bits",
                lambda x, bits=bits: acsgd(x, bits),
                lambda parts, bits=bits: from_acsgd(parts, bits, dtype),
                sum_bytes,
            )
        )
    encode, decode = torchao_int8(x)
    compiled_encode, compiled_decode = torch.compile(encode), torch.compile(decode)
    methods += [
        Method("torchao int8 G128, eager", encode, decode, sum_bytes),
        Method("torchao int8 G128, compiled", compiled_encode, compiled_decode, sum_bytes),
        Method(
            "bitsandbytes blockwise 8 bits, 256",
            lambda x: bnb.quantize_blockwise(x, blocksize=256),
            lambda parts: bnb.dequantize_blockwise(*parts),
            lambda parts: parts[0].nbytes + parts[1].absmax.nbytes,
        ),
        Method(
            "bitsandbytes nf4, 64",
            lambda x: bnb.quantize_4bit(x, blocksize=64, quant_type="nf4"),
            lambda parts: bnb.dequantize_4bit(*parts),
            lambda parts: parts[0].nbytes + parts[1].absmax.nbytes,
        ),
        Method(
            "zstd level 1",
            lambda x: zstandard.compress(x.view(torch.uint8).numpy(), 1),
            lambda data: torch.frombuffer(bytearray(zstandard.decompress(data)), dtype=dtype).view(shape),
            len,
        ),
        Method("OpenZL, exponents coded", *openzl_lossless(x), len),
    ]
    for name in ("BLOCKWISE_8BIT", "UNIFORM_8BIT", "QUANTILE_8BIT"):
        compression = CompressionType.Value(name)
        methods.append(
            Method(
                f"hivemind {name.replace('_8BIT', '').lower()} 8 bits",
                lambda x, compression=compression: serialize_torch_tensor(x, compression),
                deserialize_torch_tensor,
                lambda message: len(message.buffer),
            )
        )
    return methods


def sum_bytes(parts: tuple[Tensor, ...]) -> int:
    return sum(part.nbytes for part in parts)


def sparse(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    flat = x.flatten()
    indices = flat.abs().topk(k, sorted=False).indices
    return flat[indices], indices.int()


def dense(parts: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    values, indices = parts
    return torch.zeros(x.numel(), dtype=x.dtype).scatter_(0, indices.long(), values).view_as(x)


def kthvalue_mask(x: Tensor, k: int) -> Tensor:
    """As the notebook of the model-parallel compression paper (arXiv 2401.07788) simulates TopK: nothing is
    packed."""
    size = x.abs()
    return x * (size >= size.flatten().kthvalue(x.numel() - k + 1).values)


def acsgd(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The quantizer of AC-SGD, which became AQ-SGD (arXiv 2206.01299), written anew in torch: fixed point
    with an fp16 scale for each index of the last dimension; codes of 4 and 2 bits are packed by halves and
    quarters of it."""
    half = 2 ** (bits - 1)
    scale = x.abs().amax(tuple(range(x.dim() - 1)), keepdim=True).half()
    codes = (x / (scale + 1e-6) * half).round().clip(-half, half - 1) + half
    first, *others = codes.to(torch.uint8).chunk(8 // bits, dim=-1)
    for place, other in enumerate(others, start=1):
        first = first + (other << (place * bits))
    return first, scale


def from_acsgd(parts: tuple[Tensor, Tensor], bits: int, dtype: torch.dtype) -> Tensor:
    packed, scale = parts
    half = 2 ** (bits - 1)
    codes = torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1)
    return (codes.to(dtype) - half) / half * scale.to(dtype)


def openzl_lossless(x: Tensor) -> tuple[Callable[[Tensor], bytes], Callable[[bytes], Tensor]]:
    """Entropy-code exponents; copy signs and fractions, in which there is nothing to find."""
    is_bf16 = x.dtype == torch.bfloat16
    nodes, graphs = openzl.nodes, openzl.graphs
    split = nodes.BFloat16Deconstruct() if is_bf16 else nodes.Float32Deconstruct()
    integers = torch.int16 if is_bf16 else torch.int32
    compressor = openzl.Compressor()
    compressor.set_parameter(openzl.CParam.FormatVersion, openzl.MAX_FORMAT_VERSION)
    graph = split(compressor, sign_frac=graphs.Store(), exponent=graphs.Entropy())
    compressor.select_starting_graph(graph)

    def encode(x: Tensor) -> bytes:
        context = openzl.CCtx()
        context.ref_compressor(compressor)
        return context.compress([openzl.Input(openzl.Type.Numeric, x.view(integers).numpy().ravel())])

    def decode(frame: bytes) -> Tensor:
        (output,) = openzl.DCtx().decompress(frame)
        values = output.content.as_nparray().copy()  # the memory is the output's
        return torch.from_numpy(values).view(x.dtype).view(x.shape)

    return encode, decode


def torchao_int8(
    x: Tensor,
) -> tuple[Callable[[Tensor], tuple[Tensor, ...]], Callable[[tuple[Tensor, ...]], Tensor]]:
    block = (1,) * (x.dim() - 1) + (128,)

    def encode(x: Tensor) -> tuple[Tensor, ...]:
        scale, zero = choose_qparams_affine(
            x,
            MappingType.SYMMETRIC,
            block,
            torch.int8,
            scale_dtype=torch.float32,
            zero_point_dtype=torch.int8,
        )
        return quantize_affine(x, block, scale, zero, torch.int8), scale

    def decode(parts: tuple[Tensor, ...]) -> Tensor:
        codes, scale = parts
        zero = torch.zeros_like(scale, dtype=torch.int8)  # known for a symmetric grid: it need not travel
        return dequantize_affine(codes, block, scale, zero, torch.int8, output_dtype=x.dtype)

    return encode, decode
