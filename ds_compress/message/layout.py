"""The layout of a message, which follows from the shapes and dtypes of its tensors."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_compress.codec import Codec, Layout, MessageId, TensorSpec
from ds_compress.codecs.casts import Identity
from ds_compress.codecs.mixins import VariableSizePayload
from ds_compress.config import KEY, Block
from ds_compress.errors import CompressionError, in_one_line, shown
from ds_compress.kernels.memory import is_of_this_rank
from ds_compress.message.packet import PacketLayout
from ds_compress.transport.packet_memory import Packet

HEADERS_CHECKED = 4
"""Number of packets of a layout whose header is read on a GPU, where reading synchronises with the host."""


class MessageLayout:
    """What follows from the specs of a message's tensors, and from whether they are compressed."""

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        codec: Codec | None,
        exempt: list[str],
        ids: int = 0,
        has_checksum: bool = False,
    ):
        """
        Args:
            codec: None: all tensors are sent uncompressed.
            exempt: for each tensor why it is not compressed, "" if it is.
            ids: number of sample ids, which are sent last.
            has_checksum: see `PacketLayout`.
        """
        self.specs = specs
        self.compressed = codec is not None
        self.exempt = exempt
        self.codecs = [None if reason else codec for reason in exempt]
        layouts = [c.layout(s) if c else ((s.shape, s.dtype),) for c, s in zip(self.codecs, specs)]
        ends = [0, *itertools.accumulate(map(len, layouts))]
        self.places = [slice(start, end) for start, end in itertools.pairwise(ends)]
        """Payload tensors of the packet that belong to each tensor, as slices."""
        identity = [(s.shape, s.dtype, c.settings if c else None) for c, s in zip(self.codecs, specs)]
        self.ids = ids
        id_layout = (((ids,), torch.int64),) if ids else ()
        parts = tuple(part for layout in layouts for part in layout) + id_layout
        self.packet = PacketLayout(parts, identity, has_checksum)
        self.has_extra_payload = any(isinstance(codec, VariableSizePayload) for codec in self.codecs)
        floats = [spec.dtype.is_floating_point for spec in specs]
        self.positions = [sum(floats[:index]) for index in range(len(specs))]
        """Number of each tensor among the float tensors, so that a gradient finds its activation."""
        used = [None if type(codec) is Identity else codec for codec in self.codecs]
        # an exempt tensor has no stash; one that is not float has the position of the next float tensor
        stashes = [position if codec else -1 for codec, position in zip(self.codecs, self.positions)]
        self.tensor_plans = [*zip(used, self.places, stashes, specs)]
        """Per tensor: its codec (None: sent uncompressed), its payload tensors, its position (-1: the
        forward message has no stash for it) and its spec."""
        self.raw_bytes = sum(spec.nbytes for spec in specs)
        self.device = specs[0].device
        self.headers_left = HEADERS_CHECKED

    def compressed_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those of a message's `tensors` that are compressed: masks beside them may be larger."""
        return [tensor for tensor, codec in zip(tensors, self.codecs) if codec is not None]

    def compressed_bytes(self, codec: Codec) -> int:
        """Return bytes that such a message takes on the wire with `codec`, an extra packet included."""
        return self._bytes(codec, lambda each, spec: each.planned_extra_payload(spec))

    def most_bytes(self, codec: Codec) -> int:
        """Return the same of the largest such message, of first visits for instance."""
        return self._bytes(codec, lambda each, spec: each.largest_extra_payload(spec))

    def _bytes(self, codec: Codec, extra_of: Callable[[VariableSizePayload, TensorSpec], Layout]) -> int:
        compressed = MessageLayout(self.specs, codec, self.exempt, self.ids)
        takers = [spec for taker, spec in zip(compressed.codecs, self.specs) if taker]
        if not isinstance(codec, VariableSizePayload):
            return compressed.packet.nbytes
        extra = tuple(part for spec in takers for part in extra_of(codec, spec))
        return compressed.packet.nbytes + (PacketLayout(extra, "rest").nbytes if extra else 0)

    def describe(self, codec: Codec) -> str:
        """Describe which tensors are compressed after the warm-up, and the bytes of the largest message.

        Returns:
            An empty string for a single tensor whose messages all have the same size.
        """
        most = self.most_bytes(codec)
        larger = f"at most {most:,} bytes" if most > self.compressed_bytes(codec) else ""
        taken = [spec for spec, why in zip(self.specs, self.exempt) if not why]
        if isinstance(codec, VariableSizePayload) and any(map(codec.planned_extra_payload, taken)):
            larger = "at most: the size follows from the data"
        numbers: dict[str, list[str]] = {}
        for number, reason in enumerate(self.exempt if len(self.specs) > 1 else ()):
            numbers.setdefault(f"uncompressed, {reason}" if reason else "compressed", []).append(str(number))
        fates = (f"tensor {', '.join(own)} {fate}" for fate, own in numbers.items())
        return "; ".join(filter(None, (*fates, larger)))


