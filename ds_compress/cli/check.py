"""ds-compress check: validates the block of a ds_config.json and prints the bytes per message."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_compress.autoload import near_misses
from ds_compress.cli.arguments import DTYPES, add_import, add_message, integer, number
from ds_compress.cli.bench import measure_boundary
from ds_compress.cli.console import importing_deepspeed, show
from ds_compress.codec import CODECS, Codec, TensorSpec, bytes_of
from ds_compress.codecs.lowrank import LowRank
from ds_compress.codecs.mixins import layers
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.config.policies.base import LadderOptions, format_rung
from ds_compress.config.recipes import LIMITS
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Boundary
from ds_compress.message.packet import PacketLayout
from ds_compress.replicas.slices import slice_numel
from ds_compress.runtime.policy import PolicyController

UNCOMPRESSED = ("none", "none (below min_numel)")
"""Codec in the row of a message that is sent uncompressed."""


HELP = "validate a ds_config.json, and print the bytes of each message"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ds_config", type=Path, help="the DeepSpeed config to check")
    add_message(parser)
    parser.add_argument(
        "--replicas",
        type=integer(2, 2**16),
        help="number of data-parallel replicas: also print the bytes that a rank sends to them in a step; "
        "needs --parameters",
    )
    parser.add_argument(
        "--parameters",
        type=integer(1, 2**45),
        help="number of values in the parameters of a stage that are compressed: its matrices of 16,384 "
        "values or more",
    )
    parser.add_argument(
        "--gbps",
        type=number(1e-6, 1e6),
        help="bandwidth in Gbit/s: also encode and decode a message on this device, and say where that takes "
        "longer than sending it uncompressed",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_import(parser)


def run(args: argparse.Namespace) -> int:
    config = Config(read_block(args.ds_config))
    rows = message_sizes(config, args.stages, TensorSpec(args.shape, DTYPES[args.dtype]))
    if config.block.enabled:
        # refuses what a run refuses
        PolicyController(config, args.stages - 1, "cpu", lambda tensor: [tensor])
    keys = ("boundary", "direction", "raw_bytes", "wire_bytes")
    larger = dict.fromkeys(config.in_force.size_note(*(row[key] for key in keys)) for row in rows)
    if bool(args.replicas) != bool(args.parameters):
        raise CompressionError("check: --replicas needs --parameters, and --parameters --replicas")
    if args.replicas:
        rows += replica_sizes(config, args.replicas, args.parameters, DTYPES[args.dtype], args.shape[-1])
    slow = slow_notes(config, rows, args) if args.gbps else ()
    alone = "" if rows else "one stage sends no messages; --replicas and --parameters show what replicas send"
    policy = [_policy_note(config)] if args.stages > 1 else []
    about = alone, _auto_note(config), *policy, *config.notes, *larger, *slow
    for note in filter(None, about):
        print(note, file=sys.stderr)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    state = "" if config.block.enabled else ' ("enabled": false, compression is off)'
    varies = any(row["wire_bytes_at_most"] > row["wire_bytes"] for row in rows)
    title = f"{args.ds_config}: {args.stages} stages, message {list(args.shape)} {args.dtype}{state}"
    table = [
        {
            "boundary": str(row["boundary"]),
            "direction": row["direction"],
            "codec": row["codec"],
            "raw bytes": f"{row['raw_bytes']:,}",
            "wire bytes": f"{row['wire_bytes']:,}",
            **({"at most": f"{row['wire_bytes_at_most']:,}"} if varies else {}),
            "ratio": f"{row['ratio']:.2f}",
            "bits/value": f"{row['bits_per_value']:.3f}",
        }
        for row in rows
    ]
    show(title, table)
    return 0


def _auto_note(config: Config) -> str:
    """Return a note that recipe "auto" has no settings yet; empty for every other recipe."""
    if config.quality is None or not config.block.enabled:
        return ""
    limits = LIMITS[config.quality]
    return (
        f"{KEY}.recipe: 'auto' chooses codecs in the first steps of training, with token errors up "
        f"to {limits.forward:g} forward and errors up to {limits.backward:g} of accumulated gradients; these "
        "are the sizes until then. ds-compress advise makes the same choice without training"
    )


def _policy_note(config: Config) -> str:
    """Return a note that a policy sets other options than the block has; empty without a ladder."""
    options = config.policy.options
    if not isinstance(options, LadderOptions) or not config.block.enabled:
        return ""
    ladders = ((direction, options.rungs(direction)) for direction in DIRECTIONS)
    found = "; ".join(f"{d}: {', then '.join(map(format_rung, rungs))}" for d, rungs in ladders if rungs)
    return (
        f"{KEY}.policy: {config.policy.name!r} sets codecs from the first step on ({found}); these are the "
        "sizes of the codecs as the block has them"
    )


def replica_sizes(
    config: Config, replicas: int, parameters: int, dtype: torch.dtype, width: int = 1
) -> list[dict[str, Any]]:
    """One row for gradients, one for parameters: what a rank sends to the replicas of its stage in a step.

    Between launches: one row for what it sends in a round, and all-reduces in fp32 in all of its steps.

    Args:
        parameters: values of the stage that are large enough to be compressed.
        dtype: of training. In fp32 there is no ZeRO; else replicas have partitions of the optimizer states.
        width: rows and columns that the matrices are taken to have, for codec `lowrank`.
    """
    options, codec = config.block.replicas, config.replica_codec
    if config.outer is not None and config.outer_codec is not None and options is not None:
        raw_bytes = 8 * (replicas - 1) * parameters * options.every // replicas
        wire_bytes = _packet_bytes(config.outer_codec, parameters)
        return [_row("replicas", "weights", config.outer_codec, parameters, raw_bytes, wire_bytes)]
    partitioned = dtype != torch.float32
    sent = {"gradients": (codec, 2, 1 if partitioned else 2)}
    if partitioned:
        bits = options.parameters if options is not None else "none"
        changes = CODECS.build({"name": "quantize", "bits": bits}, "parameters") if bits != "none" else None
        sent["parameters"] = changes, 1, 1
    rows = []
    for what, (used, ways, compressed_ways) in sent.items():
        raw_bytes = wire_bytes = (replicas - 1) * ways * -(-parameters // replicas) * dtype.itemsize
        if used is not None and any(layers(used, LowRank)):  # no packets, but a ring's all-reduce of factors
            share = bytes_of(used.layout(TensorSpec((width, width), torch.float32))) / width**2
            wire_bytes = round(2 * (replicas - 1) * parameters * share / replicas)
        elif used is not None:
            packet = _packet_bytes(used, slice_numel(parameters, replicas))
            wire_bytes = (replicas - 1) * compressed_ways * packet
        rows.append(_row("replicas", what, used or UNCOMPRESSED[0], parameters, raw_bytes, wire_bytes))
    return rows


def _packet_bytes(codec: Codec, values: int) -> int:
    return PacketLayout(codec.layout(TensorSpec((values,), torch.float32)), "").nbytes


def _row(
    place: int | str, direction: str, codec: object, values: int, raw: int, wire: int, most: int | None = None
) -> dict[str, Any]:
    """Return a row; `raw`, `wire`: bytes uncompressed, and on the wire; `most`: at most, if that is more."""
    return {
        "boundary": place,
        "direction": direction,
        "codec": str(codec),
        "raw_bytes": raw,
        "wire_bytes": wire,
        "wire_bytes_at_most": wire if most is None else most,
        "ratio": raw / wire,
        "bits_per_value": 8 * wire / values,
    }


def slow_notes(config: Config, rows: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> Iterator[str]:
    """Yield one line for each codec that takes longer than sending its message uncompressed.

    Args:
        rows: of `message_sizes`.
        args: of the command: `shape`, `dtype`, and `gbps` of the link.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec, measured = TensorSpec(args.shape, DTYPES[args.dtype], device), set[str]()
    for row in rows:
        place, direction = row["boundary"], row["direction"]
        if place == "replicas" or row["codec"] in (*UNCOMPRESSED, *measured):
            continue
        measured.add(row["codec"])
        found = measure_boundary(config, place, spec)[direction]
        encode, decode = found.encode, found.decode
        uncompressed = 8e-9 * row["raw_bytes"] / args.gbps
        if encode + decode > uncompressed:
            yield (
                f"{KEY}.{direction}.codec: {row['codec']} takes {encode:.2g} + {decode:.2g} s to encode and "
                f"decode a message on this device ({device.type}, {torch.get_num_threads()} threads); "
                f"sending it uncompressed at {args.gbps:g} Gbit/s takes {uncompressed:.2g} s; use another "
                "codec, or 'none'"
            )


