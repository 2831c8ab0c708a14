"""What codecs make of a message, measured here on one like the benchmark's: bytes, seconds, error."""

import math
from dataclasses import replace

import torch

from ds_compress.cli.bench import benchmark_tensor, seconds_per_call, size_and_error
from ds_compress.cli.bench import contexts as contexts_of
from ds_compress.codec import Codec, TensorSpec
from ds_compress.codecs.mixins import ObservesWarmup, layers
from ds_compress.feedback import FeedbackCodec

ERROR_NUMEL = 1 << 20  # most values of the message that sizes and errors are measured on
FITTED_WIDTH = 1024
"""Widest row for a codec that fits a basis to its messages: that takes the cube of it."""


def codec_seconds(codec: Codec, spec: TensorSpec, device: str) -> tuple[float, float]:
    """Seconds to encode and to decode a tensor of `spec`, measured here; known after the first time.

    What a value costs in a product with a basis is a constant and a share of the width of the row: of rows
    too wide to be fitted, the rest of the line through two narrower ones.
    """
    key = str(codec.settings), spec, device
    if key not in _speeds:
        fitted = _fitted(codec, spec)
        encode, decode = _measured(codec, fitted, device)
        if fitted != spec:
            half = _measured(codec, _with_rows_of(FITTED_WIDTH // 2, spec), device)
            beyond = (spec.shape[-1] - FITTED_WIDTH) / (FITTED_WIDTH // 2)
            encode += max(0.0, encode - half[0]) * beyond
            decode += max(0.0, decode - half[1]) * beyond
        _speeds[key] = encode, decode
    return _speeds[key]


def _measured(codec: Codec, spec: TensorSpec, device: str) -> tuple[float, float]:
    x = benchmark_tensor(spec.shape, spec.dtype, torch.device(device))
    sender, receiver = contexts_of(codec, x)
    parts, own = codec.encode(x, sender), TensorSpec.of(x)
    return (
        seconds_per_call(lambda: codec.encode(x, sender), x.device),
        seconds_per_call(lambda: codec.decode(parts, own, receiver), x.device),
    )


def size_and_loss(codec: Codec, spec: TensorSpec, device: torch.device) -> tuple[float, float]:
    """Bits per value, and ||x - C(x)|| / ||x|| of one message; a feedback, which makes up for some of it in
    later ones, does not count. A gradient that follows the places of its activation is of another draw: the
    two are large at other places. Known after the first time."""
    if isinstance(codec, FeedbackCodec):
        codec = codec.codec
    key = str(codec.settings), spec
    if key not in _losses:
        *sizes, width = _fitted(codec, spec).shape
        rows = max(1, min(math.prod(sizes), ERROR_NUMEL // width))
        x, before = (benchmark_tensor((rows, width), spec.dtype, device, seed) for seed in (0, 1))
        _losses[key] = size_and_error(codec, x, before)
    return _losses[key]


def _fitted(codec: Codec, spec: TensorSpec) -> TensorSpec:
    fits = any(layer.needs_warmup for layer in layers(codec, ObservesWarmup))  # type: ignore[type-abstract]
    width = spec.shape[-1]
    if not fits or width <= FITTED_WIDTH:
        return spec
    return _with_rows_of(FITTED_WIDTH, spec)


def _with_rows_of(width: int, spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=(spec.numel // width, width))


_speeds: dict[tuple[str, TensorSpec, str], tuple[float, float]] = {}
_losses: dict[tuple[str, TensorSpec], tuple[float, float]] = {}
