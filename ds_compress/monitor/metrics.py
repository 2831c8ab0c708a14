"""What the monitor writes: names, meaning and labels, shared by sinks, dashboards and `ds-compress report`.

A channel's values appear as `Train/Compression/boundary_{i}/{forward|backward}/{name}`, the pipeline's as
`Train/Compression/{name}`, those of gradients between replicas as
`Train/Compression/replicas/stage_{i}/{name}`, of tied weights as `Train/Compression/tied/stage_{i}/{name}`.
All are those of the first pipeline replica.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_compress.config import DIRECTIONS
from ds_compress.config.policies import ChannelKey
from ds_compress.feedback.state import residuals
from ds_compress.message.channel import Channel

PREFIX = "Train/Compression"
TOTALS = ("messages", "raw_bytes", "wire_bytes", "samples", "returned")
COUNTERS = (*TOTALS, "message_raw_bytes", "message_wire_bytes")

SECTIONS = {
    "Bytes": {
        "wire_bytes": "bytes of the packets, headers included, running total, evaluation included",
        "raw_bytes": "bytes of the tensors, running total, evaluation included",
        "ratio": "raw over wire bytes, of the messages since the last value",
        "link_busy": "transfer_ms as a share of the step",
        "hit_rate": "with aqsgd: share of the samples since the last value that had a buffer; else 0",
        "buffer_bytes": "bytes of the feedback state at the sender",
    },
    "Error": {
        "token_error": "root of the mean over tokens of (||x - C(x)|| / ||x||)^2, of one message of the step",
        "relative_error": "||x - C(x)|| / ||x|| of the whole message, most of it may be one token",
        "cosine": "cosine similarity of x and C(x), same message",
        "lost_rows": "share of the tokens that are not 0 and arrive as zeros, same message",
        "gradient_error": "error of accumulated gradients: what 8 messages do not average out; 0 forward",
        "residual_norm": "norm of the error-feedback residual at the sender; 0 without one",
        "residual_share": "norm of a message's residual, as a multiple of the message's norm",
        "nonfinite_share": "share of the step's messages that contain inf or nan",
    },
    "Time": {
        "encode_ms": "time in which the sender compresses, per step",
        "decode_ms": "time in which the receiver decompresses, per step",
        "wait_ms": "time in which the receiver is blocked until packets arrive, idle time included, per step",
        "send_ms": "time in which the sender is blocked until packets leave, per step",
        "transfer_ms": "time of packets on the link, per step, if each takes as long as the fastest",
    },
}
"""Quantities of a channel, by section of a dashboard."""
CHANNEL = {name: meaning for own in SECTIONS.values() for name, meaning in own.items()}
PIPELINE = {
    "step_ms": "duration of the step on the first stage",
    "uncompressed_step_ms": "estimated duration of the step with uncompressed messages, without codec time",
}
DASHBOARD = {**SECTIONS, "Time": PIPELINE | SECTIONS["Time"]}
"""Sections of a dashboard with the quantity that each of their charts shows."""
GRADIENTS = {"replicas": "between replicas", "tied": "of tied weights"}
"""Kinds of gradients that ranks exchange."""
EXCHANGE = {
    "raw_bytes": "bytes that DeepSpeed's all-reduce would have sent from this rank, running total",
    "wire_bytes": "bytes of the packets that this rank sent, running total",
    "ratio": "raw over wire bytes, of the steps since the last value",
    "relative_error": "||a - m|| / ||m|| of the step's first bucket; a: its average, m: the exact one",
    "cosine": "between a and m",
    "gradient_error": "||sum of a - m|| / ||sum of m|| over 8 steps, at the last check of the guard",
    "residual_norm": "norm of the residuals of this rank, over all slices",
    "round_s": "with `every` above 1: time from sending a change of the weights to its outcome; else 0",
    "rounds": "with `every` above 1: rounds whose outcome this replica has, running total; else 0",
    "members": "replicas whose gradients, or changes of the weights, counted last",
}
LOSS_COST = "loss_cost"
EVAL_LOSS = {way: f"eval_loss_{way}" for way in ("compressed", "uncompressed")}
EVALUATIONS = {
    LOSS_COST: "loss of one micro-batch with compression minus its loss without, every `guard.every` steps",
    **{name: f"with eval both: loss of eval_batch with {way} messages" for way, name in EVAL_LOSS.items()},
}
"""Values of evaluations, each of one state of the weights."""

Channels = Mapping[ChannelKey, dict[str, float]]
"""Values by name, of each channel, in the order of boundaries."""


def label(name: str, boundary: int | None = None, direction: str | None = None) -> str:
    """Return the label of a channel's value, or of a pipeline's when no boundary is given."""
    return f"{PREFIX}/{name}" if boundary is None else f"{PREFIX}/boundary_{boundary}/{direction}/{name}"


def exchange_label(kind: str, stage: int, name: str) -> str:
    """Return the label of a metric of gradients that a stage exchanges, of a kind in `GRADIENTS`."""
    return f"{PREFIX}/{kind}/stage_{stage}/{name}"


def labels(boundaries: int, name: str) -> list[str]:
    """Return the labels under which `name` appears in a pipeline with so many boundaries."""
    if name in PIPELINE:
        return [label(name)]
    return [label(name, boundary, direction) for boundary in range(boundaries) for direction in DIRECTIONS]


def ratio(raw: float, wire: float) -> float:
    """Return raw over wire bytes; 1 if no byte was sent."""
    return raw / wire if wire else 1.0


def complete(channels: Channels, before: Channels, stamps: Tensor, step_ms: float) -> None:
    """Add to `channels` the values that need both ends of a channel.

    Args:
        before: what was written last; zeros at first.
        stamps: [boundary, direction, side, packet] when packets of the step left, and came, in milliseconds.
    """
    for number, of_boundary in enumerate(stamps):
        passed, packet = {}, {}
        for direction, sides in zip(DIRECTIONS, of_boundary):
            values, last = channels[number, direction], before[number, direction]
            messages, raw, wire, samples, returned = (values[key] - last[key] for key in TOTALS)
            values["ratio"] = ratio(raw, wire)
            values["hit_rate"] = returned / samples if samples else 0.0
            packet[direction] = wire / max(messages, 1)
            left, arrived = sides[:, : int(values["step_messages"])]
            passed[direction] = (arrived - left).tolist()
        for direction, ms in transfer_ms(passed, packet).items():
            values = channels[number, direction]
            values["transfer_ms"] = ms * values["step_messages"]
            values["link_busy"] = values["transfer_ms"] / step_ms


def residual_values(channel: Channel, message_norm: float) -> dict[str, float]:
    """Measure the residual of the sender of `channel`, by column, 0 without feedback.

    residual_norm: of all residuals.
    residual_share: root mean square over the micro-batches that have a residual of their own, as a multiple
    of `message_norm`, both in units that the loss scale does not change; nan where the message is nothing or
    no number.
    buffer_bytes: of residuals and mirrored state.
    """
    memories, prefix = channel.boundary.memory.values(), f"{channel.direction}/"
    kept = sum(value.nbytes for memory in memories for key, value in memory.items() if key.startswith(prefix))
    of_tensors = [
        [torch.linalg.vector_norm(each.float()) for each in residuals(memory, channel.direction)]
        for memory in memories
    ]
    all_norms = [norm for norms in of_tensors for norm in norms]
    if not all_norms:
        return {"residual_norm": 0.0, "residual_share": 0.0, "buffer_bytes": kept}
    total = torch.linalg.vector_norm(torch.stack(all_norms)).item()
    scale = channel.boundary.loss_scale if channel.direction == "backward" else 1.0
    message = message_norm / scale * math.sqrt(max(map(len, of_tensors)))
    share = total / message if message > 0 else math.nan
    return {"residual_norm": total, "residual_share": share, "buffer_bytes": kept}


def stage_ms(channels: Channels, stage: int) -> dict[str, float]:
    """Return how long `stage` spends on its messages: encode, decode, wait and send milliseconds per step."""
    sends = [channels[key] for key in ((stage, "forward"), (stage - 1, "backward")) if key in channels]
    receives = [channels[key] for key in ((stage, "backward"), (stage - 1, "forward")) if key in channels]
    ends = {"encode": sends, "decode": receives, "wait": receives, "send": sends}
    return {name: sum(channel[f"{name}_ms"] for channel in ends[name]) for name in ends}


def transfer_ms(passed: Mapping[str, Sequence[float]], nbytes: Mapping[str, float]) -> dict[str, float]:
    """Estimate how long one message of a boundary takes on an idle link, by direction.

    The two sides have clocks of their own, so from one direction's stamps this cannot be known. But the
    quickest packets of both directions together are a round trip, in which the difference of the clocks
    cancels; it is shared out by size. The quickest is the one that found the link free and the receiver
    waiting.

    Args:
        passed: milliseconds of the packets of a step, from when one was handed to the link, on the sender's
            clock, until it was there, on the receiver's clock.
        nbytes: size of a packet.

    Returns:
        Milliseconds; 0 where only one direction had packets, and nothing can be known.
    """
    if not all(passed.values()):
        return dict.fromkeys(passed, 0.0)
    round_trip = max(0.0, sum(map(min, passed.values())))
    return {direction: round_trip * each / sum(nbytes.values()) for direction, each in nbytes.items()}


def uncompressed_step_ms(step_ms: float, channels: Channels, ranks: int) -> float:
    """Estimate the duration of the step with every message sent as it is, from the measurements of a
    compressed step.

    Time on the link is taken to grow with the bytes, which its latency does not: on far links, and under
    DualPipeV, the estimate is too large. What a receiver waited for while its packet was on its way is taken
    as exposed and grows so; what was hidden stays hidden until one channel alone takes longer than the step.
    The codec's time goes away on the rank where that and the growth together make the largest difference.

    Args:
        ranks: of the pipeline. With fewer than boundaries + 1 the way of the data turns back at the last
            rank, and the others have two stages each (DualPipeV).
    """

    def exposed(channel: Mapping[str, float]) -> float:
        return min(channel["wait_ms"], channel["transfer_ms"]) * (channel["ratio"] - 1)

    changes, boundaries = [0.0] * ranks, len(channels) // len(DIRECTIONS)
    for stage in range(boundaries + 1):
        spent = stage_ms(channels, stage)
        touching = [values for (number, _), values in channels.items() if number in (stage - 1, stage)]
        rank = stage if stage < ranks else boundaries - stage
        changes[rank] += sum(map(exposed, touching)) - spent["encode"] - spent["decode"]
    found = [channel["transfer_ms"] * channel["ratio"] for channel in channels.values()]
    saturated = max(found, default=0.0)  # a pipeline of one stage has no boundary
    return max(step_ms + max(changes), saturated)
