"""ds-compress bench: size, error and speed of codecs on one tensor, beside a copy of it in the same run.

The tensor looks like an activation of a pretrained decoder (`benchmark_tensor`): it has outlier channels and
an attention sink, which hides the errors of all other tokens from the relative error of the message.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ds_compress.cli.arguments import DTYPES, add_import, device, shape
from ds_compress.cli.console import show
from ds_compress.codec import CODECS, Codec, Context, TensorSpec, build, check_accepted, names
from ds_compress.codecs.message_error import MessageError, measure_error
from ds_compress.codecs.mixins import FollowsForward
from ds_compress.codecs.shapes import matrix_shape
from ds_compress.config import Config
from ds_compress.errors import CompressionError, failures_at, shown
from ds_compress.kernels.backends import prepare
from ds_compress.message.channel import Boundary
from ds_compress.message.clock import clock_for
from ds_compress.planning.candidate_errors import REPEATS, ByMicroBatch, measure_codecs
from ds_compress.planning.choice import EvaluatedMessage

OUTLIERS = 6
"""Channels of the benchmark tensor that are 20 times as large, as in a transformer's hidden states."""
SINK = 150.0
"""Norm of the attention sink in the benchmark tensor, in norms of the median token, as in SmolLM2."""
SINK_CHANNELS = 2
"""Outlier channels that hold the attention sink."""
SECONDS = 0.35
"""Least time in which each function is measured."""