def read_block(path: Path) -> object:
    """Read the "ds_compress" value of a ds_config.json.

    Raises:
        CompressionError: no such file, not what DeepSpeed reads, or no such key.
    """
    with importing_deepspeed():
        from ds_compress.engine.deepspeed import read_ds_config
    try:
        ds_config = read_ds_config(path)
    except OSError as error:
        raise CompressionError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise CompressionError(f"{path}: not JSON as DeepSpeed reads it: {reason}") from None
    if not isinstance(ds_config, dict) or KEY not in ds_config:
        near = near_misses(ds_config) if isinstance(ds_config, dict) else []
        hint = f" (did you mean it by {near[0]!r}?)" if near else ""
        raise CompressionError(f"{path}: has no {KEY!r} key{hint}")
    return ds_config[KEY]


def message_sizes(config: Config, stages: int, spec: TensorSpec) -> list[dict[str, Any]]:
    """Compute one row per boundary and direction for messages of one tensor of `spec`, after the warm-up.

    Where the size follows from the data (lossless), wire_bytes is what a message takes at most; with aqsgd,
    what one takes whose samples have all come before, and wire_bytes_at_most what one of first visits does.

    Raises:
        CompressionError: settings for a boundary that does not exist.
    """
    config.in_force.check_boundaries(stages - 1)
    rows = []
    for place in range(stages - 1):
        boundary = Boundary(place, config)
        for direction in DIRECTIONS:
            channel = getattr(boundary, direction)
            message = channel.layout_of((spec,), channel.message_id(config.warmup_steps, 0))
            codec = channel.codec if message.codecs[0] else UNCOMPRESSED[1]
            on_wire = message.compressed_bytes(channel.codec), message.most_bytes(channel.codec)
            rows.append(_row(place, direction, codec, spec.numel, message.raw_bytes, *on_wire))
    return rows
