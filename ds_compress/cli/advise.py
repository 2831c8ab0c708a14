"""ds-compress advise: which recipe would pay on this link, and whether any would.

Replays DeepSpeed's schedule (`ds_compress.planning.step_time`) with the compute times given, the real sizes
of the packets and codec speeds measured here. `--measure`, under a launcher with one rank per stage, takes
the bandwidth from the slowest link between neighbouring ranks.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from ds_compress.cli.advice import verdict
from ds_compress.cli.arguments import DTYPES, add_import, add_message, device, integer, number, numbers
from ds_compress.cli.check import UNCOMPRESSED, message_sizes, read_block
from ds_compress.cli.console import show
from ds_compress.cli.measured import codec_seconds, size_and_loss
from ds_compress.codec import TensorSpec
from ds_compress.codecs.mixins import SecondPacket
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.config.quality import DEFAULT, LIMITS, Limits
from ds_compress.errors import CompressionError
from ds_compress.planning import choice, offers
from ds_compress.planning.choice import STOCK, Candidate, Message, Setting
from ds_compress.planning.depth import MOST, Room
from ds_compress.planning.step_time import Network, Traffic, Workload

MEASURED_BYTES = 4 << 20
MEASURED_MESSAGES = 8


def depth(text: str) -> int | str:
    """The type of `--depth`."""
    return text if text == "auto" else integer(1, MOST)(text)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("advise", help="predict the step time of recipes on a link")
    add_message(parser)
    parser.add_argument(
        "--micro-batches", type=integer(1, 10_000), required=True, help="gradient_accumulation_steps"
    )
    parser.add_argument(
        "--forward-ms",
        type=numbers(1e-6, 1e9),
        required=True,
        help="of a micro-batch on one stage; one number for all stages, or one a stage: 16,16,18",
    )
    parser.add_argument(
        "--backward-ms", type=numbers(0, 1e9), help="likewise (default: twice the forward time)"
    )
    parser.add_argument(
        "--step-ms", type=number(0, 1e9), default=0.0, help="the rest of a step: optimizer, sum of the losses"
    )
    link = parser.add_mutually_exclusive_group(required=True)
    link.add_argument(
        "--gbps", type=number(1e-6, 1e6), help="bandwidth between stages, Gbit/s in each direction"
    )
    link.add_argument("--measure", action="store_true", help="measure it between the ranks of this launch")
    parser.add_argument("--latency-ms", type=number(0, 1e9), default=0.0, help="one way")
    parser.add_argument(
        "--recipe",
        type=Path,
        nargs="+",
        metavar="DS_CONFIG",
        help="ds_config.json files (default: all recipes, more codecs, and mixtures of them, sent eagerly)",
    )
    parser.add_argument(
        "--depth",
        type=depth,
        default="auto",
        help="link.depth of what is offered where --recipe is not given (default: auto, the one that pays)",
    )
    parser.add_argument(
        "--held-mb",
        type=number(0, 1e9),
        help="MB a stage holds of a micro-batch between its passes (default: its input, as with activation "
        "checkpointing)",
    )
    parser.add_argument(
        "--memory-gb", type=number(1e-9, 1e6), help="GB that depth may take on a stage (default: no limit)"
    )
    parser.add_argument(
        "--quality",
        choices=LIMITS,
        default=DEFAULT,
        help=f"class of errors up to which a recipe is proposed (default: {DEFAULT})",
    )
    parser.add_argument(
        "--max-error",
        type=number(0, 1e9),
        help="relative error of a message up to which a recipe is proposed, in the place of a class",
    )
    parser.add_argument(
        "--device", type=device, default="cpu", help="where the codecs are measured: cpu, cuda"
    )
    parser.add_argument(
        "--codec-gbps",
        type=number(1e-6, 1e6),
        help="do not measure the codecs: all encode and decode so many GB/s of input",
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    add_import(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    workload = _workload(args)
    gbps = _measured_gbps() if args.measure else args.gbps
    if args.measure and int(os.environ["RANK"]) > 0:
        return 0
    network = Network(bandwidth=gbps * 1e9 / 8, latency=args.latency_ms / 1e3)
    spec = TensorSpec(args.shape, DTYPES[args.dtype])
    limits = LIMITS[args.quality] if args.max_error is None else Limits(args.max_error, args.max_error)
    with contextlib.redirect_stdout(sys.stderr):  # deepspeed logs to stdout when it is imported
        rows = choice.rank(workload, network, candidates(args, spec, network, limits))
    chosen = choice.best(rows, limits)
    block = chosen["block"] if chosen else rows[0]["block"]
    if args.json:
        name = chosen["recipe"] if chosen else None
        print(json.dumps({"rows": rows, "best": name, "block": block}, indent=2))
        return 0
    message = f"{list(args.shape)} {args.dtype}"
    title = f"{args.stages} stages, {args.micro_batches} micro-batches, {message}, {gbps:.3g} Gbit/s"
    table = [
        {
            "recipe": row["recipe"],
            "link": f"{row['link']}, depth {row['depth']}",
            "error": f"{row['error_forward']:.3f} / {row['error_backward']:.3f}",
            "ratio": f"{2 * spec.nbytes / sum(row['wire_bytes']):.2f}",
            "step, ms": f"{1e3 * row['step_s']:.1f}",
            "speed-up": f"{row['speedup']:.2f}",
            "limited by": row["limit"],
            "link busy": f"{100 * row['link_busy']:.0f} %",
            "held, MB": f"{row['memory_bytes'] / 1e6:,.0f}",
        }
        for row in rows
    ]
    show(title, table)
    asked = f"--quality {args.quality}" if args.max_error is None else "--max-error"
    print(verdict(rows, chosen, limits, asked))
    if chosen:
        print(f'"{KEY}": {json.dumps(block)}')
    return 0


def candidates(
    args: argparse.Namespace, spec: TensorSpec, network: Network, limits: Limits
) -> list[Candidate]:
    """One for every recipe, DeepSpeed's own first."""
    raw = (Traffic(spec.nbytes),) * (args.stages - 1)
    stock = Candidate(STOCK, {"enabled": False}, raw, raw, eager=False)
    if args.recipe:
        return [stock, *_of_files(args, spec)]
    settings = []
    for offer in offers.offered():
        config = Config(offer.block)
        if not any(getattr(config.codecs(None), direction).refuses(spec) for direction in DIRECTIONS):
            settings.append(
                Setting(offer, *(_message(config, direction, spec, args) for direction in DIRECTIONS))
            )
    link = {"eager": True, "depth": args.depth, "rooms": _rooms(args, spec)}
    boundaries = args.stages - 1
    return [stock, *choice.candidates([settings] * boundaries, [network] * boundaries, limits, **link)]