class Encoded(NamedTuple):
    """What a channel made of a message."""

    packet: Packet
    extra: Packet | None  # an extra packet that has to follow
    layout: MessageLayout

    @property
    def nbytes(self) -> int:
        return self.packet.nbytes + (self.extra.nbytes if self.extra is not None else 0)


@dataclass
class Counters:
    """Running totals of what a channel sent."""

    messages: int = 0
    raw_bytes: int = 0  # of the tensors
    wire_bytes: int = 0  # of the packets, headers included
    samples: int = 0  # where a feedback tells them apart
    returned: int = 0  # of those, that had come before
    latest: MessageLayout | None = None  # of the message that was sent last

    @property
    def totals(self) -> tuple[int, ...]:
        """Return all totals, in the order of the fields."""
        return self.messages, self.raw_bytes, self.wire_bytes, self.samples, self.returned

    def add(self, encoded: Encoded, known: Sequence[bool] = ()) -> None:
        """Count a message; `known`: see `Context.known`."""
        self.messages += 1
        self.samples += len(known)
        self.returned += sum(known)
        self.raw_bytes += encoded.layout.raw_bytes
        self.wire_bytes += encoded.nbytes
        self.latest = encoded.layout


def find_exemptions(
    specs: Sequence[TensorSpec],
    uncompressed_tail: int,
    block: Block,
    dependence: tuple[bool, ...] | None,
    place: str,
) -> list[str]:
    """Find out why each tensor of a message is sent uncompressed after the warm-up.

    Args:
        specs: of the tensors.
        uncompressed_tail: how many tensors at the end are masks.
        block: of the config.
        dependence: see `Boundary.dependence`.
        place: of the message, for errors.

    Returns:
        A reason for each tensor, empty for those that are compressed.

    Raises:
        CompressionError: the "tensors" of the block leave none.
    """
    is_lone = sum(spec.dtype.is_floating_point for spec in specs) == 1
    position, reasons = 0, []
    for index, spec in enumerate(specs):
        is_float = spec.dtype.is_floating_point
        is_known = dependence is not None and position < len(dependence)
        if not is_float:
            reasons.append(f"it is {str(spec.dtype).removeprefix('torch.')}")
        elif index >= len(specs) - uncompressed_tail:
            reasons.append("it is a mask")
        elif block.tensors != "large":
            reasons.append("" if position in block.tensors else f'"tensors" is {shown(block.tensors)}')
        elif spec.numel < block.min_numel:
            reasons.append(f"{spec.numel} values are fewer than min_numel")
        elif dependence is not None and is_known:
            reasons.append("" if dependence[position] else "it depends on no parameter or holds a mask")
        else:  # without a tracker a lone float tensor is taken for the hidden state
            reasons.append("" if is_lone else "not known to depend on parameters")
        position += is_float
    if block.tensors != "large" and all(reasons):
        raise CompressionError(
            f"{KEY}.tensors: {shown(block.tensors)}: a message of {place} has {position} float tensors, so "
            'none is compressed; allowed: positions below that, or "large"'
        )
    return reasons


def explain(error: Exception, codec: Codec, place: str, message_id: MessageId) -> None:
    """Raise a decoding `error` again, with the place and number of its packet.

    Return if `error` needs no such line: it is a `CompressionError`, or memory ran out, or a device failed.
    """
    if isinstance(error, CompressionError) or is_of_this_rank(error):
        return
    number = f"step {message_id.step}, micro-batch {message_id.micro_batch}"
    raise CompressionError(
        f"packet for {place}, {number}: {codec} cannot decode it "
        f'({in_one_line(error)}); was it damaged on its way? "link": {{"checksum": true}} finds out'
    ) from error


def tensors_in(message: Any) -> list[Tensor] | None:
    """Return the tensors of a message, if it is a tensor, or a tuple or a list of nothing else."""
    if torch.is_tensor(message):
        return [message]
    if isinstance(message, (tuple, list)) and all(map(torch.is_tensor, message)):
        return list(message)
    return None


def as_list(tensors: Any) -> list[Tensor]:
    """Return the tensors of a message, which DeepSpeed has as a tensor, a tuple or a list."""
    return [tensors] if torch.is_tensor(tensors) else list(tensors)
