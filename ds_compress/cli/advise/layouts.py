"""Compare two layouts of a pipeline with replicas: which traffic crosses the links between machines.

    messages     a machine has all replicas of one stage; messages between stages cross its link
    gradients    a machine has all stages of one replica; gradients between replicas cross its link

The ranks of a machine share its link. Traffic inside a machine takes no time here. Gradients leave after the
last backward pass of their stage, so their transfer is added to the step.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from ds_compress.cli.advise.from_args import codec_seconds
from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.check import replica_sizes
from ds_compress.codec import TensorSpec
from ds_compress.config import Config
from ds_compress.planning import choice
from ds_compress.planning.choice import PipelineRecipe
from ds_compress.planning.step_time import MessageCost, Network, TransferPlan, Workload, predict

FOUR_BITS = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}
MEASURED = 1 << 20
"""Values of the gradient on which the codec is measured."""


def compare_layouts(
    args: argparse.Namespace, workload: Workload, recipes: Sequence[PipelineRecipe], network: Network
) -> list[dict[str, Any]]:
    """Return rows of (layout, settings, bytes of a machine, step_s), of both layouts.

    Args:
        args: with `replicas` and `parameters`, the values of a stage's large matrices.
        recipes: of messages between stages.
        network: of a machine.
    """
    shared = (Network(network.bandwidth / args.replicas, network.latency),) * (workload.stages - 1)
    rows = []
    for found in choice.rank(workload, shared, recipes):
        nbytes = args.replicas * workload.micro_batches * sum(found["wire_bytes"])
        rows.append(_row("messages", found["recipe"], nbytes, found["step_s"]))
    idle = MessageCost(0)
    free = predict(workload, TransferPlan(idle, idle, eager=True), Network()).step
    dtype = args.gradient_dtype or args.dtype or "fp32"
    bf16 = {} if dtype == "fp32" else {"parameters": 4}
    for name, options in {choice.BASELINE: None, "4 bits": {**FOUR_BITS, **bf16}}.items():
        config = Config({"replicas": options})
        sizes = replica_sizes(config, args.replicas, args.parameters, DTYPES[dtype])
        nbytes = workload.stages * sum(size["wire_bytes"] for size in sizes)
        seconds = nbytes / network.bandwidth + _codec_seconds(args, config)
        rows.append(_row("gradients", name, nbytes, free + seconds))
    return rows


def _codec_seconds(args: argparse.Namespace, config: Config) -> float:
    """Return how long a rank encodes and decodes gradients, each value once on its way and once back."""
    if config.replica_codec is None:
        return 0.0
    if args.codec_gbps:
        return 4 * args.parameters * torch.float32.itemsize / (args.codec_gbps * 1e9)
    spec = TensorSpec((min(MEASURED, args.parameters),), torch.float32)
    return 2 * sum(codec_seconds(config.replica_codec, spec, str(args.device))) * args.parameters / spec.numel


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