def _of_files(args: argparse.Namespace, spec: TensorSpec) -> Iterator[Candidate]:
    blocks: dict[str, Any] = {path.stem: read_block(path) for path in args.recipe}
    if len(blocks) < len(args.recipe):
        raise CompressionError("--recipe: files of one name came; give each a name of its own")
    for name, block in blocks.items():
        try:
            config = Config(block)
            forward, backward = (_message(config, direction, spec, args) for direction in DIRECTIONS)
        except CompressionError as refused:
            raise CompressionError(f"recipe {name}: {refused}") from None
        link, count = config.block.link, args.stages - 1
        yield Candidate(
            name,
            block,
            (forward.traffic,) * count,
            (backward.traffic,) * count,
            link.mode == "eager",
            link.depth,
            (forward.error, backward.error),
            _rooms(args, spec, link.memory_gb),
        )


def _rooms(args: argparse.Namespace, spec: TensorSpec, memory_gb: float | None = None) -> tuple[Room, ...]:
    """`memory_gb`: what the block of a recipe allows."""
    held = args.held_mb * 1e6 if args.held_mb is not None else spec.nbytes
    limits = [gigabytes * 1e9 for gigabytes in (args.memory_gb, memory_gb) if gigabytes is not None]
    return (Room(held, limit=min(limits, default=float("inf"))),) * args.stages


def _workload(args: argparse.Namespace) -> Workload:
    if args.stages < 2:
        raise CompressionError(f"--stages: {args.stages} is not allowed: should be 2 or more")
    forward = _per_stage("--forward-ms", args.forward_ms, args.stages)
    backward = _per_stage(
        "--backward-ms", args.backward_ms or [2 * ms for ms in args.forward_ms], args.stages
    )
    return Workload(forward, backward, args.micro_batches, args.step_ms / 1e3)


def _per_stage(option: str, milliseconds: list[float], stages: int) -> tuple[float, ...]:
    if len(milliseconds) not in (1, stages):
        raise CompressionError(
            f"{option}: {len(milliseconds)} numbers for {stages} stages; give 1 or {stages}"
        )
    return tuple(ms / 1e3 for ms in milliseconds * (stages // len(milliseconds)))


def _message(config: Config, direction: str, spec: TensorSpec, args: argparse.Namespace) -> Message:
    """The messages of `direction`, at every boundary.

    Raises:
        CompressionError: those of different boundaries differ.
    """
    stages = args.stages if config.block.boundaries else 2
    row, *others = [row for row in message_sizes(config, stages, spec) if row["direction"] == direction]
    if any(other["codec"] != row["codec"] for other in others):
        raise CompressionError(
            f"{KEY}.boundaries: gives boundaries codecs of their own {direction}, but a step is predicted "
            "with the same at all of them; leave it out"
        )
    if row["codec"] in UNCOMPRESSED:
        return Message(Traffic(row["wire_bytes"]), 0.0)
    codec = getattr(config.codecs(0), direction)
    if args.codec_gbps:
        encode = decode = spec.nbytes / (args.codec_gbps * 1e9)
    else:
        encode, decode = codec_seconds(codec, spec, str(args.device))
    bits, error = size_and_loss(codec, spec, args.device)
    # What such a message takes at most says little where its size follows from the data
    nbytes = int(bits * spec.numel / 8) if isinstance(codec, SecondPacket) else row["wire_bytes"]
    return Message(Traffic(nbytes, encode, decode), error)


def _measured_gbps() -> float:
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise CompressionError(
            "--measure: start it on the ranks to measure between, for example: "
            "torchrun --nproc-per-node 2 -m ds_compress advise --measure ..."
        )
    dist.init_process_group("gloo")
    gbps = slowest_link_gbps()
    dist.barrier()
    dist.destroy_process_group()
    return gbps


def slowest_link_gbps() -> float:
    """Gbit/s of the slowest link from a rank to the next, one measured at a time; the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    message = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, device="cpu")
    seconds = torch.zeros(ranks, dtype=torch.float32, device="cpu")
    for sender in range(ranks - 1):
        dist.barrier()
        for sent in range(MEASURED_MESSAGES + 1):
            if sent == 1:  # the first one opens the connection
                started = time.perf_counter()
            if rank == sender:
                dist.send(message, sender + 1)
            elif rank == sender + 1:
                dist.recv(message, sender)
        if rank == sender + 1:
            seconds[rank] = time.perf_counter() - started
    dist.all_reduce(seconds)
    return 8e-9 * MEASURED_BYTES * MEASURED_MESSAGES / seconds.max().item()
