"""Plan from options: they give compute times and messages; codecs are measured on the benchmark's tensor."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from ds_compress.cli.advise.inputs import (
    BoundaryMessages,
    PlanningInputs,
    file_recipes,
    memory_budgets,
    read_recipe_files,
    workload_from,
)
from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.bench import benchmark_tensor, contexts, seconds_per_call, size_and_error
from ds_compress.cli.check import UNCOMPRESSED, message_sizes
from ds_compress.codec import Codec, TensorSpec
from ds_compress.codecs.mixins import ObservesWarmup, VariableSizePayload, layers
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.config.quality import ErrorLimits
from ds_compress.errors import CompressionError
from ds_compress.feedback import FeedbackCodec
from ds_compress.planning import choice
from ds_compress.planning.candidates import all_candidates
from ds_compress.planning.choice import EvaluatedMessage, Evaluation, PipelineRecipe
from ds_compress.planning.step_time import MessageCost, Network

ERROR_NUMEL = 1 << 20
"""Sizes and errors are measured on at most so many values of a message."""
FITTED_WIDTH = 1024
"""Codecs that fit a basis are measured on rows of at most this width: fitting takes its cube."""


class ArgsPlanner:
    """Makes planning inputs of what options give."""

    def __init__(self, args: argparse.Namespace):
        """
        Raises:
            CompressionError: an option is missing or wrong.
        """
        workload = workload_from(args)
        for option, value in (("--forward-ms", workload), ("--shape", args.shape)):
            if value is None:
                raise CompressionError(
                    f"{option}: missing; give it, or --model or --probe to have it measured"
                )
        assert workload is not None
        self._args, self._workload = args, workload
        self._files = read_recipe_files(args.recipe or ())
        dtype = args.dtype or "fp32"
        self._spec = TensorSpec(args.shape, DTYPES[dtype])
        self._message = f"{list(args.shape)} {dtype}"

    def inputs(self, network: Network, limits: ErrorLimits) -> PlanningInputs:
        """Return the planning inputs; candidates are mixed within `limits`."""
        raw = (self._spec.nbytes,) * (self._args.stages - 1)
        found = self._of_files() if self._files else self._of_candidates(network, limits)
        return PlanningInputs(self._workload, [choice.baseline(raw, raw), *found], self._message)

    def _of_candidates(self, network: Network, limits: ErrorLimits) -> list[PipelineRecipe]:
        evaluations = []
        for candidate in all_candidates():
            config = Config(candidate.block)
            codecs = config.codecs(None)
            if not any(getattr(codecs, direction).refuses(self._spec) for direction in DIRECTIONS):
                messages = (self._evaluate(config, direction) for direction in DIRECTIONS)
                evaluations.append(Evaluation(candidate, *messages))
        boundaries = self._args.stages - 1
        budgets = memory_budgets(self._args, self._activation_bytes)
        link = {"eager": True, "depth": self._args.depth, "budgets": budgets}
        return choice.combine([evaluations] * boundaries, [network] * boundaries, limits, **link)

    @property
    def _activation_bytes(self) -> list[float]:
        """By stage: its input, as with activation checkpointing."""
        return [float(self._spec.nbytes)] * self._args.stages

    def _of_files(self) -> Iterator[PipelineRecipe]:
        def messages(name: str, config: Config) -> BoundaryMessages:
            forward, backward = (self._evaluate(config, direction) for direction in DIRECTIONS)
            count = self._args.stages - 1
            return [forward] * count, [backward] * count

        budgets = partial(memory_budgets, self._args, self._activation_bytes)
        return file_recipes(self._files, messages, budgets)

    def _evaluate(self, config: Config, direction: str) -> EvaluatedMessage:
        """Evaluate the messages of `direction`, which are the same at every boundary.

        Raises:
            CompressionError: boundaries have different codecs.
        """
        args, spec = self._args, self._spec
        stages = args.stages if config.block.boundaries else 2
        row, *others = [row for row in message_sizes(config, stages, spec) if row["direction"] == direction]
        if any(other["codec"] != row["codec"] for other in others):
            raise CompressionError(
                f"{KEY}.boundaries: gives boundaries codecs of their own {direction}, but a step is "
                "predicted with the same at all of them; leave it out"
            )
        if row["codec"] in UNCOMPRESSED:
            return EvaluatedMessage(MessageCost(row["wire_bytes"]), 0.0)
        codec = getattr(config.codecs(0), direction)
        if args.codec_gbps:
            encode = decode = spec.nbytes / (args.codec_gbps * 1e9)
        else:
            encode, decode = codec_seconds(codec, spec, str(args.device))
        bits, error = _bits_and_error(codec, spec, args.device)
        # Where the size depends on the data, `check` gives its maximum
        nbytes = int(bits * spec.numel / 8) if isinstance(codec, VariableSizePayload) else row["wire_bytes"]
        return EvaluatedMessage(MessageCost(nbytes, encode, decode), error)


def codec_seconds(codec: Codec, spec: TensorSpec, device: str) -> tuple[float, float]:
    """Measure the seconds to encode and to decode a tensor of `spec`, once per process.

    A product with a basis costs each value a constant, and a share that grows with the width of its row. For
    rows too wide to fit a basis, the time is extrapolated linearly from two narrower widths.
    """
    key = str(codec.settings), spec, device
    if key not in _speeds:
        fitted = _limit_width(codec, spec)
        encode, decode = _measure(codec, fitted, device)
        if fitted != spec:
            half = _measure(codec, _with_width(FITTED_WIDTH // 2, spec), device)
            beyond = (spec.shape[-1] - FITTED_WIDTH) / (FITTED_WIDTH // 2)
            encode += max(0.0, encode - half[0]) * beyond
            decode += max(0.0, decode - half[1]) * beyond
        _speeds[key] = encode, decode
    return _speeds[key]


def _measure(codec: Codec, spec: TensorSpec, device: str) -> tuple[float, float]:
    x = benchmark_tensor(spec.shape, spec.dtype, torch.device(device))
    sender, receiver = contexts(codec, x)
    parts, own = codec.encode(x, sender), TensorSpec.of(x)
    return (
        seconds_per_call(lambda: codec.encode(x, sender), x.device),
        seconds_per_call(lambda: codec.decode(parts, own, receiver), x.device),
    )


def _bits_and_error(codec: Codec, spec: TensorSpec, device: torch.device) -> tuple[float, float]:
    """Measure bits per value and ||x - C(x)|| / ||x|| of one message, once per process.

    A feedback does not count, as it acts on later messages. A gradient that reuses the indices of its
    activation is another random tensor: the two are large at different places.
    """
    if isinstance(codec, FeedbackCodec):
        codec = codec.codec
    key = str(codec.settings), spec
    if key not in _errors:
        *sizes, width = _limit_width(codec, spec).shape
        rows = max(1, min(math.prod(sizes), ERROR_NUMEL // width))
        x, before = (benchmark_tensor((rows, width), spec.dtype, device, seed) for seed in (0, 1))
        _errors[key] = size_and_error(codec, x, before)
    return _errors[key]


def _limit_width(codec: Codec, spec: TensorSpec) -> TensorSpec:
    fits = any(layer.needs_warmup for layer in layers(codec, ObservesWarmup))  # type: ignore[type-abstract]
    return _with_width(FITTED_WIDTH, spec) if fits and spec.shape[-1] > FITTED_WIDTH else spec


def _with_width(width: int, spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=(spec.numel // width, width))


_speeds: dict[tuple[str, TensorSpec, str], tuple[float, float]] = {}
_errors: dict[tuple[str, TensorSpec], tuple[float, float]] = {}
