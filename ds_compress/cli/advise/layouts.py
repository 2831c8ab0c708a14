"""Compare layouts of a pipeline with replicas: which traffic crosses the links between machines.

    messages     a machine has all replicas of one stage; messages between stages cross its link
    gradients    a machine has all stages of one replica; gradients between replicas cross its link

The ranks of a machine share its link. Traffic inside a machine takes no time here. Gradients leave after the
last backward pass of their stage, so their transfer is added to the step.

Replicas may also be launched apart, one on a machine, and exchange their progress every H steps through a
store. It is on a machine with a link of the same speed, which all packets of a round cross.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch

from ds_compress.cli.advise.from_args import codec_seconds
from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.check import replica_sizes
from ds_compress.codec import Codec, TensorSpec
from ds_compress.config import Config
from ds_compress.planning import choice
from ds_compress.planning.choice import PipelineRecipe
from ds_compress.planning.step_time import LinkSpeed, MessageCost, TransferPlan, Workload, predict
from ds_compress.replicas.rounds import CHUNK

FOUR_BITS = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}
VALUES = {"name": "quantize", "bits": 3, "group_size": 64}
TOPK = {"name": "topk", "density": 0.016, "indices": "rice", "values": VALUES}
APART: dict[str, dict[str, Any]] = {
    "none": {"codec": "none"},
    "4 bits, ef": FOUR_BITS,
    "TopK of 1.6 %, ef": {"codec": TOPK, "feedback": "ef"},
}
"""Codecs of replicas that are launched apart, those that lose least first."""
EVERY = 30
"""Steps between two rounds, if the link is fast enough."""
ROUND_TRIPS = 30
"""Round trips between a replica and the store in a round, without those for packets."""
TRIPS_OF_CHUNK = 3
MEASURED = 1 << 20
"""Values of the gradient on which the codec is measured."""


def compare_layouts(
    args: argparse.Namespace, workload: Workload, recipes: Sequence[PipelineRecipe], network: LinkSpeed
) -> list[dict[str, Any]]:
    """Return rows of (layout, settings, bytes of a machine, step_s), of both layouts.

    Args:
        args: with `replicas` and `parameters`, the values of a stage's large matrices.
        recipes: of messages between stages.
        network: of a machine.
    """
    shared = (LinkSpeed(network.bandwidth / args.replicas, network.latency),) * (workload.stages - 1)
    rows = []
    for found in choice.rank(workload, shared, recipes):
        # an inner stage sends both ways, the first and the last one way
        sent = (sum if workload.stages > 2 else max)(found["wire_bytes"])
        nbytes = args.replicas * workload.micro_batches * sent
        rows.append(_row("messages", found["recipe"], nbytes, found["step_s"]))
    free = _free_step(workload)
    dtype = args.gradient_dtype or args.dtype or "fp32"
    bf16 = {} if dtype == "fp32" else {"parameters": 4}
    for name, options in {choice.BASELINE: None, "4 bits": {**FOUR_BITS, **bf16}}.items():
        config = Config({"replicas": options})
        sizes = replica_sizes(config, args.replicas, args.parameters, DTYPES[dtype])
        nbytes = workload.stages * sum(size["wire_bytes"] for size in sizes)
        # each value is encoded and decoded once on its way and once back
        seconds = nbytes / network.bandwidth + 2 * sum(_codec_seconds(args, config.replica_codec))
        rows.append(_row("gradients", name, nbytes, free + seconds))
    return rows


def predict_rounds(args: argparse.Namespace, workload: Workload, network: LinkSpeed) -> list[dict[str, Any]]:
    """Return a row for each codec of replicas that are launched apart.

    Returns:
        settings; round_bytes: that a machine sends in a round; round_s; delay: the fewest steps in which a
        round is over: with `every` and `outer.delay` of so many, as in block, training waits for nothing;
        share_of_free_step: speed with rounds of `EVERY` steps, over that of replicas that never talk.
    """
    free, others = _free_step(workload), args.replicas - 1
    rows = []
    for name, options in APART.items():
        config = Config({"replicas": {**options, "every": EVERY}})
        (size,) = replica_sizes(config, args.replicas, args.parameters, torch.float32)
        nbytes = workload.stages * size["wire_bytes"]
        trips = ROUND_TRIPS + others * TRIPS_OF_CHUNK * (1 + -(-size["wire_bytes"] // CHUNK))
        encode, decode = _codec_seconds(args, config.outer_codec, is_on_host=True)
        # all send to the store, then it sends every replica the packets of the others
        seconds = args.replicas * (1 + others) * nbytes / network.bandwidth
        seconds += 2 * trips * network.latency + encode + args.replicas * decode
        delay = math.ceil(seconds / free)
        apart = {"every": max(delay, EVERY), "outer": {"delay": delay}}
        rows.append(
            {
                "settings": name,
                "block": {"replicas": {**options, **apart}},
                "round_bytes": nbytes,
                "round_s": seconds,
                "delay": delay,
                "share_of_free_step": EVERY * free / max(EVERY * free, seconds),
            }
        )
    return rows


def _free_step(workload: Workload) -> float:
    """Return the seconds of a step in which nothing takes time but the passes."""
    idle = MessageCost(0)
    return predict(workload, TransferPlan(idle, idle, eager=True), LinkSpeed()).step


def _codec_seconds(
    args: argparse.Namespace, codec: Codec | None, is_on_host: bool = False
) -> tuple[float, float]:
    """Return how long a rank encodes, and decodes, all values of a stage once."""
    if codec is None or codec.name == "none":
        return 0.0, 0.0
    if args.codec_gbps:
        seconds = args.parameters * torch.float32.itemsize / (args.codec_gbps * 1e9)
        return seconds, seconds
    spec = TensorSpec((min(MEASURED, args.parameters),), torch.float32)
    encode, decode = codec_seconds(codec, spec, "cpu" if is_on_host else str(args.device))
    return encode * args.parameters / spec.numel, decode * args.parameters / spec.numel


def _row(layout: str, settings: str, nbytes: int, seconds: float) -> dict[str, Any]:
    return {"layout": layout, "settings": settings, "machine_bytes": nbytes, "step_s": seconds}


def format_layouts(rows: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, str]]]:
    """Format the rows of `compare_layouts`: a line that says what is faster, and a row for each."""
    best = min(rows, key=lambda row: row["step_s"])
    inside = {"messages": "all replicas of a stage", "gradients": "all stages of a replica"}[best["layout"]]
    title = f"Fastest with {inside} in each machine: {best['settings']}, {best['step_s']:.3g} s a step"
    table = [
        {
            "crosses machines": row["layout"],
            "settings": row["settings"],
            "MB a machine sends": f"{row['machine_bytes'] / 1e6:,.1f}",
            "step, ms": f"{1e3 * row['step_s']:,.1f}",
        }
        for row in rows
    ]
    return title, table


def format_rounds(rows: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, str]]]:
    """Format the rows of `predict_rounds`: the first codec for which training waits for nothing, and all."""
    free = next((row for row in rows if row["delay"] <= EVERY), rows[-1])
    steps = max(free["delay"], EVERY)
    title = (
        f'With a launch for each replica: {free["settings"]}, "every": {steps}, "delay": {free["delay"]}: a '
        f"round takes {free['round_s']:.3g} s, and training waits for nothing"
    )
    table = [
        {
            "codec": row["settings"],
            "MB a machine sends": f"{row['round_bytes'] / 1e6:,.1f}",
            "round, s": f"{row['round_s']:,.2f}",
            "least every and delay": str(row["delay"]),
            f"speed at every {EVERY}": f"{row['share_of_free_step']:.0%}",
        }
        for row in rows
    ]
    return title, table
