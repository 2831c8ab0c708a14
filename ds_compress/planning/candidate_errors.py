"""Evaluate a candidate on messages of a model: its bytes, its time and its error.

The messages that crossed a boundary uncompressed in a few micro-batches, activation and gradient, pass the
channels of two separate ends, there and back. Nothing of that reaches the boundary that they come from.
`ds-compress advise` and `check` measure codecs so, too, on messages of the benchmark (`measure_codecs`).

A codec that learns from the messages it sends is measured from its second message on.

A feedback needs messages that differ. If one message is repeated, `ef21` sends less and less, and `loco`
compensates the same error each time. Errors of quantize with 4 bits on gradients of a small transformer; the
largest of three messages, and the mean of messages 20 to 40:

                 message repeated   messages differ   in a run
    loco              0.113              0.102          0.104
    ef21              0.098              0.144          0.143
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_compress.codec import Codec, TensorSpec
from ds_compress.codecs.message_error import measure_error
from ds_compress.config import DIRECTIONS, Config
from ds_compress.config.policies import ChannelKey
from ds_compress.message.channel import Boundary
from ds_compress.message.clock import HostClock
from ds_compress.message.gradient_error import GradientError
from ds_compress.planning.choice import Candidate, EvaluatedMessage, boundary_block

REPEATS = 3
"""Messages that a candidate is evaluated on: of as many micro-batches, or of those that exist in turn."""
MIN_ERROR = 2.0**-24
"""Error of a message that a lossy codec happened to reproduce."""

ByMicroBatch = dict[int, list[Tensor]]
"""Tensors of the messages of one direction, by micro-batch."""

Messages = dict[ChannelKey, ByMicroBatch]

UNKNOWN = EvaluatedMessage()
"""A candidate that cannot be used, or was not evaluated."""


def is_informative(messages: Messages) -> bool:
    """Return whether all messages of some micro-batch are finite and not zero; drop other micro-batches from
    `messages`."""

    def has_energy(tensors: Sequence[Tensor]) -> bool:
        sizes = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors if x.is_floating_point()]
        return 0 < (torch.stack(sizes).sum().item() if sizes else 0.0) < math.inf

    numbers = {number for own in messages.values() for number in own}
    useless = {n for n in numbers if not all(n in own and has_energy(own[n]) for own in messages.values())}
    for key, own in messages.items():
        messages[key] = {number: tensors for number, tensors in own.items() if number not in useless}
    return not messages or numbers > useless


def evaluate(
    boundary: Boundary, candidate: Candidate, pair: Sequence[ByMicroBatch], clock: HostClock, step: int = 0
) -> dict[str, EvaluatedMessage]:
    """Measure `candidate` on messages of `boundary`, by direction.

    Args:
        boundary: with the config in force, which stays as it is.
        pair: forward messages, and the backward messages that answer them; at least one micro-batch.
        clock: of the device they are on.
        step: optimizer steps done, including the warm-up.

    Returns:
        `UNKNOWN` where the candidate cannot be used, for whatever reason: a rank that raised would leave the
        others waiting.
    """
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            block = {"boundaries": {str(boundary.number): boundary_block(candidate.block)}}
            config = boundary.config.changed(block)
            ends = _separate_end(boundary, config), _separate_end(boundary, config)
            return measure_codecs(ends, pair, clock, step)
    except Exception:
        return dict.fromkeys(DIRECTIONS, UNKNOWN)


def measure_codecs(
    ends: tuple[Boundary, Boundary], pair: Sequence[ByMicroBatch], clock: HostClock, step: int = 0
) -> dict[str, EvaluatedMessage]:
    """Send messages between the two `ends` of a boundary, after the warm-up; return what is measured, by
    direction.

    Args:
        pair, clock, step: as for `evaluate`.
    """
    numbers, config = _same_shape(pair), ends[0].config
    if config.in_force.sample_ids:  # the same samples come again, as if their messages had changed altogether
        count = config.in_force.sample_ids.count(list(map(TensorSpec.of, pair[0][numbers[0]])))
        ends[0].sample_ids[0] = torch.arange(count, dtype=torch.int64, device="cpu")
    found: dict[str, list[EvaluatedMessage]] = {direction: [] for direction in DIRECTIONS}
    accumulated = {direction: GradientError() for direction in DIRECTIONS}
    first = max(step, config.warmup_steps)
    for repeat in range(REPEATS):
        for direction, own in zip(DIRECTIONS, pair):
            sides = ends if direction == "forward" else ends[::-1]
            tensors = own[numbers[repeat % len(numbers)]]
            measured, sent, arrived = _measure(sides, direction, tensors, clock, first + repeat)
            found[direction].append(measured)
            if measured.error:
                accumulated[direction].add(sent, arrived)
    return {direction: _summarize(rows, accumulated[direction]) for direction, rows in found.items()}


def _same_shape(pair: Sequence[ByMicroBatch]) -> list[int]:
    """Return the micro-batches whose messages have the shapes of the first: feedback state has one shape."""
    numbers = sorted(pair[0].keys() & pair[1].keys())
    shapes = [[[x.shape for x in own[number]] for own in pair] for number in numbers]
    return [number for number, own in zip(numbers, shapes) if own == shapes[0]]


def _separate_end(boundary: Boundary, config: Config) -> Boundary:
    """Return an end of `boundary` under `config` that shares no state with it."""
    other = Boundary(boundary.number, config, boundary.replica)
    other.dependence = boundary.dependence
    other.begin_step(boundary.loss_scale)
    for own, their in zip(other.channels, boundary.channels):
        own.uncompressed_tail = their.uncompressed_tail
    return other


def _measure(
    ends: Sequence[Boundary], direction: str, tensors: list[Tensor], clock: HostClock, step: int
) -> tuple[EvaluatedMessage, list[Tensor], list[Tensor]]:
    """Send one message from the first end to the second; return its compressed tensors, too, and what
    arrived. The error of accumulated gradients is not known yet."""
    sender, receiver = (getattr(end, direction) for end in ends)
    message_id = sender.message_id(step, 0)
    start = clock.mark()
    encoded = sender.encode(tensors, message_id)
    message, middle = encoded.layout, clock.mark()
    decoded = receiver.decode(encoded.packet, message, message_id, lambda nbytes: encoded.extra)
    end = clock.mark()
    sent, arrived = message.compressed_of(tensors), message.compressed_of(decoded)
    times = clock.ms(start, middle) / 1e3, clock.ms(middle, end) / 1e3
    errors = _errors(sender.codec, sent, arrived, direction)
    return EvaluatedMessage(float(encoded.nbytes), *times, *errors), sent, arrived


def _errors(
    codec: Codec, sent: Sequence[Tensor], arrived: Sequence[Tensor], direction: str
) -> tuple[float, float]:
    """Return relative and token error; this is inf of activations with tokens of which nothing arrives."""
    bound = max((codec.error_bound(TensorSpec.of(x)) for x in sent), default=0.0)
    if bound == 0:
        return 0.0, 0.0
    found = measure_error(sent, arrived)
    if math.isnan(found.relative_error) or found.message_norm == 0:  # zeros say nothing about other messages
        return math.inf, math.inf
    loses = direction == "forward" and found.lost_rows > 0
    return max(found.relative_error, MIN_ERROR), math.inf if loses else max(found.token_error, MIN_ERROR)


def _summarize(rows: Sequence[EvaluatedMessage], accumulated: GradientError) -> EvaluatedMessage:
    """Combine several messages: the shortest times, the largest errors, the bytes of the last one."""
    error = max(row.error for row in rows)
    value = accumulated.value if error else 0.0
    return EvaluatedMessage(
        bytes=rows[-1].bytes,
        encode=min(row.encode for row in rows),
        decode=min(row.decode for row in rows),
        error=error,
        token_error=max(row.token_error for row in rows),
        gradient_error=math.inf if math.isnan(value) else max(value, MIN_ERROR if error else 0.0),
    )
