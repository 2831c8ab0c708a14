"""The outer step of replicas that are launched apart: its arithmetic, and the packets of a rank.

    after H steps of its own, every replica            when the packets of a round have come
    delta = anchor - weights                           mean = mean of the decoded packets, in rank order
    packet = C(delta + e)                              anchor = anchor - step(mean)     (Nesterov)
    e = delta + e - decoded packet                     weights = anchor + (weights - base)

The anchor is the same on all replicas: what they agreed on last. The base is the replica's weights when it
sent the packet, so that progress made since then is not lost; for a replica whose packet did not count it is
the old anchor, so that its next delta contains this one. Replicas may have different codecs, as one behind a
slow link, so a packet ends in the settings of its own. Sources: DiLoCo (arXiv 2311.08105), its overlapped
forms (2501.18512, 2502.12996), SparseLoCo (2508.15706) for TopK with error feedback, and its heterogeneous
form (2601.02360).
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.codec import Codec, TensorSpec, build
from ds_compress.config.replicas import OuterOptions, ReplicasOptions, build_replica_codec
from ds_compress.errors import CompressionError, failures_at, shown
from ds_compress.replicas.slices import GRADIENT, RowSpan, Slice, SliceCodec

EXACT = 2**16 - 1
"""Number of the slice that contains all parts that stay exact."""

MIN_DELTA_NUMEL = 1024
"""Deltas of fewer values stay exact. It is below `MIN_NUMEL` of gradients: a round has time for small
packets, and those of LoRA are all small."""

LENGTH = 2
"""Last bytes of a packet: how long the settings before them are, little-endian."""

READERS = 16
"""Settings of others for which a codec is kept."""

NO_STAGE = 2**16
"""Tied copies on several stages draw the same random bits."""


class DeltaPart(NamedTuple):
    """The part of a parameter that a rank has; it is compressed."""

    number: int  # of the parameter: equal for tied copies, which then stay equal; below `EXACT`
    numel: int
    rows: RowSpan | None = None  # whose zeros stay; None: not known


class Anchor(NamedTuple):
    """What all replicas agree on. Both tensors are fp32, 1-D, and never modified in place."""

    values: Tensor  # weights
    momentum: Tensor

    def step(self, mean: Tensor, options: OuterOptions) -> "Anchor":
        """Return the anchor after an outer step with `mean`, the mean delta of a round."""
        # products are rounded by themselves: some processors fuse them with the sum, and anchors would differ
        momentum = mean + options.momentum * self.momentum
        direction = mean + options.momentum * momentum
        return Anchor(self.values - options.lr * direction, momentum)


class DeltaCodec:
    """Turns deltas into packets and back. A delta has all compressed parts, then what stays exact."""

    def __init__(self, codec: Codec, parts: Sequence[DeltaPart], exact: int, seed: int):
        """
        Args:
            codec: wrapped in its feedback.
            exact: number of values that stay exact.
            seed: of the codec's random choices.
        """
        self.codec = codec
        self._for_readers = parts, exact, seed
        label = json.dumps(codec.settings).encode()
        self._label = label + len(label).to_bytes(LENGTH, "little")
        self._reader = functools.lru_cache(READERS)(self._build_reader)
        self.numel = sum(part.numel for part in parts) + exact
        self.digest = hashlib.blake2b(repr(([*parts], exact)).encode(), digest_size=8).hexdigest()
        """Of the parts: replicas whose models differ have different ones."""
        shared = seed, True, NO_STAGE
        compressed = SliceCodec(codec, *shared, content="delta")
        plain = SliceCodec(build("none", ""), *shared, content="delta")
        cut = [(part, compressed) for part in parts]
        cut += [(DeltaPart(EXACT, exact), plain)] if exact else []
        self._slices = [
            (Slice(number, 0, TensorSpec((numel,), torch.float32), rows), used)
            for (number, numel, rows), used in cut
        ]
        self.nbytes = sum(used.layout(own).nbytes for own, used in self._slices) + len(self._label)
        """Bytes of a packet."""

    def encode(self, delta: Tensor, round_number: int, sender: int) -> Tensor:
        """Return the packet of `delta` (fp32, 1-D) and update the residuals.

        Args:
            sender: number of the replica, below 2**31.
        """
        packet = torch.zeros(self.nbytes, dtype=torch.uint8, device="cpu")
        for own, used, values, part in self._cut(packet, delta):
            used.encode(own, values, part, GRADIENT, round_number, sender)
        packet[-len(self._label) :] = torch.frombuffer(bytearray(self._label), dtype=torch.uint8)
        return packet

    def decode(self, packet: Tensor, round_number: int, sender: int) -> Tensor:
        """Return the delta (fp32, 1-D) in a packet (uint8, 1-D), which another codec may have made.

        Raises:
            CompressionError: the packet is damaged, of another round or layout, of a codec that is not known
                here, or has inf or nan.
        """
        size = int.from_bytes(packet[-LENGTH:].numpy().tobytes(), "little")
        label = packet[-LENGTH - size :].numpy().tobytes()
        if label != self._label:
            return self._reader(label).decode(packet, round_number, sender)
        if packet.numel() != self.nbytes:
            raise CompressionError(f"{packet.numel()} bytes came, expected {self.nbytes}")
        delta = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        for own, used, values, part in self._cut(packet, delta):
            values.copy_(used.decode(own, part, GRADIENT, round_number, sender))
        if not bool(delta.isfinite().all()):
            raise CompressionError("it has values that are inf or nan")
        return delta

    def _build_reader(self, label: bytes) -> "DeltaCodec":
        """Return what decodes packets that end in `label`.

        Raises:
            CompressionError: no replica could have these settings.
        """
        with failures_at("it does not end in the settings of a codec"):  # whatever a stranger may write
            codec = dict(json.loads(label[:-LENGTH]))
            feedback = codec.pop("feedback", "none")
            options = ReplicasOptions(codec=codec, feedback=feedback, outer=OuterOptions())
            built = build_replica_codec(options, "settings of the sender")
            assert built is not None
            reader = DeltaCodec(built, *self._for_readers)
        if reader._label != label:  # as of a release with other options
            raise CompressionError(f"its codec is not known here: {shown(codec)}")
        return reader

    def residuals(self) -> dict[int, dict[str, Tensor]]:
        """Return the residuals, by number of the slice; later packets replace tensors, so these stay."""
        return {own.number: dict(own.memory) for own, _ in self._slices}

    def restore(self, residuals: dict[int, dict[str, Tensor]]) -> None:
        """Go on with the residuals that `self.residuals()` returned; slices without any begin with zero."""
        for own, _ in self._slices:
            own.memory = dict(residuals.get(own.number, {}))

    def _cut(self, packet: Tensor, delta: Tensor) -> Iterator[tuple[Slice, SliceCodec, Tensor, Tensor]]:
        """Yield each slice with its codec, its values, and its part of the packet."""
        start = offset = 0
        for own, used in self._slices:
            end, stop = start + own.spec.numel, offset + used.layout(own).nbytes
            yield own, used, delta[start:end], packet[offset:stop]
            start, offset = end, stop
