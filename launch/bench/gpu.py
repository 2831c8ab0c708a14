"""Compare the codecs on a GPU with its memory bandwidth and with other libraries: `make bench-gpu`.

Times of encode and decode through the channel, the packet and its header included, CUDA events round one call
each, the cache flushed before, medians. "of copy" is the least that has to move (the tensor and the packet,
once each) per second, over what a copy of the tensor moves. bitsandbytes and DeepSpeed's quantizer, in fp16,
stand beside ours where they are installed and build, without a packet.
Exit status 1 when a goal is missed. `--device cpu` shows that the script works, not how fast anything is.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ds_compress.cli.arguments import DTYPES, shape
from ds_compress.cli.bench import benchmark_tensor
from ds_compress.codec import MessageId, build
from ds_compress.config import Config
from ds_compress.message.channel import Boundary, Channel
from ds_compress.message.clock import HostClock, clock_for
from ds_compress.message.layout import MessageLayout

GROUP = 128
CODECS = (  # and the fraction of copy that is the goal, for encode and decode together
    ({"name": "quantize", "bits": 8}, 0.85),
    ({"name": "quantize", "bits": 4}, 0.85),
    ({"name": "quantize", "bits": 2}, 0.85),
    ({"name": "quantize", "bits": 4, "hadamard": True}, 0.70),
    ({"name": "topk", "values": "raw"}, None),
    ({"name": "topk", "values": "raw", "indices": "reuse"}, None),
    ({"name": "fp8"}, None),
)
CACHE = 1 << 28  # bytes that are written to flush it
FLUSHES = 8  # in a row: meanwhile the host launches all that is measured, so the device never waits for it


@dataclass
class Method:
    """A codec as two functions: `encode` returns tensors, `decode` turns them back."""

    name: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    goal: float | None = None


def ours(x: Tensor) -> Iterator[Method]:
    for choice, goal in CODECS:
        yield encode_and_decode_messages(str(build(choice)), *channels(choice, x), x, goal)


def channels(choice: dict[str, Any], x: Tensor) -> tuple[Channel, Channel, MessageId]:
    """Return sender's and receiver's channel of `choice`, and the message id to use."""
    follows = choice.get("indices") == "reuse"
    forward = {**choice, "indices": "auto"} if follows else choice
    config = Config({"forward": {"codec": forward}, "backward": {"codec": choice}, "min_numel": 0})
    here, there = Boundary(0, config), Boundary(0, config)
    if not follows:
        return here.forward, there.forward, here.forward.message_id(0, 0)
    message_id = here.forward.message_id(0, 0)
    packet, _, layout = here.forward.encode([x], message_id)
    there.forward.decode(packet, layout, message_id)
    return here.backward, there.backward, here.backward.message_id(0, 0)


def encode_and_decode_messages(
    name: str, sender: Channel, receiver: Channel, message_id: MessageId, x: Tensor, goal: float | None
) -> Method:
    """Return encode and decode of a one-tensor message, with a preallocated packet."""
    layout: MessageLayout = sender.layout_of([x], message_id)
    packet = layout.packet.allocate(x.device)
    # a backward message takes away what the forward one left: copies of the channels keep it for the next
    return Method(
        name,
        lambda x: (sender.as_receiver().encode([x], message_id, lambda nbytes: packet).packet.memory,),
        lambda _: receiver.as_receiver().decode(packet, layout, message_id)[0],
        goal,
    )


def peers(x: Tensor) -> Iterator[Method]:
    yield Method("torch.topk + int32", lambda x: sparse(x), lambda parts: dense(parts, x))
    try:
        import bitsandbytes.functional as bnb
    except ImportError as error:
        print(f"without bitsandbytes: {error}")
    else:
        yield Method(
            "bitsandbytes blockwise 8 bits, 256",
            lambda x: bnb.quantize_blockwise(x, blocksize=256),
            lambda parts: bnb.dequantize_blockwise(*parts),
        )
        yield Method(
            "bitsandbytes nf4, 64",
            lambda x: bnb.quantize_4bit(x, blocksize=64, quant_type="nf4"),
            lambda parts: bnb.dequantize_4bit(*parts),
        )
    try:
        from deepspeed.ops.op_builder import QuantizerBuilder

        op = QuantizerBuilder().load()
    except Exception as error:  # no nvcc, no CUDA, ...
        print(f"without DeepSpeed's quantizer: {error}")
    else:
        half, groups = x.half(), x.numel() // GROUP
        for bits in (8, 4):
            yield Method(
                f"DeepSpeed quantize {bits} bits, {GROUP}, fp16",
                lambda x, bits=bits: op.quantize(half, groups, bits, op.Symmetric),
                lambda parts, bits=bits: op.dequantize(*parts, groups, bits, op.Symmetric),
            )


def sparse(x: Tensor) -> tuple[Tensor, Tensor]:
    flat = x.flatten()
    indices = flat.abs().topk(flat.numel() // 10, sorted=False).indices
    return flat[indices], indices.int()


def dense(parts: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    values, indices = parts
    flat = torch.zeros(x.numel(), dtype=x.dtype, device=x.device)
    return flat.scatter_(0, indices.long(), values).view_as(x)


def measure(x: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Return one row for memcpy and one for each method."""
    clock = clock_for(x.device)
    scratch = torch.empty(CACHE if x.is_cuda else 1, dtype=torch.uint8, device=x.device)
    out = torch.empty_like(x)
    copy = seconds(lambda: out.copy_(x), rounds, clock, scratch)
    rows: list[dict[str, Any]] = [
        {
            "name": "copy",
            "encode_s": copy,
            "decode_s": 0.0,
            "bits": 8 * x.itemsize,
            "of_copy": 1.0,
            "goal": None,
        }
    ]
    for method in (*ours(x), *peers(x)):
        code = method.encode(x)
        payload = sum(part.nbytes for part in tensors(code))
        encode = seconds(lambda: method.encode(x), rounds, clock, scratch)
        decode = seconds(lambda: method.decode(code), rounds, clock, scratch)
        rows.append(
            {
                "name": method.name,
                "encode_s": encode,
                "decode_s": decode,
                "bits": 8 * payload / x.numel(),
                "of_copy": (x.nbytes + payload) / (encode + decode) / (x.nbytes / copy),
                "goal": method.goal,
            }
        )
    return rows


