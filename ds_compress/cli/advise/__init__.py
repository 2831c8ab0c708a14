"""ds-compress advise: predict which recipe pays on a link, or that none does.

It replays DeepSpeed's schedule (`ds_compress.planning.step_time`) with real packet sizes, and codec speeds
measured here. Options give compute times and the shape of messages. With `--finetune` they are predicted,
memory included, from a train.json and the config.json of its model. `ds-compress doctor` measures links;
`"recipe": "auto"` measures compute times and errors in a run.
"""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ds_compress.cli.advise.format import format_footprint, format_row, format_verdict
from ds_compress.cli.advise.planner import list_recipes, predict_run, read_recipe_files, workload_from
from ds_compress.cli.arguments import add_import, add_message, device, integer, number, numbers
from ds_compress.cli.console import importing_deepspeed, show
from ds_compress.config import KEY
from ds_compress.config.recipes import DEFAULT, LIMITS
from ds_compress.planning import choice
from ds_compress.planning.depth import MAX_DEPTH
from ds_compress.planning.step_time import LinkSpeed


def depth(text: str) -> int | str:
    """Return the type of `--depth`."""
    return text if text == "auto" else integer(1, MAX_DEPTH)(text)


HELP = "predict, without training, which recipe and depth are the fastest for a model and a link"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_message(parser, required=False)
    parser.set_defaults(dtype=None)
    parser.add_argument(
        "--finetune",
        type=Path,
        metavar="TRAIN_JSON",
        help="predict memory and compute times of a fine-tuning run from its train.json, and from the "
        "config.json of its model alone; needs --tflops",
    )
    parser.add_argument(
        "--tflops",
        type=number(1e-6, 1e6),
        help="with --finetune: operations that a GPU computes in a second of training, in units of 10^12",
    )
    parser.add_argument(
        "--tied",
        type=integer(1, 10**12),
        metavar="VALUES",
        help="values of a trained weight that the first and the last stage share, such as vocabulary x width "
        "of a tied embedding: its gradient is exchanged in each step; --finetune finds it",
    )
    parser.add_argument(
        "--micro-batches",
        type=integer(1, 10_000),
        help="micro-batches of a step, gradient_accumulation_steps",
    )
    parser.add_argument(
        "--forward-ms",
        type=numbers(1e-6, 1e9),
        help="time of the forward pass of a micro-batch on one stage, in ms: one number for all stages, or "
        'one for each, such as 16,16,18; the report of "recipe": "auto" has them',
    )
    parser.add_argument(
        "--backward-ms",
        type=numbers(0, 1e9),
        help="time of the backward pass, likewise (default: twice the forward time)",
    )
    parser.add_argument(
        "--step-ms",
        type=number(0, 1e9),
        default=0.0,
        help="time of the rest of a step, in ms: optimizer, sum of the losses (default: 0)",
    )
    parser.add_argument(
        "--gbps",
        type=number(1e-6, 1e6),
        required=True,
        help="bandwidth of the link between stages, in Gbit/s in each direction; `doctor` measures it",
    )
    parser.add_argument(
        "--latency-ms", type=number(0, 1e9), default=0.0, help="one-way link latency in ms (default: 0)"
    )
    parser.add_argument(
        "--recipe",
        type=Path,
        nargs="+",
        metavar="DS_CONFIG",
        help="ds_config.json files to compare (default: all recipes, more codecs, and mixtures of them, sent "
        "eagerly)",
    )
    parser.add_argument(
        "--depth",
        type=depth,
        default="auto",
        help="pipeline depth (link.depth) of the built-in candidates (default: auto, the fastest that fits)",
    )
    parser.add_argument(
        "--activation-mb",
        type=number(0, 1e9),
        help="activation memory per micro-batch on a stage, in MB (default: that of its input, as with "
        "activation checkpointing)",
    )
    parser.add_argument(
        "--memory-gb",
        type=number(1e-9, 1e6),
        help="memory in GB that a deeper pipeline may use on a stage; with --finetune: memory of a GPU "
        "(default: no limit)",
    )
    parser.add_argument(
        "--quality", choices=LIMITS, default=DEFAULT, help=f"error budget (default: {DEFAULT})"
    )
    parser.add_argument(
        "--device",
        type=device,
        default="cpu",
        help="device on which codecs are measured: cpu, cuda (default: cpu)",
    )
    parser.add_argument(
        "--codec-gbps",
        type=number(1e-6, 1e6),
        help="speed of encoding and of decoding, in GB/s of input, for all codecs (default: measured)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_import(parser)


def run(args: argparse.Namespace) -> int:
    footprint = predict_run(args) if args.finetune else []
    workload = workload_from(args)
    args.dtype = args.dtype or "fp32"
    files = read_recipe_files(args.recipe or ())
    network = LinkSpeed(bandwidth=args.gbps * 1e9 / 8, latency=args.latency_ms / 1e3)
    limits = LIMITS[args.quality]
    recipes = list_recipes(args, files, footprint, network, limits)
    with importing_deepspeed():  # whose schedules are replayed
        rows = choice.rank(workload, (network,) * (args.stages - 1), recipes)
    best = choice.pick_best(rows, limits)
    block = best["block"] if best else rows[0]["block"]
    if args.json:
        name = best["recipe"] if best else None
        more = {"predicted": [{**asdict(own), "total": own.total} for own in footprint]} if footprint else {}
        print(json.dumps({"rows": rows, "best": name, "block": block, **more}, indent=2))
        return 0
    print(format_verdict(rows, best, args.quality))
    if best:
        print(f'"{KEY}": {json.dumps(block)}')
    if footprint:
        print()
        show(*format_footprint(footprint))
    counts = f"{args.stages} stages, {args.micro_batches} micro-batches"
    title = f"{counts}, {list(args.shape)} {args.dtype}, {args.gbps:.3g} Gbit/s"
    print()
    show(title, list(map(partial(format_row, rows[0]), rows)))
    return 0
