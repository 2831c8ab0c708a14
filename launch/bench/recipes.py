"""Measure what messages of every recipe cost at the widths that users have, on one core:

    python launch/bench/recipes.py [--rows 2048] [--widths 1024 4096 8192] [--device cuda]

A table in Markdown: milliseconds to encode + decode a message of a recipe, and in brackets to send it at 0.1,
1 and 10 Gbit/s, with the rows of 16 and 32 bits that are sent uncompressed. DS_COMPRESS_CPU=x86-64-v3
measures what a processor without AVX-512 runs. Exit status 1 when a recipe takes longer, codec and link of
1 Gbit/s together, than sending 16 bits there.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ds_compress.cli.bench import benchmark_tensor, contexts, seconds_per_call
from ds_compress.codec import Codec, TensorSpec
from ds_compress.config import DIRECTIONS, Config
from ds_compress.kernels import library
from ds_compress.kernels.backends import prepare
from ds_compress.kernels.memory import retain_freed_memory
from launch.reproduce.run import environment
from launch.reproduce.tables import markdown

RECIPES = ("safe", "balanced", "aggressive", "quant4", "quant4_8", "topk10", "fp8", "lowrank32")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GBPS = (0.1, 1, 10)


def codecs() -> Iterator[tuple[str, Codec]]:
    """Yield the codecs of all recipes with names, each once."""
    seen = set()
    for recipe in RECIPES:
        used = Config({"recipe": recipe}).in_force.codecs(0)
        for direction in DIRECTIONS:
            codec = getattr(used, direction)
            if str(codec) not in seen:
                seen.add(str(codec))
                yield f"`{recipe}` {direction}: `{codec}`", codec


def milliseconds(codec: Codec, x: Tensor) -> tuple[float, float, float]:
    """Return the time to encode and to decode `x`, and the bits of its payload."""
    sender, receiver = contexts(codec, x)
    parts = codec.encode(x, sender)
    encode = seconds_per_call(lambda: codec.encode(x, sender))
    decode = seconds_per_call(lambda: codec.decode(parts, TensorSpec.of(x), receiver))
    return 1e3 * encode, 1e3 * decode, 8.0 * sum(part.nbytes for part in parts)


def on_links(bits: float) -> list[float]:
    """Return the milliseconds that `bits` take on each link."""
    return [bits / gbps / 1e6 for gbps in GBPS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048, help="tokens of a message (default: 2048)")
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare()
    retain_freed_memory(4 * args.rows * max(args.widths))
    lines: list[list[str]] = []
    slower = []
    for dtype in DTYPES:
        inputs = {w: benchmark_tensor((args.rows, w), DTYPES[dtype], args.device) for w in args.widths}
        for name, codec in codecs():
            cells = []
            for width, x in inputs.items():
                encode, decode, bits = milliseconds(codec, x)
                links = on_links(bits)
                if encode + decode + links[1] > on_links(16 * x.numel())[1]:
                    slower.append(f"{name}, {dtype}, {width}")
                cells.append(f"{encode:.1f} + {decode:.1f} ({', '.join(f'{ms:.3g}' for ms in links)})")
            lines.append([name, dtype, *cells])
    for bits in (16, 32):
        links_of = [on_links(bits * args.rows * width) for width in args.widths]
        cells = [f"({', '.join(f'{ms:.3g}' for ms in links)})" for links in links_of]
        lines.append([f"uncompressed, {bits} bits", "", *cells])
    print(
        markdown(
            ["codec of a recipe", "dtype", *(f"[{args.rows}, {w}]" for w in args.widths)], lines, texts=2
        )
    )
    about: dict[str, Any] = environment(args.device)
    print(f"\n{about['processor']}, {library.instruction_set()}; {about['versions']}")
    for each in slower:
        print(f"slower than sending 16 bits at 1 Gbit/s: {each}")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