def tensors(code: Any) -> list[Tensor]:
    """Return the tensors of an encoding; bitsandbytes hides its scales in an object."""
    return [part if isinstance(part, Tensor) else part.absmax for part in code]


def seconds(function: Callable[[], object], rounds: int, clock: HostClock, scratch: Tensor) -> float:
    """Return the median seconds of a call with a flushed cache, after one warm-up call."""
    function()
    marks = []
    for _ in range(rounds):
        for _ in range(FLUSHES):
            scratch.zero_()
        start = clock.mark()
        function()
        marks.append((start, clock.mark()))
    return statistics.median(clock.ms(start, end) for start, end in marks) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=shape, default=(8, 2048, 4096))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "bench_gpu: torch finds no GPU; a build of torch with CUDA is needed (make bench-gpu TORCH=torch)"
        )
        return 2
    rows = measure(benchmark_tensor(args.shape, DTYPES[args.dtype], device), args.rounds)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    title = f"{list(args.shape)} {args.dtype}, {where}, torch {torch.__version__}"
    table = Table("", "bits/value", "encode ms", "decode ms", "of copy", "goal", "", title=title)
    for row in rows:
        goal = row["goal"]
        table.add_row(
            row["name"],
            f"{row['bits']:.2f}",
            f"{row['encode_s'] * 1e3:.3f}",
            f"{row['decode_s'] * 1e3:.3f}",
            f"{row['of_copy']:.3f}",
            "" if goal is None else f"{goal}",
            "" if goal is None else "holds" if row["of_copy"] >= goal else "MISSED",
        )
    Console(width=130).print(table)
    if args.json:
        args.json.write_text(json.dumps({"where": where, "torch": torch.__version__, "rows": rows}, indent=2))
    return 1 if any(row["goal"] is not None and row["of_copy"] < row["goal"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