HELP = "measure size, error and speed of codecs on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", type=shape, default=(4, 1024, 1024), help="shape of the tensor (default: 4,1024,1024)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of the tensor (default: fp32)")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device",
        type=device,
        default=here,
        help="device to run on: cpu, cuda, cuda:1, ... (default: cuda if there is one, else cpu)",
    )
    parser.add_argument(
        "--codec",
        nargs="+",
        help="codecs to measure: names, or JSON objects as in a ds_config.json (default: all but none)",
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    add_import(parser)


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    if args.device.type == "cuda" and args.device.index:  # the timer waits for the current GPU
        torch.cuda.set_device(args.device)
    prepare()
    codecs = chosen(args.codec)
    if args.json:
        args.json.open("a").close()  # refused before minutes of work
    x = benchmark_tensor(args.shape, DTYPES[args.dtype], args.device)
    rows = [measure(codec, x) for codec in track(codecs, "measuring", console=Console(stderr=True))]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    title = f"{list(args.shape)} {args.dtype} on {args.device}, one thread; GB/s of input"
    table = [
        {
            "codec": str(codec),
            "bits/value": f"{row['bits_per_value']:.3f}",
            "error": f"{row['relative_error']:.4f}",
            "token error": f"{row['token_error']:.4f}",
            "encode": f"{row['encode_gbps']:.2f}",
            "decode": f"{row['decode_gbps']:.2f}",
            "round trip": f"{row['roundtrip_gbps']:.2f}",
            "of copy": f"{row['copy_fraction']:.3f}",
        }
        for codec, row in zip(codecs, rows)
    ]
    show(title, table)
    return 0


def chosen(words: list[str] | None) -> list[Codec]:
    """Return the codecs that `--codec` names: a name stands for all examples of that codec, JSON for one
    setting."""
    codecs = []
    for word in words or (name for name in names() if name != "none"):
        if word.lstrip().startswith("{"):
            try:
                choice = json.loads(word)
            except (ValueError, RecursionError) as error:
                raise CompressionError(f"--codec: {shown(word)} is not JSON: {error}") from None
            codecs.append(build(choice, "--codec"))
        else:
            codecs += [build({"name": word, **options}) for options in CODECS.find(word, "--codec").examples]
    return codecs


def benchmark_tensor(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0, has_sink: bool = True
) -> Tensor:
    """Return a tensor like the activations of a pretrained decoder: rows of Gaussian values, in which some
    channels are 20 times as large, and with `has_sink` a first row of 150 times the norm in few channels.

    Raises:
        CompressionError: there is not enough memory.
    """
    generator = torch.Generator().manual_seed(seed)
    with failures_at(f"--shape: {list(size)} does not fit into memory"):
        x = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
    order = torch.randperm(size[-1], generator=generator, dtype=torch.int64, device="cpu")
    channels = order[:OUTLIERS]
    x[..., channels] *= 20
    rows = x.view(matrix_shape(size))
    if has_sink and len(rows) > 1:
        few = channels[:SINK_CHANNELS]
        rows[0, few] = SINK * rows.norm(dim=1).median() / math.sqrt(len(few))
    return x.to(device, dtype)


def measure_boundary(config: Config, number: int, spec: TensorSpec) -> dict[str, EvaluatedMessage]:
    """Measure the codecs of boundary `number` on messages of a benchmark tensor of `spec`, by direction.

    Raises:
        CompressionError: there is not enough memory.
    """
    ends = Boundary(number, config), Boundary(number, config)
    return measure_codecs(ends, _messages(spec), clock_for(spec.device))


@lru_cache(maxsize=1)
def _messages(spec: TensorSpec) -> tuple[ByMicroBatch, ByMicroBatch]:
    """Return messages forward and backward, all different: activations and gradients are large in different
    channels, and gradients have no attention sink."""
    made = [
        [benchmark_tensor(spec.shape, spec.dtype, spec.device, seed, has_sink=seed < REPEATS)]
        for seed in range(2 * REPEATS)
    ]
    return dict(enumerate(made[:REPEATS])), dict(enumerate(made[REPEATS:]))


def measure(codec: Codec, x: Tensor) -> dict[str, Any]:
    """Measure one row of the benchmark; times are medians, bytes are those of the payload.

    A backward codec that depends on the forward one is measured beside a forward codec that it can use.
    """
    if isinstance(codec, FollowsForward):
        codec = codec.paired_with(codec.forward_partner() or build({"name": "none"}))
    spec = TensorSpec.of(x)
    check_accepted(codec, spec, "bench")
    bits_per_value, error = size_and_error(codec, x)
    sender, receiver = contexts(codec, x)
    parts = codec.encode(x, sender)
    out = torch.empty_like(x)
    seconds = {
        "encode": seconds_per_call(lambda: codec.encode(x, sender)),
        "decode": seconds_per_call(lambda: codec.decode(parts, spec, receiver)),
        "roundtrip": seconds_per_call(lambda: codec.decode(codec.encode(x, sender), spec, receiver)),
        "copy": seconds_per_call(lambda: out.copy_(x)),
    }
    gbps = {f"{name}_gbps": spec.nbytes / value / 1e9 for name, value in seconds.items()}
    return {
        "codec": codec.name,
        "options": {key: value for key, value in codec.settings.items() if key != "name"},
        "shape": list(spec.shape),
        "dtype": next(name for name, dtype in DTYPES.items() if dtype is x.dtype),
        "device": str(x.device),
        "bits_per_value": bits_per_value,
        "relative_error": error.relative_error,
        "token_error": error.token_error,
        **gbps,
        "copy_fraction": gbps["roundtrip_gbps"] / gbps["copy_gbps"],
    }


def size_and_error(codec: Codec, x: Tensor) -> tuple[float, MessageError]:
    """Measure bits per value of the payload of `x`, and what it loses."""
    sender, receiver = contexts(codec, x)
    parts = codec.encode(x, sender)
    decoded = codec.decode(parts, TensorSpec.of(x), receiver)
    return 8 * sum(part.nbytes for part in parts) / x.numel(), measure_error([x], [decoded])


def contexts(codec: Codec, x: Tensor) -> tuple[Context, Context]:
    """Return contexts of sender and receiver as in the midst of training: what a codec takes over from the
    forward message, a selection or the activation, is there, as if that had been `x`."""
    sender, receiver = (Context(stash={"activation": x}) for _ in range(2))
    forward = codec.forward_partner() if isinstance(codec, FollowsForward) else None
    if forward is not None:
        forward.decode(forward.encode(x, sender), TensorSpec.of(x), receiver)
        sender.direction = receiver.direction = "backward"
    return sender, receiver


def seconds_per_call(function: Callable[[], object]) -> float:
    """Measure seconds per call, median of several batches; a GPU is waited for."""
    from torch.utils.benchmark import Timer  # here, so that other commands do not wait for it

    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=SECONDS).median
