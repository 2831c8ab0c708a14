"""Evaluate candidates on messages of training, at both ends of every boundary.

The activations and gradients of the first micro-batches are copied while they are sent uncompressed. After
the batch each end evaluates all candidates on the copies (planning/evaluate.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from ds_compress.config import DIRECTIONS
from ds_compress.message.channel import Channel
from ds_compress.message.channel_end import SendingEnd
from ds_compress.message.clock import HostClock
from ds_compress.planning.candidates import Candidate
from ds_compress.planning.evaluate import REPEATS, UNKNOWN, Measurements, Messages, evaluate
from ds_compress.runtime.interface import StageView
from ds_compress.runtime.stage_profile import Row


@contextmanager
def copy_messages(stage: StageView, found: Messages) -> Iterator[None]:
    """Copy the messages of the first micro-batches of a batch into `found`."""
    for end in stage.ends:
        if isinstance(end, SendingEnd):
            end.transmit = partial(_sent, end.transmit, end.channel, found)  # type: ignore[method-assign]
        else:
            end.take = partial(_taken, end.take, end.channel, found)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for end in stage.ends:
            vars(end).pop("transmit" if isinstance(end, SendingEnd) else "take")


def _sent(transmit: Any, channel: Channel, found: Messages, tensors: Any, message_id: Any) -> None:
    _copy(channel, found, tensors, message_id)
    transmit(tensors, message_id)


def _taken(take: Any, channel: Channel, found: Messages, message: Any, message_id: Any) -> list[Tensor]:
    arrived: list[Tensor] = take(message, message_id)
    _copy(channel, found, arrived, message_id)
    return arrived


def _copy(channel: Channel, found: Messages, tensors: Sequence[Tensor], message_id: Any) -> None:
    if message_id.micro_batch < REPEATS:
        copies = [tensor.detach().clone() for tensor in tensors]
        found.setdefault((channel.boundary.number, channel.direction), {})[message_id.micro_batch] = copies


def column_name(side: str, candidate: Candidate, direction: str, what: str) -> str:
    """Return a column of `evaluate_candidates`; `what`: bytes, encode, decode, error, gradient_error."""
    return f"{side}: {candidate.name}, {direction} {what}"


def evaluate_candidates(
    stage: StageView, candidates: Sequence[Candidate], messages: Messages, clock: HostClock, step: int
) -> Row:
    """Evaluate `candidates` at the boundaries before and after this stage.

    Return bytes, seconds and errors by `column`, with equal columns on every rank. An unknown error
    is infinite: there is no such boundary, its messages were not copied, or the setting cannot be used.

    Args:
        step: optimizer steps done, those of the warm-up included.
    """
    row: Row = {}
    for side, boundary in (("before", stage.before), ("after", stage.after)):
        pair = [messages.get((boundary.number, key), {}) for key in DIRECTIONS] if boundary else []
        for candidate in candidates:
            found: dict[str, Measurements] = dict.fromkeys(DIRECTIONS, UNKNOWN)
            if boundary is not None and all(pair):
                found = stage.on_codec_stream(
                    boundary, partial(evaluate, boundary, candidate, pair, clock, step)
                )
            for direction, own in found.items():
                for what, value in own.items():
                    row[column_name(side, candidate, direction, what)] = value
    return row
