"""Functions on a model with simulated boundaries: traffic, evaluation, ids of samples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from ds_compress.errors import CompressionError, shown
from ds_compress.simulate.boundary import SimulatedBoundary

Evaluation = Literal["compressed", "uncompressed"]


@dataclass(frozen=True)
class Traffic:
    """Messages of one direction of a boundary since the start; counts include evaluation."""

    boundary: int
    direction: str
    messages: int
    raw_bytes: int  # of the tensors
    wire_bytes: int  # of the packets, headers, sample ids and first visits included
    relative_error: float
    """Mean over the messages of training that were compressed of ||x - y|| / ||x||, y being what arrived; nan
    without such messages, and when one was not finite."""

    gradient_error: float
    """Largest error of accumulated gradients at the steps that the guard checks; 0 without such steps, and
    forward."""

    warnings: tuple[str, ...]
    """Limits of the guard that messages exceeded at these steps."""


def traffic(model: nn.Module) -> list[Traffic]:
    """Return the traffic of each direction of each boundary in `model`."""
    return [
        Traffic(
            boundary.upstream.number,
            channel.direction,
            channel.sent.messages,
            channel.sent.raw_bytes,
            channel.sent.wire_bytes,
            boundary.errors[channel.direction].value,
            boundary.limits[channel.direction].gradient_error,
            boundary.limits[channel.direction].warnings,
        )
        for boundary in _boundaries(model)
        for channel in boundary.sending
    ]


@contextmanager
def evaluating(model: nn.Module, messages: Evaluation) -> Iterator[None]:
    """Switch to evaluation mode, with messages compressed or not; overrides "eval" of the config.

    Nothing of the training state changes: one state can be evaluated both ways, and trained on.

    Raises:
        CompressionError: `messages` is neither of the two.
    """
    if messages not in get_args(Evaluation):
        raise CompressionError(
            f"evaluating: messages {shown(messages)}; allowed: {', '.join(map(repr, get_args(Evaluation)))}"
        )
    boundaries, modes = _boundaries(model), [(module, module.training) for module in model.modules()]
    before = [boundary.config.eval for boundary in boundaries]
    for boundary in boundaries:
        boundary.config.eval = messages
    model.eval()
    try:
        yield
    finally:
        for boundary, eval_before in zip(boundaries, before):
            boundary.config.eval = eval_before
        for module, mode in modes:
            module.training = mode


def announce(model: nn.Module, batch: Sequence[Any]) -> None:
    """Set the samples of the next training pass of `model`; needed with `"ids": {"column": ...}`.

    Args:
        batch: what the data loader returned, (inputs, labels, ..., indices), as a pipeline would be given it.

    Raises:
        CompressionError: it has no such column, or not one of integers.
    """
    for boundary in _boundaries(model)[:1]:
        if boundary.config.sample_ids is not None:
            boundary.announce(boundary.config.sample_ids.of(batch))


def _boundaries(model: nn.Module) -> list[SimulatedBoundary]:
    return [module for module in model.modules() if isinstance(module, SimulatedBoundary)]
