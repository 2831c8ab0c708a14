"""Plan from a model: profile it in this process, and evaluate candidates on the messages between its stages.

Profile and evaluation are those of `"recipe": "auto"` (runtime/profile_model.py, planning/evaluate.py).
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from torch.utils._pytree import tree_map

from ds_compress.cli.advise import script
from ds_compress.cli.advise.inputs import (
    BoundaryMessages,
    PlanningInputs,
    file_recipes,
    memory_budgets,
    read_recipe_files,
    workload_from,
)
from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.console import importing_deepspeed
from ds_compress.config import DIRECTIONS, Config
from ds_compress.config.quality import ErrorLimits
from ds_compress.errors import CompressionError, errors_at
from ds_compress.message.channel import Boundary
from ds_compress.message.clock import clock_for
from ds_compress.planning import choice
from ds_compress.planning.candidates import Candidate, startable_candidates
from ds_compress.planning.choice import EvaluatedMessage, Evaluation
from ds_compress.planning.evaluate import ByMicroBatch, evaluate, to_evaluation
from ds_compress.planning.step_time import Network, Workload

if TYPE_CHECKING:
    from ds_compress.runtime.local_stages import Stages
    from ds_compress.runtime.profile_model import Batch, ModelProfile

OVERRIDES = ("forward_ms", "backward_ms", "activation_mb", "codec_gbps")
"""Options that replace what is measured."""


class ModelPlanner:
    """Makes planning inputs of the model that `--model` or `--probe` names."""

    def __init__(self, args: argparse.Namespace):
        """
        Raises:
            CompressionError: other options contradict that, or one is missing.
        """
        self._args = args
        self._name = f"--model {args.model}" if args.model else f"--probe {args.probe}"
        self._workload = workload_from(args)
        if args.probe and args.shape:
            raise CompressionError("--shape: is not allowed with --probe, whose function gives a micro-batch")
        if args.model and len(args.shape or ()) not in (2, 3):
            raise CompressionError(
                "--shape: with --model it should be sequences of a micro-batch, and tokens of each: 4,1024"
            )
        self._files = read_recipe_files(args.recipe or ())

    def inputs(self, network: Network, limits: ErrorLimits) -> PlanningInputs:
        """Return the planning inputs; candidates are mixed within `limits`."""
        with importing_deepspeed(), errors_at(self._name):
            profile = self._profile()
        args = self._args
        given = [f"--{name.replace('_', '-')}" for name in OVERRIDES if getattr(args, name) is not None]
        if given:
            print(f"{', '.join(given)}: taken as given, not as measured", file=sys.stderr)
        messages = profile.of_one_micro_batch
        forward, backward = (
            [sum(t.nbytes for t in messages[b, direction]) for b in range(args.stages - 1)]
            for direction in DIRECTIONS
        )
        activation_bytes = [
            float(input_bytes) if math.isnan(own) else own  # as with activation checkpointing
            for own, input_bytes in zip(profile.activation_bytes, [forward[0], *forward])
        ]
        evaluator = _Evaluator(profile, args.device, args.codec_gbps)
        budgets = partial(memory_budgets, args, activation_bytes)
        if self._files:
            found = [*file_recipes(self._files, evaluator.of_file, budgets)]
        else:
            networks = [network] * (args.stages - 1)
            link = {"eager": True, "depth": args.depth, "budgets": budgets()}
            found = choice.combine(evaluator.of_candidates(), networks, limits, **link)
        workload = self._workload or Workload(
            profile.forward, profile.backward, args.micro_batches, args.step_ms / 1e3
        )
        usable = [recipe for recipe in found if math.isfinite(max(recipe.errors))]
        sent = (messages[b, "forward"] for b in range(args.stages - 1))
        return PlanningInputs(
            workload,
            [choice.baseline(forward, backward), *usable],
            "; ".join(dict.fromkeys(map(_describe, sent))),
            self._measured(profile, evaluator),
        )

    def _profile(self) -> "ModelProfile":
        from ds_compress.runtime.profile_model import profile_model

        stages, loss_fn, batches = self._of_checkpoint() if self._args.model else self._of_script()
        return profile_model(stages, loss_fn, batches, self._args.device)

    def _of_checkpoint(self) -> "tuple[Stages, Any, Iterator[Batch]]":
        from ds_compress.runtime.local_stages import Stages

        try:
            from ds_compress.hf.pretrained import PretrainedModel
        except ImportError as error:
            raise CompressionError(f'{error}; pip install "ds_compress[hf]"') from None
        args, model = self._args, PretrainedModel(self._args.model)
        sequences, length, *width = args.shape
        if width and width != [model.width]:
            raise CompressionError(
                f"--shape: {width[0]} is not allowed in last place: the model has hidden states of "
                f"{model.width}; leave it out"
            )
        layers, bounds = model.layers(args.stages, DTYPES.get(args.dtype))
        stages = Stages(layers, bounds, args.device)
        return stages, model.loss_fn, model.batches(sequences, length)

    def _of_script(self) -> "tuple[Stages, Any, Iterator[Batch]]":
        from ds_compress.runtime.local_stages import Stages

        args, dtype = self._args, DTYPES.get(self._args.dtype)
        layers, loss_fn, (inputs, labels) = script.read(args.probe)
        if dtype is not None:
            inputs = tree_map(
                lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, inputs
            )
        return Stages(layers, args.stages, args.device, dtype), loss_fn, itertools.repeat((inputs, labels))

    def _measured(self, profile: "ModelProfile", evaluator: "_Evaluator") -> dict[str, Any]:
        stages = [
            {
                "stage": stage,
                "forward_ms": 1e3 * forward,
                "backward_ms": 1e3 * backward,
                "held_mb": None if math.isnan(nbytes) else nbytes / 1e6,
            }
            for stage, (forward, backward, nbytes) in enumerate(
                zip(profile.forward, profile.backward, profile.activation_bytes)
            )
        ]
        messages = [
            {
                "boundary": number,
                "direction": direction,
                "tensors": [{"shape": list(t.shape), "dtype": str(t.dtype).split(".")[1]} for t in tensors],
                "bytes": sum(t.nbytes for t in tensors),
                "settings": evaluator.measured(number, direction),
            }
            for (number, direction), tensors in sorted(profile.of_one_micro_batch.items())
        ]
        device, threads = str(self._args.device), torch.get_num_threads()
        return {"device": device, "threads": threads, "stages": stages, "messages": messages}


class _Evaluator:
    """Evaluates candidates at every boundary of a profiled model."""

    def __init__(self, profile: "ModelProfile", device: torch.device, codec_gbps: float | None):
        """`codec_gbps`: the speed of all codecs, instead of what is measured."""
        self._profile, self._clock, self._codec_gbps = profile, clock_for(device), codec_gbps
        self._boundaries = range(len(profile.dependence))
        self._evaluations: list[list[Evaluation]] = [[] for _ in self._boundaries]

    def of_candidates(self) -> list[list[Evaluation]]:
        """Evaluate every candidate; by boundary."""
        console, config = Console(stderr=True), Config({})
        found: list[list[Evaluation]] = [[] for _ in self._boundaries]
        pairs = list(itertools.product(self._boundaries, startable_candidates()))
        for number, candidate in track(pairs, "measuring", console=console, disable=not console.is_terminal):
            found[number].append(self._evaluate(number, config, candidate))
        return found

    def of_file(self, name: str, config: Config) -> BoundaryMessages:
        """Evaluate `config` as it is after its warm-up.

        Raises:
            CompressionError: a few messages are not enough to evaluate it.
        """
        config.check_boundaries(len(self._boundaries))
        found = []
        for number in self._boundaries:
            block = {
                direction: {key: value for key, (value, _) in config.chosen(number, direction).items()}
                for direction in DIRECTIONS
            }
            found.append(self._evaluate(number, config, Candidate(name, block, is_separable=False)))
        if not all(math.isfinite(own.forward.error + own.backward.error) for own in found):
            raise CompressionError(
                "cannot be measured on a few messages: it learns from its warm-up, needs sample ids, or does "
                "not take messages of this kind"
            )
        return [own.forward for own in found], [own.backward for own in found]

    def measured(self, boundary: int, direction: str) -> dict[str, dict[str, float]]:
        """Return what was measured of each usable candidate, by name; for JSON."""
        messages = ((own.candidate.name, getattr(own, direction)) for own in self._evaluations[boundary])
        return {
            name: {
                "bytes": message.cost.nbytes,
                "encode_ms": 1e3 * message.cost.encode,
                "decode_ms": 1e3 * message.cost.decode,
                "error": message.error,
            }
            for name, message in messages
            if math.isfinite(message.error)
        }

    def _evaluate(self, number: int, config: Config, candidate: Candidate) -> Evaluation:
        boundary = Boundary(number, config)
        boundary.dependence = self._profile.dependence[number]
        boundary.begin_step(self._profile.loss_scale)
        pair = [self._profile.messages[number, direction] for direction in DIRECTIONS]
        own = to_evaluation(candidate, evaluate(boundary, candidate, pair, self._clock))
        self._evaluations[number].append(own)
        gbps = self._codec_gbps
        return own if gbps is None else Evaluation(candidate, *_at_speed(own, pair, gbps))


def _at_speed(own: Evaluation, pair: Sequence[ByMicroBatch], gbps: float) -> Iterator[EvaluatedMessage]:
    """Replace measured times by those of codecs with `gbps`; codec `none` takes no time."""
    for direction, messages in zip(DIRECTIONS, pair):
        message: EvaluatedMessage = getattr(own, direction)
        codec = own.candidate.block[direction]["codec"]
        is_none = codec == "none" or (isinstance(codec, dict) and codec["name"] == "none")
        tensors = next(iter(messages.values()))
        seconds = 0.0 if is_none else sum(tensor.nbytes for tensor in tensors) / (gbps * 1e9)
        yield replace(message, cost=replace(message.cost, encode=seconds, decode=seconds))


def _describe(tensors: list[torch.Tensor]) -> str:
    return ", ".join(f"{list(t.shape)} {str(t.dtype).split('.')[1]}" for t in tensors)
