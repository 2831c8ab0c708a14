"""Plan for `ds-compress advise`: compute times, network, memory, and the recipes to compare."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed as dist

from ds_compress.cli.advise.from_args import ArgsEvaluator
from ds_compress.cli.advise.from_model import ModelEvaluator
from ds_compress.cli.check import read_block
from ds_compress.config import Config
from ds_compress.config.quality import ErrorLimits
from ds_compress.errors import CompressionError, errors_at
from ds_compress.planning import choice
from ds_compress.planning.choice import PipelineRecipe
from ds_compress.planning.depth import MemoryBudget
from ds_compress.planning.step_time import LinkSpeed, Workload
from ds_compress.transport.p2p import PeerTimeout
from ds_compress.transport.probe import probe_neighbours

if TYPE_CHECKING:
    from ds_compress.hf.footprint import StageFootprint


class PlanningInputs(NamedTuple):
    workload: Workload
    recipes: list[PipelineRecipe]
    """The baseline first."""
    message: str
    """What crosses a boundary, for the title of the table."""
    measured: dict[str, Any] | None
    """What was measured on a model, as `--json` prints it."""


class Planner:
    """Makes planning inputs of options, or of the model that `--model` or `--probe` names."""

    def __init__(self, args: argparse.Namespace, footprint: "Sequence[StageFootprint]" = ()):
        """
        Args:
            footprint: of each stage, where it was predicted.

        Raises:
            CompressionError: an option is missing or wrong, or contradicts another one.
        """
        self._args, self._footprint = args, footprint
        kind = ModelEvaluator if args.model or args.probe else ArgsEvaluator
        self._evaluator = kind(args, workload_from(args))
        self._files = read_recipe_files(args.recipe or ())

    def inputs(self, network: LinkSpeed, limits: ErrorLimits) -> PlanningInputs:
        """Return the planning inputs; candidates are mixed within `limits`."""
        args, evaluator = self._args, self._evaluator
        evaluator.prepare()
        if self._files:
            found = [self._file_recipe(name, *own) for name, own in self._files.items()]
        else:
            networks = [network] * (args.stages - 1)
            link = {"eager": True, "depth": args.depth, "budgets": self._budgets()}
            found = choice.combine(evaluator.of_candidates(), networks, limits, **link)
        usable = [recipe for recipe in found if math.isfinite(max(recipe.errors))]
        recipes = [choice.uncompressed_recipe(*evaluator.raw_bytes), *usable]
        return PlanningInputs(evaluator.workload, recipes, evaluator.message, evaluator.measured())

    def _file_recipe(self, name: str, block: Any, config: Config) -> PipelineRecipe:
        with errors_at(f"recipe {name}"):
            both = self._evaluator.of_file(name, config)
        forward, backward = (tuple(message.cost for message in own) for own in both)
        errors = choice.largest_errors(*both)
        link, limits = config.block.link, self._budgets(config.block.link.memory_gb)
        return PipelineRecipe(
            name, block, forward, backward, link.mode == "eager", link.depth, errors, limits
        )

    def _budgets(self, memory_gb: float | None = None) -> tuple[MemoryBudget, ...]:
        """Return the memory budget of each stage; `memory_gb`: the limit in the block of a recipe."""
        args, activation_bytes = self._args, self._evaluator.activation_bytes
        whole, of_block = (math.inf if own is None else own * 1e9 for own in (args.memory_gb, memory_gb))
        fixed = [0] * args.stages
        if self._footprint:
            activation_bytes = [float(own.activations) for own in self._footprint]
            fixed = [own.parameters + own.trained + own.working for own in self._footprint]
        if args.activation_mb is not None:
            activation_bytes = [args.activation_mb * 1e6] * args.stages
        limits = [min(whole - taken, of_block) for taken in fixed]
        return tuple(MemoryBudget(own, limit=limit) for own, limit in zip(activation_bytes, limits))


def workload_from(args: argparse.Namespace) -> Workload | None:
    """Return the workload that options give; None where none gives the times of the passes.

    Raises:
        CompressionError: the numbers do not fit the stages, or backward passes alone are given.
    """
    if args.forward_ms is None:
        if args.backward_ms is not None:
            raise CompressionError("--backward-ms: came without --forward-ms; give both, or none of them")
        return None
    forward = _per_stage("--forward-ms", args.forward_ms, args.stages)
    backward = args.backward_ms or [2 * ms for ms in args.forward_ms]
    return Workload(
        forward,
        _per_stage("--backward-ms", backward, args.stages),
        args.micro_batches,
        args.step_ms / 1e3,
    )


def _per_stage(option: str, milliseconds: list[float], stages: int) -> tuple[float, ...]:
    if len(milliseconds) not in (1, stages):
        raise CompressionError(
            f"{option}: {len(milliseconds)} numbers for {stages} stages; give 1 or {stages}"
        )
    return tuple(ms / 1e3 for ms in milliseconds * (stages // len(milliseconds)))


def read_recipe_files(paths: Sequence[Path]) -> dict[str, tuple[Any, Config]]:
    """Read the blocks of `--recipe`, as written and as checked, by name.

    Raises:
        CompressionError: a file or its block is bad, or two files share a name.
    """
    blocks = {path.stem: read_block(path) for path in paths}
    if len(blocks) < len(paths):
        raise CompressionError("--recipe: two files have the same name; rename one of them")
    found = {}
    for name, block in blocks.items():
        with errors_at(f"recipe {name}"):
            found[name] = block, Config(block)
    return found


def measure_gbps() -> float:
    """Return the Gbit/s of the slowest link between neighbouring ranks; every rank calls it.

    Raises:
        CompressionError: there is only one rank.
    """
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
    """Return the Gbit/s of the slowest link from a rank to the next; the same on every rank."""
    links = probe_neighbours(torch.device("cpu"), PeerTimeout("ds-compress advise --measure"))
    incoming = [link.incoming for peer, link in links.items() if peer < dist.get_rank()]
    slowest = torch.tensor(min(incoming, default=float("inf")), dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    return 8e-9 * slowest.item()
