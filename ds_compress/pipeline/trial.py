"""Settings tried out aside on messages of the model: what each would take and lose.

One micro-batch's activation and gradient are copied at both ends of every boundary while they cross
uncompressed. After the batch each end puts them through the channels of a boundary of its own for every
setting that is offered, there and back. Nothing of that reaches training.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_compress.codec import Codec, TensorSpec
from ds_compress.config import DIRECTIONS, Config
from ds_compress.message.channel import Boundary, Channel
from ds_compress.message.clock import HostClock
from ds_compress.message.endpoint import SendingEnd
from ds_compress.message.meters import error_and_cosine, largest, norms
from ds_compress.pipeline.measuring import Row
from ds_compress.pipeline.stage import Stage
from ds_compress.planning.offers import Offer

REPEATS = 3
LEAST = 2.0**-24
"""Error of a message that happened to arrive whole from a codec that may lose something."""

Messages = dict[tuple[int, str], list[Tensor]]
"""Tensors by boundary and direction."""


@contextmanager
def copying(stage: Stage, found: Messages) -> Iterator[None]:
    """Round a batch: its first micro-batch's messages are copied into `found`."""
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
    if message_id.micro_batch == 0:
        copies = [tensor.detach().clone() for tensor in tensors]
        found[channel.boundary.number, channel.direction] = copies


def tell(messages: Messages) -> bool:
    """Whether none of them is zero or not finite."""
    for tensors in messages.values():
        sizes = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors if x.is_floating_point()]
        size = torch.stack(sizes).sum().item() if sizes else 0.0
        if not 0 < size < math.inf:
            return False
    return True


def column(side: str, offer: Offer, direction: str, what: str) -> str:
    """Of what `tried` finds; `what`: bytes, encode, decode, error."""
    return f"{side}: {offer.name}, {direction} {what}"


def tried(stage: Stage, offers: Sequence[Offer], messages: Messages, clock: HostClock, step: int) -> Row:
    """Bytes, seconds and relative errors of `offers` at the boundaries before and after this stage, by
    `column`; the same columns on every rank. An error that nobody knows is infinite: there is no such
    boundary, its messages were not copied, or the setting cannot be used.

    Args:
        step: optimizer steps done, those of the warm-up included.
    """
    row: Row = {}
    for side, boundary in (("before", stage.before), ("after", stage.after)):
        for offer in offers:
            pair = [messages.get((boundary.number, key)) for key in DIRECTIONS] if boundary else [None]
            made: dict[str, Row] = {}
            if boundary is not None and None not in pair:
                trial = partial(_trial, boundary, offer, pair, clock, step)
                made = stage.in_lane(boundary, trial)
            nothing = {"bytes": 0.0, "encode": 0.0, "decode": 0.0, "error": math.inf}
            for direction in DIRECTIONS:
                for what, value in made.get(direction, nothing).items():
                    row[column(side, offer, direction, what)] = value
    return row


def _trial(boundary: Boundary, offer: Offer, pair: Any, clock: HostClock, step: int) -> dict[str, Row]:
    """By direction; nothing where the setting cannot be used, for whatever reason: a rank that raised would
    leave the others waiting for its row."""
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            config = boundary.config.changed({"boundaries": {str(boundary.number): settings(offer)}})
            ends = _aside(boundary, config), _aside(boundary, config)
            found: dict[str, list[Row]] = {direction: [] for direction in DIRECTIONS}
            for repeat in range(REPEATS):
                for direction, tensors in zip(DIRECTIONS, pair):
                    crossing = ends if direction == "forward" else ends[::-1]
                    found[direction].append(_cross(crossing, direction, tensors, clock, step, repeat))
    except Exception:
        return {}
    return {direction: _joint(made) for direction, made in found.items()}


def settings(offer: Offer) -> dict[str, Any]:
    """The offer as "boundaries" of a block has it for one of them, with nothing left to what others say."""
    return {direction: {"feedback": "none", **offer.block[direction]} for direction in DIRECTIONS}


def _aside(boundary: Boundary, config: Config) -> Boundary:
    other = Boundary(boundary.number, config, boundary.replica)
    other.carrying = boundary.carrying
    other.begin_step(boundary.loss_scale)
    for own, their in zip(other.channels, boundary.channels):
        own.raw_tail = their.raw_tail
    return other


def _cross(
    ends: Sequence[Boundary],
    direction: str,
    tensors: list[Tensor],
    clock: HostClock,
    step: int,
    micro_batch: int,
) -> Row:
    sender, receiver = (getattr(end, direction) for end in ends)
    message_id = sender.message_id(max(step, sender.boundary.config.warmup_steps), micro_batch)
    start = clock.mark()
    packet, rest, message = sender.encode(tensors, message_id)
    middle = clock.mark()
    decoded = receiver.decode(packet, message, message_id, lambda nbytes: rest)
    end = clock.mark()
    pairs = [each for each, codec in zip(zip(tensors, decoded), message.codecs) if codec is not None]
    return {
        "bytes": float(packet.numel() + (rest.numel() if rest is not None else 0)),
        "encode": clock.ms(start, middle) / 1e3,
        "decode": clock.ms(middle, end) / 1e3,
        "error": _error(sender.codec, pairs),
    }


def _error(codec: Codec, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Of the tensors that are compressed: masks beside them, which are not, may be much larger."""
    bound = max((codec.error_bound(TensorSpec.of(x)) for x, _ in pairs), default=0.0)
    if bound == 0:
        return 0.0
    sent, decoded = zip(*pairs)
    sizes = norms(sent, decoded, largest(sent)).tolist()
    error, _ = error_and_cosine(*sizes)
    if math.isnan(error) or sizes[0] == 0:  # what arrives of zeros says nothing of other messages
        return math.inf
    return max(error, LEAST)


def _joint(made: Sequence[Row]) -> Row:
    best = {what: min(row[what] for row in made) for what in ("encode", "decode")}
    return {**made[0], **best, "error": max(row["error"] for row in made)}
