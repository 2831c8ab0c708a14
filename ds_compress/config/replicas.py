"""The "replicas" options of the block: how gradients between data-parallel replicas are compressed."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from pydantic import Field

from ds_compress.codec import CODECS, Codec, TensorSpec, bytes_of
from ds_compress.codecs.lowrank import LowRank
from ds_compress.codecs.mixins import FollowsForward, Stateful, VariableSizePayload, layers
from ds_compress.errors import CompressionError, errors_at
from ds_compress.feedback import FEEDBACKS, Feedback
from ds_compress.registry import Options, Steps

STATEFUL = Stateful, VariableSizePayload
"""Abilities of codecs that replicas cannot use: each packet is decoded by itself, to the same bits
everywhere, and its size is known beforehand. `lowrank` can be used, but sends no packets."""


LARGE = 2**20
"""Values of a slice in which the constant part of a packet no longer counts."""

STORE = "DS_COMPRESS_REPLICA_STORE"
"""Environment variable: HOST:PORT of the store at which replicas that are launched apart meet."""


class OuterOptions(Options):
    lr: float = Field(default=1.0, gt=0, le=10)
    """Learning rate of the outer step, which moves the weights by the mean of what replicas have learned."""
    momentum: float = Field(default=0.5, ge=0, lt=1)
    """Nesterov momentum of the outer step; 0 beside codecs of few values, whose residual acts as one."""
    delay: int = Field(default=2, ge=0, le=10**6)
    """Steps that are taken while what replicas have learned is on its way, at most `every`; then training
    waits for it, if it has not arrived, and applies it."""
    quorum: int = Field(default=1, ge=1, le=2**16)
    """Fewest replicas of a round. If fewer come, the round is void, and each sends more in the next one."""
    grace_s: float = Field(default=30.0, gt=0, le=86400)
    """Seconds for which a replica that is ready waits for the others of a round."""


class ReplicasOptions(Options):
    codec: Any = Field(default="none", json_schema_extra={"registry": "codec"})
    """Name of a codec without state, or an object with its name and options. Each parameter's gradient is cut
    into one slice per replica; slices are compressed on their way to the replica that averages them, and the
    averages on their way back. "lowrank": two factors of each matrix are all-reduced (PowerSGD). Tied and
    one-dimensional parameters, those of fewer than 16,384 values, and sparse gradients stay exact. "none":
    DeepSpeed's own all-reduce."""
    feedback: Any = Field(default="none", json_schema_extra={"registry": "feedback"})
    """Name of a feedback whose state only the sender has (ef, ef_mixed, loco), or an object with its name and
    options. Gradients and their averages have residuals of their own, in units without the loss scale."""
    parameters: Literal["none", 4, 8] = "none"
    """Bits in which the owners of partitions send new parameters, as differences to the old ones; needs
    DeepSpeed's BF16_Optimizer and a codec for gradients. "none": DeepSpeed gathers them in bf16."""
    warmup_steps: Steps = 0
    """Optimizer steps at the start of training in which gradients and parameters are exact."""
    bucket_mb: int = Field(default=32, ge=1, le=4096)
    """MB (10^6 bytes) of uncompressed gradients in one exchange; a larger one has an exchange of its own. Of
    new parameters: of a partition in fp32."""
    overlap: bool = True
    """Send the gradients of a bucket as soon as the last backward pass of a step has computed them; only in
    fp32 without ZeRO and with DeepSpeed's BF16_Optimizer, without activation checkpointing and MoE layers.
    false: after that pass. Results are the same, but for last bits of "lowrank" over three replicas or
    more."""
    every: int = Field(default=1, ge=1, le=10**6)
    """Steps after which replicas exchange. 1: gradients of each step, within one launch. More, or "outer":
    each replica is a launch of its own, and sends the change of its weights in a codec of its own
    (docs/several-sites.md)."""
    outer: OuterOptions | None = None
    """How replicas that are launched apart meet, and what they do with the mean of their changes."""

    @property
    def apart(self) -> OuterOptions | None:
        """Return the options of the outer step; None if the replicas are those of one launch."""
        outer = self.outer or (OuterOptions() if self.every > 1 else None)
        return outer and outer.model_copy(update={"delay": min(outer.delay, self.every)})


def build_tied_codec(options: Any, path: str) -> Codec | None:
    """Return the codec of the gradients of tied weights, wrapped in its feedback; None if they stay exact.

    Args:
        options: with a codec and a feedback.
        path: of the options, for errors.

    Raises:
        CompressionError: the codec or the feedback cannot work between copies of a weight.
    """
    codec = CODECS.build(options.codec, f"{path}.codec")
    feedback = FEEDBACKS.build(options.feedback, f"{path}.feedback")
    _check_exchanged(codec, feedback, path, "copies of a tied weight")
    return None if codec.name == "none" else _wrapped(codec, feedback, path, "copies of a tied weight")


