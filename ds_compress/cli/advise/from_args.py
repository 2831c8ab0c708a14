"""Evaluate candidates where options give compute times and messages, on the tensors of the benchmark."""

import argparse
import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.bench import measure_boundary
from ds_compress.cli.check import UNCOMPRESSED, message_sizes
from ds_compress.codec import TensorSpec
from ds_compress.codecs.mixins import VariableSizePayload
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.errors import CompressionError
from ds_compress.feedback import FeedbackCodec
from ds_compress.message.gradient_error import estimate_gradient_error
from ds_compress.planning.choice import Candidate, EvaluatedMessage, Evaluation

ERROR_NUMEL = 1 << 20
"""Where codecs are not timed, messages have at most so many values, or one row."""


def message_spec(args: argparse.Namespace) -> TensorSpec:
    """Return the spec of the messages of all boundaries."""
    return TensorSpec(args.shape, DTYPES[args.dtype], args.device)


def evaluate_from_args(candidate: Candidate, args: argparse.Namespace) -> Evaluation:
    """Evaluate `candidate` on messages of the benchmark, which stand for those of all boundaries.

    Raises:
        CompressionError: its block is bad, or boundaries have different codecs.
    """
    config = Config(candidate.block)
    stages = args.stages if config.block.boundaries else 2
    rows = message_sizes(config, stages, message_spec(args))
    if len({(row["direction"], row["codec"]) for row in rows}) > len(DIRECTIONS):
        raise CompressionError(
            f"{KEY}.boundaries: gives boundaries codecs of their own, but a step is predicted with the same "
            "at all of them; leave it out"
        )
    return Evaluation(candidate, *(_evaluate_message(config, row, args) for row in rows[:2]))


def _evaluate_message(config: Config, row: dict[str, Any], args: argparse.Namespace) -> EvaluatedMessage:
    """Evaluate the codec of the message that `row` of `message_sizes` describes."""
    nbytes = row["wire_bytes"]
    if row["codec"] in UNCOMPRESSED:
        return EvaluatedMessage(nbytes, error=0.0, token_error=0.0, gradient_error=0.0)
    spec, codec = message_spec(args), getattr(config.in_force.codecs(0), row["direction"])
    part, width = spec, spec.shape[-1]
    if args.codec_gbps and spec.numel > ERROR_NUMEL:
        part = replace(spec, shape=(max(1, ERROR_NUMEL // width), width))
    block = json.dumps({**config.written, "min_numel": 0})  # the message is large enough, its part may not be
    found = _measure(block, part)[row["direction"]]
    if isinstance(codec, VariableSizePayload):  # `check` gives its maximum
        nbytes = found.bytes * spec.numel / part.numel
    found = found._replace(bytes=nbytes)
    if args.codec_gbps:
        seconds = spec.nbytes / (args.codec_gbps * 1e9)
        found = found._replace(encode=seconds, decode=seconds)
    if math.isinf(found.token_error):  # nothing arrives of some tokens: as if that held for all
        found = found._replace(token_error=max(1.0, found.error))
    if not isinstance(codec, FeedbackCodec):  # random values hide the bias, for which a feedback makes up
        found = found._replace(gradient_error=estimate_gradient_error(found.error, codec.unbiased))
    return found


@cache
def _measure(block: str, spec: TensorSpec) -> dict[str, EvaluatedMessage]:
    """Measure the codecs of `block`, in JSON, once per process."""
    return measure_boundary(Config(json.loads(block)), 0, spec)
