"""The least speed that the codecs must have on one CPU core, measured and judged: `make bench-floors`.

Round trips of encode + decode of [4, 1024, 1024], as ratios to what is measured in the same rounds: a copy of the
tensor, or torch.topk with int32 indices. One thread works, so its own CPU time is the time, and what else runs on the
machine counts only through the caches it shares. Exit status 1 when a floor is missed.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ds_compress.cli.bench import benchmark_tensor, contexts
from ds_compress.codec import TensorSpec, build

SHAPE = (4, 1024, 1024)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FLOORS = (  # codec, ratio to what, floors in fp32 and bf16
    ({"name": "quantize", "bits": 8}, "copy", 0.35, 0.12),
    ({"name": "quantize", "bits": 4}, "copy", 0.30, 0.10),
    ({"name": "quantize", "bits": 2}, "copy", 0.30, 0.10),
    ({"name": "quantize", "bits": 4, "hadamard": True}, "copy", 0.04, 0.03),
    ({"name": "topk"}, "torch.topk", 4, 3.5),
    ({"name": "topk", "indices": "int32"}, "torch.topk", 4, 3.5),
    ({"name": "topk", "select": "threshold"}, "torch.topk", 7, 4.5),
    ({"name": "topk", "indices": "reuse"}, "copy", 0.10, 0.06),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("codec", "dtype", "encode ms", "decode ms", "ratio", "to", "floor", "", title=f"{list(SHAPE)}")
    missed = 0
    for column, (name, dtype) in enumerate(DTYPES.items()):
        x = benchmark_tensor(SHAPE, dtype, torch.device("cpu"))
        seconds = measure(x, args.rounds)
        for (codec, other, *floors), encode, decode in zip(FLOORS, seconds["encode"], seconds["decode"]):
            ratio, floor = seconds[other] / (encode + decode), floors[column]
            missed += ratio < floor
            verdict = "holds" if ratio >= floor else "MISSED"
            options = ", ".join(f"{key}={value}" for key, value in codec.items() if key != "name")
            table.add_row(
                f"{codec['name']}({options})", name, f"{encode * 1e3:.2f}", f"{decode * 1e3:.2f}",
                f"{ratio:.3f}", other, f"{floor}", verdict,
            )
        for other in ("copy", "torch.topk"):
            table.add_row(other, name, f"{seconds[other] * 1e3:.2f}")
    Console(width=120).print(table)
    return 1 if missed else 0


def measure(x: Tensor, rounds: int) -> dict:
    """Median seconds of the copy and of torch.topk, and of every codec's encode and decode."""
    out, spec = torch.empty_like(x), TensorSpec.of(x)
    work: list[Callable[[], object]] = [lambda: out.copy_(x), lambda: torch_topk(x)]
    for choice, *_ in FLOORS:
        codec = build(choice)
        sender, receiver = contexts(codec, x)
        work.append(functools.partial(codec.encode, x, sender))
        work.append(functools.partial(codec.decode, codec.encode(x, sender), spec, receiver))
    for function in work:
        function()
    times = [[seconds(function) for function in work] for _ in range(rounds)]
    copy, topk, *codecs = map(statistics.median, zip(*times))
    return {"copy": copy, "torch.topk": topk, "encode": codecs[::2], "decode": codecs[1::2]}


def torch_topk(x: Tensor) -> Tensor:
    """What grace and others do: the tenth of largest magnitude, int32 indices, scattered back."""
    flat = x.flatten()
    indices = flat.abs().topk(flat.numel() // 10, sorted=False).indices
    values, indices = flat[indices], indices.int()
    return torch.zeros_like(flat).scatter_(0, indices.long(), values).view_as(x)


def seconds(function: Callable[[], object]) -> float:
    """CPU time of one call, after one that leaves the caches as this function does."""
    function()
    start = time.thread_time()
    function()
    return time.thread_time() - start


if __name__ == "__main__":
    sys.exit(main())