def build_replica_codec(options: ReplicasOptions | None, path: str) -> Codec | None:
    """Return the codec between replicas, wrapped in its feedback; None if gradients stay exact.

    Args:
        path: of the options, for errors.

    Raises:
        CompressionError: the codec or the feedback cannot work between replicas.
    """
    if options is None:
        return None
    for key in ("parameters", "warmup_steps", "bucket_mb", "overlap") if options.apart else ():
        if key in options.model_fields_set:
            raise CompressionError(
                f"{path}.{key}: {getattr(options, key)} is not allowed with every above 1 or outer: there "
                "replicas exchange no gradients; leave it out"
            )
    outer = options.outer
    if outer is not None and "delay" in outer.model_fields_set and outer.delay > options.every:
        raise CompressionError(
            f"{path}.outer.delay: {outer.delay} is not allowed with every {options.every}; allowed: integers "
            f"from 0 to {options.every}"
        )
    codec = CODECS.build(options.codec, f"{path}.codec")
    feedback = FEEDBACKS.build(options.feedback, f"{path}.feedback")
    is_summed = isinstance(codec, LowRank) and not options.apart
    if not is_summed:
        _check_exchanged(codec, feedback, path, "replicas", everywhere=options.apart is not None)
    elif feedback.name not in ("none", "ef", "loco"):
        raise CompressionError(
            f"{path}.feedback: {feedback.name!r} is not allowed with codec 'lowrank', which sends one pair "
            "of factors; allowed: 'none', 'ef', 'loco'"
        )
    if codec.name == "none" and not options.apart:
        if options.parameters != "none":
            raise CompressionError(
                f"{path}.parameters: {options.parameters} is not allowed with codec 'none'; set a codec"
            )
        return None
    return _wrapped(codec, feedback, path, "replicas")


def _check_exchanged(
    codec: Codec, feedback: Feedback, path: str, between: str, everywhere: bool = False
) -> None:
    """Refuse a codec or feedback of which a packet does not decode by itself.

    Args:
        between: what exchanges packets, for errors.
        everywhere: whether all processors have to decode alike.
    """
    reuses = isinstance(codec, FollowsForward) and codec.forward_partner() is not None
    if isinstance(codec, STATEFUL) or reuses or (everywhere and not codec.decodes_alike):
        raise CompressionError(
            f"{path}.codec: {codec} is not allowed between {between}: it depends on other messages than "
            "the one it decodes, its packets have no fixed size, or processors decode them differently; "
            "allowed: 'quantize', 'topk' and the like"
        )
    if feedback.has_mirrored_state or feedback.sample_ids is not None:
        raise CompressionError(
            f"{path}.feedback: {feedback.name!r} is not allowed between {between}: receivers would need "
            "its state; allowed: 'none', 'ef', 'ef_mixed', 'loco'"
        )


def _wrapped(codec: Codec, feedback: Feedback, path: str, between: str) -> Codec:
    with errors_at(f"{path}.feedback"):
        feedback.check_growth(codec)
        wrapped = feedback.wrap(codec)
    check_size(wrapped, torch.float32, path, between)
    return wrapped


def check_size(codec: Codec, dtype: torch.dtype, path: str, between: str = "replicas") -> None:
    """Refuse a codec whose packets are larger than what it compresses.

    Args:
        dtype: of DeepSpeed's own exchange.
        path: of the options, for errors.
        between: what exchanges packets, for errors.

    Raises:
        CompressionError: names both sizes.
    """
    if isinstance(codec, LowRank) or any(layers(codec, LowRank)):  # sends factors of matrices, no slices
        return
    spec = TensorSpec((LARGE,), torch.float32)
    sent, raw = bytes_of(codec.layout(spec)), LARGE * dtype.itemsize
    if sent > raw:
        raise CompressionError(
            f"{path}.codec: {codec} is not allowed between {between}: it sends {8 * sent / LARGE:.3g} bits "
            f"per value, DeepSpeed {8 * dtype.itemsize}; use fewer bits or a lower density, or 'none'"
        )


def replica_notes(options: ReplicasOptions | None, path: str) -> Iterator[str]:
    """Yield one line if the replicas' codec drops most of each gradient for good; `path`: of the options."""
    if options is None or options.feedback not in ("none", {"name": "none"}):
        return
    codec = CODECS.build(options.codec, f"{path}.codec")
    if codec.name == "randomk":
        yield (
            f"{path}.feedback: 'none' beside {codec}, which drops all other entries of each gradient: the "
            "model hardly learns; use feedback 'ef', or codec 'quantize'"
        )
