"""Compare our codecs with libraries from pip, on the same tensors in the same rounds: `make bench-peers`.

One thread, encode + decode of tensors of 16 KiB to 128 MiB, medians of the thread's CPU time, GB/s of input.
bits counts what would have to travel, scales and indices included. Ours write into memory that is there, as
into a packet. A peer is "AHEAD" if it is faster than a codec of ours at as few bits and as small an error,
and no other codec of ours does the same to it: there should be none, at any size, except OpenZL, which is
ahead of `lossless`. The libraries have an environment of their own, as hivemind needs numpy < 2.4.

DS_COMPRESS_CPU=x86-64-v3 runs our codecs as a processor without AVX-512 would; with ATEN_CPU_CAPABILITY=avx2
torch does so too.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_compress.cli.bench import benchmark_tensor
from ds_compress.kernels import library
from launch.bench.peers_methods import PACKAGES, Method, ours, peers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {  # shapes in fp32
    "16 KiB": (1, 32, 128),
    "128 KiB": (1, 128, 256),
    "3 MiB": (3, 256, 1024),
    "16 MiB": (4, 1024, 1024),
    "128 MiB": (8, 1024, 4096),
}
BATCH = 1 << 20  # bytes that one timing takes at least, in several calls
LARGE = 1 << 25  # bytes of a tensor that a third of the rounds are enough for


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES], help="(default: all)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    processor = {
        "cpu": cpu_name(),
        "instructions": library.instruction_set(),
        "torch": torch.backends.cpu.get_cpu_capability(),
    }
    print(
        f"{processor['cpu']}, our codecs with {processor['instructions']}, torch with {processor['torch']}; "
        f"{', '.join(f'{package} {version}' for package, version in versions.items())}",
        flush=True,
    )
    rows = []
    for name in DTYPES:
        for size in args.sizes:
            rows += measure(size, name, args.rounds)
            print(f"{name}, {size}: {', '.join(ahead(rows, size, name)) or 'none'} ahead", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"versions": versions, **processor, "rows": rows}, indent=2))
    for name in DTYPES:
        Console(width=140).print(table([row for row in rows if row["dtype"] == name], args.sizes))
    return 1 if any(row["ahead"] for row in rows) else 0


def ahead(rows: list[dict[str, Any]], size: str, dtype: str) -> list[str]:
    """Return the names of peers that beat every codec of ours."""
    return [row["name"] for row in rows if row["ahead"] and (row["size"], row["dtype"]) == (size, dtype)]


def table(rows: list[dict[str, Any]], sizes: list[str]) -> Table:
    """Format a row per method: speed by size; bits and error at the largest size."""
    instructions = library.instruction_set()
    title = f"{rows[0]['dtype']}, {instructions}: GB/s of encode + decode"
    shown = Table("", "bits/value", "error", *sizes, title=title)
    speeds = {(row["name"], row["size"]): row for row in rows}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [speeds[name, size] for size in sizes]
        cells = (f"{row['roundtrip_gbps']:.2f}{' AHEAD' if row['ahead'] else ''}" for row in own)
        shown.add_row(name, f"{own[-1]['bits']:.2f}", f"{own[-1]['error']:.4f}", *cells)
    copies = (next(row for row in rows if row["size"] == size)["copy_gbps"] for size in sizes)
    shown.add_row("a copy", "", "", *(f"{speed:.2f}" for speed in copies))
    return shown


def measure(size: str, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row per method, measured on a tensor of `size`."""
    torch.compiler.reset()  # after some shapes it gives up on a function
    samples, *others = SIZES[size]
    shape = samples * 4 // DTYPES[dtype].itemsize, *others
    x = benchmark_tensor(shape, DTYPES[dtype], torch.device("cpu"))
    methods, out = ours(x) + peers(x), torch.empty_like(x)
    codes = [method.encode(x) for method in methods]
    calls = max(1, BATCH // x.nbytes)
    times: list[list[float]] = []
    for _ in range(rounds if x.nbytes < LARGE else -(-rounds // 3)):
        row = [seconds(lambda: out.copy_(x), calls)]
        for method, code in zip(methods, codes):
            row += [seconds(lambda: method.encode(x), calls), seconds(lambda: method.decode(code), calls)]
        times.append(row)
    copy, *medians = map(statistics.median, zip(*times))
    rows = [
        {
            "name": method.name,
            "size": size,
            "dtype": dtype,
            "ours": method.ours,
            "error": error(method, code, x),
            "bits": 8 * method.nbytes(code) / x.numel(),
            "encode_gbps": x.nbytes / encode / 1e9,
            "decode_gbps": x.nbytes / decode / 1e9,
            "roundtrip_gbps": x.nbytes / (encode + decode) / 1e9,
            "copy_gbps": x.nbytes / copy / 1e9,
        }
        for method, code, encode, decode in zip(methods, codes, medians[::2], medians[1::2])
    ]
    mine = [row for row in rows if row["ours"]]
    for row in rows:
        beaten = any(beats(row, other) for other in mine) and not any(beats(other, row) for other in mine)
        row["ahead"] = beaten and not row["ours"]
    return rows


def error(method: Method, code: Any, x: Tensor) -> float:
    return ((method.decode(code).double() - x.double()).norm() / x.double().norm()).item()


def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `one` is faster with as few bits and as small an error: by 10 %, which equal methods may differ
    by; bits and errors are equal within 1 %."""
    as_small = one["bits"] <= 1.01 * other["bits"] and one["error"] <= 1.01 * other["error"]
    return as_small and one["roundtrip_gbps"] > 1.1 * other["roundtrip_gbps"]


def seconds(function: Callable[[], object], calls: int) -> float:
    """Return the CPU seconds of one of several calls, after a warm-up call that fills the caches."""
    function()
    start = time.thread_time()
    for _ in range(calls):
        function()
    return (time.thread_time() - start) / calls


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
