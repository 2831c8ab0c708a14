"""Evaluate candidates where options give compute times and messages, on the tensor of the benchmark."""

import argparse
import math

import torch

from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.bench import benchmark_tensor, contexts, seconds_per_call, size_and_error
from ds_compress.cli.check import UNCOMPRESSED, message_sizes
from ds_compress.codec import Codec, TensorSpec
from ds_compress.codecs.message_error import MessageError
from ds_compress.codecs.mixins import VariableSizePayload
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.errors import CompressionError
from ds_compress.feedback import FeedbackCodec
from ds_compress.message.gradient_error import estimate_gradient_error
from ds_compress.planning.choice import EvaluatedMessage, Evaluation, candidates_for
from ds_compress.planning.step_time import MessageCost

ERROR_NUMEL = 1 << 20
"""Sizes and errors are measured on at most so many values of a message."""


class ArgsEvaluator:
    """Evaluates candidates on the benchmark's tensor, which stands for the messages of all boundaries."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        dtype = args.dtype or "fp32"
        self._spec = TensorSpec(args.shape, DTYPES[dtype])
        self.message = f"{list(args.shape)} {dtype}"
        self._boundaries = args.stages - 1
        self.raw_bytes = [self._spec.nbytes] * self._boundaries, [self._spec.nbytes] * self._boundaries
        self.activation_bytes = [float(self._spec.nbytes)] * args.stages  # as with activation checkpointing

    def of_candidates(self) -> list[list[Evaluation]]:
        """Evaluate every candidate; by boundary."""
        found = []
        for candidate in candidates_for(None if self._args.max_error is not None else self._args.quality):
            config = Config(candidate.block)
            codecs = config.in_force.codecs(None)
            if not any(getattr(codecs, direction).refuses(self._spec) for direction in DIRECTIONS):
                messages = (self._evaluate(config, direction) for direction in DIRECTIONS)
                found.append(Evaluation(candidate, *messages))
        return [found] * self._boundaries

    def of_file(self, config: Config) -> tuple[list[EvaluatedMessage], list[EvaluatedMessage]]:
        """Evaluate `config`; return the messages forward and backward, each by boundary."""
        forward, backward = (self._evaluate(config, direction) for direction in DIRECTIONS)
        return [forward] * self._boundaries, [backward] * self._boundaries

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
            return EvaluatedMessage(MessageCost(row["wire_bytes"]), 0.0, 0.0, 0.0)
        codec = getattr(config.in_force.codecs(0), direction)
        if args.codec_gbps:
            encode = decode = spec.nbytes / (args.codec_gbps * 1e9)
        else:
            encode, decode = codec_seconds(codec, spec, str(args.device))
        bits, error = _bits_and_error(codec, spec, args.device, direction)
        # Where the size depends on the data, `check` gives its maximum
        nbytes = int(bits * spec.numel / 8) if isinstance(codec, VariableSizePayload) else row["wire_bytes"]
        return EvaluatedMessage(
            MessageCost(nbytes, encode, decode),
            error.token_error,
            estimate_gradient_error(error.relative_error, codec.unbiased),
            error.relative_error,
        )


def codec_seconds(codec: Codec, spec: TensorSpec, device: str) -> tuple[float, float]:
    """Measure the seconds to encode and to decode a tensor of `spec`, once per process."""
    key = str(codec.settings), spec, device
    if key not in _speeds:
        _speeds[key] = _measure(codec, spec, device)
    return _speeds[key]


def _measure(codec: Codec, spec: TensorSpec, device: str) -> tuple[float, float]:
    x = benchmark_tensor(spec.shape, spec.dtype, torch.device(device))
    sender, receiver = contexts(codec, x)
    parts, own = codec.encode(x, sender), TensorSpec.of(x)
    return (
        seconds_per_call(lambda: codec.encode(x, sender), x.device),
        seconds_per_call(lambda: codec.decode(parts, own, receiver), x.device),
    )


def _bits_and_error(
    codec: Codec, spec: TensorSpec, device: torch.device, direction: str
) -> tuple[float, MessageError]:
    """Measure bits per value and errors of one message, once per process.

    A feedback does not count, as it acts on later messages. A gradient has no attention sink. One that reuses
    the indices of its activation is another random tensor: the two are large at different places.
    """
    if isinstance(codec, FeedbackCodec):
        codec = codec.codec
    key = str(codec.settings), spec, direction
    if key not in _errors:
        *sizes, width = spec.shape
        rows = max(1, min(math.prod(sizes), ERROR_NUMEL // width))
        shape = rows, width
        x = benchmark_tensor(shape, spec.dtype, device, has_sink=direction == "forward")
        before = benchmark_tensor(shape, spec.dtype, device, seed=1)
        _errors[key] = size_and_error(codec, x, before)
    return _errors[key]


_speeds: dict[tuple[str, TensorSpec, str], tuple[float, float]] = {}
_errors: dict[tuple[str, TensorSpec, str], tuple[float, MessageError]] = {}
