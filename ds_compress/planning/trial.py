"""A setting tried out aside on messages of a model: what it would take and lose.

The messages that crossed a boundary uncompressed in a few micro-batches, activation and gradient, pass the
channels of two ends of their own, there and back. Nothing of it reaches the boundary that they are from.

A feedback needs messages that differ: of one message again and again `ef21` has less and less to send, and
`loco` makes up for the same loss each time. Errors of quantize with 4 bits, gradients of a small
transformer; the largest of three messages, and the mean of the 20th to the 40th:

                 the same message   others each time   in a run
    loco              0.113               0.102          0.104
    ef21              0.098               0.144          0.143

tests/planning/test_trial.py asks that a trial on messages that differ tells what a run has.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_compress.codec import Codec, TensorSpec
from ds_compress.config import DIRECTIONS, Config
from ds_compress.message.channel import Boundary
from ds_compress.message.clock import HostClock
from ds_compress.message.meters import error_and_cosine, largest, norms
from ds_compress.planning.choice import Message, Setting
from ds_compress.planning.offers import Offer
from ds_compress.planning.step_time import Traffic

REPEATS = 3
"""Messages that a setting is tried on: of as many micro-batches, or as there are, one after the other."""
LEAST = 2.0**-24
"""Error of a message that happened to arrive whole from a codec that may lose something."""

ByMicroBatch = dict[int, list[Tensor]]
"""Tensors of the messages of a direction, by micro-batch."""

Messages = dict[tuple[int, str], ByMicroBatch]
"""By boundary and direction."""

Tried = dict[str, float]
"""Of a direction: bytes, seconds to encode and to decode, relative error."""

UNKNOWN: Tried = {"bytes": 0.0, "encode": 0.0, "decode": 0.0, "error": math.inf}
"""Of a setting that cannot be used, or was not tried."""


def tell(messages: Messages) -> bool:
    """Whether there is a micro-batch none of whose messages is zero or not finite; others are left out of
    `messages`."""
    numbers = {number for own in messages.values() for number in own}
    silent = {n for n in numbers if not all(n in own and _tells(own[n]) for own in messages.values())}
    for place, own in messages.items():
        messages[place] = {number: tensors for number, tensors in own.items() if number not in silent}
    return not messages or numbers > silent


def _tells(tensors: Sequence[Tensor]) -> bool:
    sizes = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors if x.is_floating_point()]
    size = torch.stack(sizes).sum().item() if sizes else 0.0
    return 0 < size < math.inf


def settings(offer: Offer) -> dict[str, Any]:
    """The offer as "boundaries" of a block has it for one of them, with nothing left to what others say."""
    return {direction: {"feedback": "none", **offer.block[direction]} for direction in DIRECTIONS}


def setting(offer: Offer, found: Mapping[str, Mapping[str, float]]) -> Setting:
    """What was found of `offer`, by direction, as the choice takes it."""
    messages = (
        Message(Traffic(int(own["bytes"]), own["encode"], own["decode"]), own["error"])
        for own in (found[direction] for direction in DIRECTIONS)
    )
    return Setting(offer, *messages)


def try_out(
    boundary: Boundary, offer: Offer, pair: Sequence[ByMicroBatch], clock: HostClock, step: int = 0
) -> dict[str, Tried]:
    """What `offer` makes of messages of `boundary`, by direction; `UNKNOWN` where it cannot be used, for
    whatever reason: a rank that raised would leave the others waiting for its row.

    Args:
        boundary: with the config in force, which stays as it is.
        pair: forward messages, and the backward messages that answer them; one micro-batch at least.
        clock: of the device they are on.
        step: optimizer steps done, those of the warm-up included.
    """
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            config = boundary.config.changed({"boundaries": {str(boundary.number): settings(offer)}})
            ends = _aside(boundary, config), _aside(boundary, config)
            found: dict[str, list[Tried]] = {direction: [] for direction in DIRECTIONS}
            numbers = _alike(pair)
            for repeat in range(REPEATS):
                for direction, own in zip(DIRECTIONS, pair):
                    crossing = ends if direction == "forward" else ends[::-1]
                    tensors = own[numbers[repeat % len(numbers)]]
                    found[direction].append(_cross(crossing, direction, tensors, clock, step, repeat))
    except Exception:
        return dict.fromkeys(DIRECTIONS, UNKNOWN)
    return {direction: _joint(made) for direction, made in found.items()}


def _alike(pair: Sequence[ByMicroBatch]) -> list[int]:
    """Micro-batches whose messages are shaped as those of the first one: the state of a feedback is."""
    numbers = sorted(pair[0].keys() & pair[1].keys())
    shapes = [[[x.shape for x in own[number]] for own in pair] for number in numbers]
    return [number for number, own in zip(numbers, shapes) if own == shapes[0]]


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
) -> Tried:
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


def _joint(made: Sequence[Tried]) -> Tried:
    best = {what: min(row[what] for row in made) for what in ("encode", "decode")}
    return {**made[0], **best, "error": max(row["error"] for row in made)}
