"""Our codecs against what pip can install, on the same tensor in the same rounds: `make bench-peers`.

One thread, round trips of encode + decode of [4, 1024, 1024], medians of the thread's CPU time, GB/s of
input. bits counts what would have to travel, scales and indices included. A peer is "AHEAD" if it is faster
than a codec of ours at as few bits and as small an error, and no other codec of ours does the same to it:
there should be none. The libraries have an environment of their own, as hivemind needs numpy < 2.4.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
import zstandard
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto.runtime_pb2 import CompressionType
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from ds_compress.cli.bench import benchmark_tensor, contexts
from ds_compress.codec import TensorSpec, build
from ds_compress.kernels import native

SHAPE = (4, 1024, 1024)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PACKAGES = ("torch", "torchao", "bitsandbytes", "hivemind", "zstandard", "numpy")
OURS = (
    {"name": "bf16"},
    {"name": "fp8"},
    {"name": "quantize", "bits": 8},
    {"name": "quantize", "bits": 8, "scheme": "symmetric"},
    {"name": "quantize", "bits": 7},
    {"name": "quantize", "bits": 4},
    {"name": "quantize", "bits": 4, "group_size": 64},
    {"name": "quantize", "bits": 4, "hadamard": True},
    {"name": "quantize", "bits": 2},
    {"name": "topk"},
    {"name": "topk", "indices": "int32"},
    {"name": "topk", "select": "threshold"},
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
        codec, spec = build(choice), TensorSpec.of(x)
        sender, receiver = contexts(codec, x)
        options = ", ".join(f"{key}={value}" for key, value in choice.items() if key != "name")
        methods.append(
            Method(
                f"{codec.name}({options})",
                lambda x, codec=codec, ctx=sender: codec.encode(x, ctx),
                lambda parts, codec=codec, ctx=receiver: codec.decode(parts, spec, ctx),
                sum_bytes,
                ours=True,
            )
        )
    return methods


def peers(x: Tensor) -> list[Method]:
    dtype, k = x.dtype, x.numel() // 10
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
                lambda packed, unpack=unpack: unpack(packed).view(SHAPE).to(dtype),
                lambda packed: packed.nbytes,
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
            lambda data: torch.frombuffer(bytearray(zstandard.decompress(data)), dtype=dtype).view(SHAPE),
            len,
        ),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    native.wait()
    rows = [row for name in DTYPES for row in measure(name, args.rounds)]
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    print(f"{cpu_name()}; {', '.join(f'{package} {version}' for package, version in versions.items())}")
    table = Table(
        "", "dtype", "bits/value", "error", "encode", "decode", "round trip", "of copy", "", title="GB/s"
    )
    for row in rows:
        table.add_row(
            row["name"],
            row["dtype"],
            f"{row['bits']:.2f}",
            f"{row['error']:.4f}",
            f"{row['encode_gbps']:.2f}",
            f"{row['decode_gbps']:.2f}",
            f"{row['roundtrip_gbps']:.2f}",
            f"{row['copy_fraction']:.3f}",
            "" if row["ours"] else "AHEAD" if row["ahead"] else "peer",
        )
    Console(width=130).print(table)
    if args.json:
        args.json.write_text(json.dumps({"versions": versions, "cpu": cpu_name(), "rows": rows}, indent=2))
    return 1 if any(row["ahead"] for row in rows) else 0


def measure(dtype: str, rounds: int) -> list[dict[str, Any]]:
    x = benchmark_tensor(SHAPE, DTYPES[dtype], torch.device("cpu"))
    methods = ours(x) + peers(x)
    out = torch.empty_like(x)
    codes = [method.encode(x) for method in methods]
    times: list[list[float]] = []
    for _ in range(rounds):
        row = [seconds(lambda: out.copy_(x))]
        for method, code in zip(methods, codes):
            row += [seconds(lambda: method.encode(x)), seconds(lambda: method.decode(code))]
        times.append(row)
    copy, *medians = map(statistics.median, zip(*times))
    rows = []
    for method, code, encode, decode in zip(methods, codes, medians[::2], medians[1::2]):
        error = (method.decode(code).double() - x.double()).norm() / x.double().norm()
        rows.append(
            {
                "name": method.name,
                "dtype": dtype,
                "ours": method.ours,
                "error": error.item(),
                "bits": 8 * method.nbytes(code) / x.numel(),
                "encode_gbps": x.nbytes / encode / 1e9,
                "decode_gbps": x.nbytes / decode / 1e9,
                "roundtrip_gbps": x.nbytes / (encode + decode) / 1e9,
                "copy_fraction": copy / (encode + decode),
            }
        )
    for row in rows:
        mine = [other for other in rows if other["ours"]]
        ahead = any(beats(row, other) for other in mine) and not any(beats(other, row) for other in mine)
        row["ahead"] = ahead and not row["ours"]
    return rows


def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `one` is faster with as few bits and as small an error: by 10 %, which equal methods may differ
    by."""
    as_small = one["bits"] <= other["bits"] and one["error"] <= 1.01 * other["error"]
    return as_small and one["roundtrip_gbps"] > 1.1 * other["roundtrip_gbps"]


def seconds(function: Callable[[], object]) -> float:
    """CPU time of one call, after one that leaves the caches as this function does."""
    function()
    start = time.thread_time()
    function()
    return time.thread_time() - start


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


if __name__ == "__main__":
    sys.exit(main())
