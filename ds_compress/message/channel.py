"""A boundary as one of its two sides sees it, with its two channels: messages to packets and back.

Sender and receiver of a message each hold a `Boundary` of their own; nothing but packets passes between them.
The same objects serve the pipeline engine and `simulate`.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, TensorSpec, check_accepted
from ds_compress.codecs.memory import Remembers
from ds_compress.codecs.mixins import Learns, Observes, Offloads, SecondPacket, layers
from ds_compress.config import DIRECTIONS, KEY, BoundaryCodecs, Config
from ds_compress.errors import CompressionError
from ds_compress.kernels.memory import is_out_of_memory
from ds_compress.message.packet import HEADER_SIZE, Header, PacketLayout

HEADERS_CHECKED = 4
"""On devices other than the CPU only so many packets of a layout have their header read: it costs a host
sync."""


@dataclass(frozen=True)
class MessageId:
    """When a message is made: what its codec context and its header are derived from."""

    step: int  # optimizer steps done before this one
    micro_batch: int
    training: bool
    loss_scale: float = 1.0  # of the gradients


@dataclass
class Counters:
    """Running totals of what a channel sent."""

    messages: int = 0
    raw_bytes: int = 0  # of the tensors
    wire_bytes: int = 0  # of the packets, headers included


class MessageLayout:
    """All that follows from the specs of a message's tensors and from whether they are compressed."""

    def __init__(self, specs: tuple[TensorSpec, ...], codec: Codec | None, exempt: list[str], ids: int = 0):
        """
        Args:
            codec: None sends all as it is.
            exempt: why it does not apply to each tensor, empty where it does.
            ids: how many, of samples, are sent last.
        """
        self.specs = specs
        self.exempt = exempt
        self.codecs = [None if reason else codec for reason in exempt]
        layouts = [c.layout(s) if c else ((s.shape, s.dtype),) for c, s in zip(self.codecs, specs)]
        self.splits = [len(layout) for layout in layouts]
        identity = [(s.shape, s.dtype, c.settings if c else None) for c, s in zip(self.codecs, specs)]
        self.ids = ids
        id_layout = (((ids,), torch.int64),) if ids else ()
        self.packet = PacketLayout(tuple(part for layout in layouts for part in layout) + id_layout, identity)
        self.raw_bytes = sum(spec.nbytes for spec in specs)
        self.device = specs[0].device
        self.headers_left = HEADERS_CHECKED

    def describe(self) -> str:
        """What becomes of each tensor, after the warm-up; empty for a lone one."""
        if len(self.specs) == 1:
            return ""
        fates = (f"as it is, {reason}" if reason else "compressed" for reason in self.exempt)
        shapes = ("x".join(map(str, spec.shape)) for spec in self.specs)
        return "; ".join(f"tensor {n} ({shape}) {fate}" for n, (shape, fate) in enumerate(zip(shapes, fates)))


class Channel:
    """One direction of one boundary: which tensors are compressed, the packet layouts, the counters."""

    def __init__(self, boundary: "Boundary", direction: str, codec: Codec):
        self.boundary = boundary
        self.direction = direction
        self.codec = codec
        self.sent = Counters()
        self.last: MessageLayout | None = None
        self.rest: Tensor | None = None  # a second packet that has to follow the one encoded last
        self._messages: dict[tuple[object, ...], MessageLayout] = {}

    @property
    def place(self) -> str:
        """What errors call it."""
        return f"boundary {self.boundary.number}, {self.direction}"

    def message(self, specs: tuple[TensorSpec, ...], moment: MessageId, raw_tail: int = 0) -> MessageLayout:
        """The message of tensors with `specs` at `moment`; the last `raw_tail` tensors are never
        compressed."""
        codec = self.codec if self.boundary.compresses(moment) else None
        ids = self._ids(specs, moment)
        key = (specs, codec is None, raw_tail, ids)
        if key not in self._messages:
            exempt = self._exempt(specs, raw_tail)
            for spec, reason in zip(specs, exempt):
                if not reason:  # refused in the warm-up already, and on both sides alike
                    check_accepted(self.codec, spec, self.place)
            self._messages[key] = MessageLayout(specs, codec, exempt, ids)
        return self._messages[key]

    def forget_layouts(self) -> None:
        """What was known of messages no longer holds."""
        self._messages.clear()

    def compressed_bytes(self, message: MessageLayout) -> int:
        """Bytes that `message` takes on the wire after the warm-up, a second packet included."""
        compressed = MessageLayout(message.specs, self.codec, message.exempt, message.ids)
        rest = sum(
            codec.rest_bytes(spec)
            for codec, spec in zip(compressed.codecs, compressed.specs)
            if isinstance(codec, SecondPacket)
        )
        return compressed.packet.nbytes + (HEADER_SIZE + rest if rest else 0)

    def encode(
        self,
        tensors: Sequence[Tensor],
        moment: MessageId,
        raw_tail: int = 0,
        memory: Callable[[int], Tensor] | None = None,
    ) -> Tensor:
        """The packet of `tensors`, counted as sent.

        Args:
            tensors: what DeepSpeed sends in one instruction, in its order; not modified.
            raw_tail: how many tensors at the end are never compressed.
            memory: gives uint8 memory of so many bytes for the packet; newly allocated when absent.
        """
        message = self.message(tuple(map(TensorSpec.of, tensors)), moment, raw_tail)
        layout = message.packet
        packet = memory(layout.nbytes) if memory else layout.allocate(message.device)
        parts: list[Tensor] = []
        rest: list[Tensor] = []
        with torch.no_grad():
            for split, (tensor, codec, ctx) in zip(message.splits, self._walk(tensors, message, moment)):
                own = codec.encode(tensor.detach(), ctx) if codec else (tensor,)
                parts += own[:split]
                rest += own[split:]
            if message.ids:
                parts.append(self.boundary.sample_ids[moment.micro_batch])
            layout.write(packet, self._header(layout, moment), tuple(parts))
            self.rest = self._rest_packet(rest, moment) if rest else None
        self.last = message
        self.sent.messages += 1
        self.sent.raw_bytes += message.raw_bytes
        self.sent.wire_bytes += packet.numel() + (self.rest.numel() if self.rest is not None else 0)
        return packet

    def decode(
        self,
        packet: Tensor,
        message: MessageLayout,
        moment: MessageId,
        fetch: Callable[[int], Tensor] | None = None,
    ) -> list[Tensor]:
        """The tensors in `packet`, with the message's specs; those sent as they are are views of the packet.

        Args:
            fetch: gives the second packet, of so many bytes, when there is one.

        Raises:
            CompressionError: the packet is not the expected message.
        """
        header = self._header(message.packet, moment)
        if packet.device.type == "cpu" or message.headers_left > 0 or header.sealed:
            message.headers_left -= 1
            header.check(packet)
        views = iter(message.packet.views(packet))
        parts = [tuple(next(views) for _ in range(split)) for split in message.splits]
        if message.ids:
            self.boundary.sample_ids[moment.micro_batch] = next(views).cpu().clone()
        parts = self._with_rest(parts, message, moment, fetch)
        with torch.no_grad():
            return [
                self._decoded(codec, own, spec, ctx) if codec else own[0]
                for spec, (own, codec, ctx) in zip(message.specs, self._walk(parts, message, moment))
            ]

    def _decoded(self, codec: Codec, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        try:
            return codec.decode(parts, spec, ctx)
        except CompressionError:
            raise
        except Exception as error:  # an index beyond the tensor, a broken frame, ...
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CompressionError(
                f"packet for {self.place}, step {ctx.step}, micro-batch {ctx.micro_batch}: {codec} "
                "cannot decode it "
                f'({reason}); was it damaged on its way? "link": {{"checksum": true}} tells'
            ) from error

    def _ids(self, specs: tuple[TensorSpec, ...], moment: MessageId) -> int:
        """How many sample ids a message carries."""
        source = self.boundary.config.sample_ids
        return source.count(specs) if source and moment.training and self.direction == "forward" else 0

    def _rest_packet(self, rest: list[Tensor], moment: MessageId) -> Tensor:
        layout = PacketLayout(tuple((tuple(part.shape), part.dtype) for part in rest), "rest")
        packet = layout.allocate(rest[0].device)
        layout.write(packet, self._header(layout, moment), tuple(rest))
        return packet

    def _with_rest(
        self,
        parts: list[tuple[Tensor, ...]],
        message: MessageLayout,
        moment: MessageId,
        fetch: Callable[[int], Tensor] | None,
    ) -> list[tuple[Tensor, ...]]:
        """`parts` of each tensor, with those that came in a second packet."""
        rests = [
            codec.rest(own, spec) if isinstance(codec, SecondPacket) else ()
            for codec, own, spec in zip(message.codecs, parts, message.specs)
        ]
        layout = PacketLayout(tuple(part for rest in rests for part in rest), "rest")
        if not layout.parts:
            return parts
        packet = fetch(layout.nbytes)
        self._header(layout, moment).check(packet)
        views = iter(layout.views(packet))
        return [own + tuple(next(views) for _ in rest) for own, rest in zip(parts, rests)]

    def listener(self) -> "Channel":
        """This channel as the other side has it before the next message: what it decodes leaves no trace
        here."""
        boundary = copy.copy(self.boundary)
        boundary.memory = {position: dict(memory) for position, memory in boundary.memory.items()}
        boundary.sample_ids = dict(boundary.sample_ids)
        boundary._stashes = {key: dict(stash) for key, stash in boundary._stashes.items()}
        channel = copy.copy(self)
        channel.boundary = boundary
        return channel

    def _exempt(self, specs: tuple[TensorSpec, ...], raw_tail: int) -> list[str]:
        """Why each tensor is not compressed, after the warm-up; empty for those that are."""
        block = self.boundary.config.block
        lone = sum(spec.dtype.is_floating_point for spec in specs) == 1
        position, reasons = 0, []
        for index, spec in enumerate(specs):
            is_float = spec.dtype.is_floating_point
            if not is_float:
                reasons.append(f"it is {str(spec.dtype).removeprefix('torch.')}")
            elif index >= len(specs) - raw_tail:
                reasons.append("it is a mask")
            elif block.tensors != "large":
                reasons.append("" if position in block.tensors else f'"tensors" is {block.tensors}')
            elif spec.numel < block.min_numel:
                reasons.append(f"{spec.numel} values are fewer than min_numel")
            else:
                reasons.append("" if lone else self.boundary.why_exempt(position))
            position += is_float
        if block.tensors != "large" and all(reasons):
            raise CompressionError(
                f"{KEY}.tensors: {block.tensors}: a message of {self.place} has {position} float "
                "tensors, so none "
                'is compressed; allowed: positions below that, or "large"'
            )
        return reasons

    def _walk(self, items: Iterable[Any], message: MessageLayout, moment: MessageId):
        """`items`, one per tensor, each with its codec and context; no context for a tensor that is not
        float.

        Positions count the float tensors, so that a gradient finds its activation. A codec that will take
        over after the warm-up sees the tensors that cross uncompressed until then.
        """
        position = 0
        for item, spec, codec, exempt in zip(items, message.specs, message.codecs, message.exempt):
            is_float = spec.dtype.is_floating_point
            ctx = self.boundary.context(self.direction, position, moment) if is_float else None
            if not exempt and codec is None and moment.training:
                for layer in layers(self.codec, Observes):
                    layer.observe(item.detach() if isinstance(item, Tensor) else item[0], ctx)
            yield item, codec, ctx
            position += is_float

    def _header(self, layout: PacketLayout, moment: MessageId) -> Header:
        return Header(
            self.boundary.number,
            self.direction,
            moment.step,
            moment.micro_batch,
            moment.training,
            layout.fingerprint,
            layout.nbytes,
            self.boundary.config.block.link.checksum,
        )


class Boundary:
    """One side of the cut between stages `number` and `number` + 1: both channels and all that outlives a
    message."""

    def __init__(self, number: int, config: Config, replica: int = 0):
        """`replica`: data-parallel rank; it varies the random choices of the codecs."""
        self.number = number
        self.config = config
        self.replica = replica
        codecs: BoundaryCodecs = config.codecs(number)
        self.forward = Channel(self, "forward", codecs.forward)
        self.backward = Channel(self, "backward", codecs.backward)
        self.memory: dict[int, dict[str, Tensor]] = {}
        self.sample_ids: dict[int, Tensor] = {}  # of the present step, by micro-batch
        self._carrying: tuple[bool, ...] | None = None
        self._stashes: dict[tuple[int, int], dict[str, Tensor]] = {}

    @property
    def channels(self) -> tuple[Channel, Channel]:
        return tuple(getattr(self, direction) for direction in DIRECTIONS)

    @property
    def carrying(self) -> tuple[bool, ...] | None:
        """Of each float tensor of a message, whether it carries what the model has learned (see `carrying`);
        None where nobody has said. Both sides are told the same."""
        return self._carrying

    @carrying.setter
    def carrying(self, carrying: tuple[bool, ...] | None) -> None:
        if carrying != self._carrying:
            self._carrying = carrying
            for channel in self.channels:
                channel.forget_layouts()

    def why_exempt(self, position: int) -> str:
        """Why the float tensor at `position`, one of several, is not compressed; empty if it is."""
        if self._carrying is None or position >= len(self._carrying):
            return "nobody knows whether it carries a gradient"
        return "" if self._carrying[position] else "it carries no gradient"

    def compresses(self, moment: MessageId) -> bool:
        """Whether messages at `moment` are compressed; the same on both sides by construction."""
        compressed = moment.training or self.config.block.eval == "compressed"
        return compressed and moment.step >= self.config.warmup_steps

    def context(self, direction: str, position: int, moment: MessageId) -> Context:
        """The context of the float tensor at `position` in a message.

        In training a forward message leaves its stash for the backward message of the same micro-batch, which
        takes it away. Evaluation leaves nothing: its stash and its copy of the memory go with the context.
        """
        memory = self.memory.setdefault(position, {})
        key = (moment.micro_batch, position)
        if not moment.training:
            stash, memory = {}, dict(memory)
        elif direction == "forward":
            stash = self._stashes[key] = {}
        else:
            stash = self._stashes.pop(key, {})
        return Context(
            boundary=self.number,
            direction=direction,
            step=moment.step,
            micro_batch=moment.micro_batch,
            position=position,
            replica=self.replica,
            seed=self.config.block.seed,
            training=moment.training,
            loss_scale=moment.loss_scale if direction == "backward" else 1.0,
            sample_ids=self.sample_ids.get(moment.micro_batch) if direction == "forward" else None,
            stash=stash,
            memory=memory,
        )

    def check(self, memories: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Look at what a checkpoint has, by tensor position, before it is restored.

        Raises:
            CompressionError: no codec of this boundary could have left an entry of its name so.
        """
        for memory in memories.values():
            for channel, other in zip(self.channels, DIRECTIONS[::-1]):
                own = {key: value for key, value in memory.items() if not key.startswith(f"{other}/")}
                for layer in layers(channel.codec, Remembers):
                    layer.check_memory(own)

    def forget_mirrored(self, direction: str) -> None:
        """Drop what both sides hold alike in `direction`: it starts from zero when both do so."""
        for position, memory in self.memory.items():
            self.memory[position] = {
                key: value for key, value in memory.items() if not key.startswith(f"{direction}/mirror/")
            }

    def restore(self, memories: dict[int, dict[str, Tensor]], device: torch.device) -> None:
        """Make `memories`, by tensor position, all that is remembered."""
        self.memory = {}
        for position, values in memories.items():
            memory = {key: value if "/host/" in key else value.to(device) for key, value in values.items()}
            for channel in self.channels:
                for layer in layers(channel.codec, Offloads):
                    layer.restored(memory)
            self.memory[position] = memory

    def prefetch(self, ids: Tensor) -> None:
        """A forward message of the samples `ids` will be encoded soon."""
        for layer in layers(self.forward.codec, Offloads):
            for memory in self.memory.values():
                layer.prefetch(ids, memory)

    def begin_step(self) -> None:
        """Forget what an interrupted step left."""
        self._stashes.clear()

    def end_step(self, average: Callable[[Tensor], Tensor]) -> None:
        """Let codecs update what they learn; `average`: the mean of a tensor over the data-parallel
        replicas."""
        for position in sorted(self.memory):
            for channel in self.channels:
                with torch.no_grad():
                    for layer in layers(channel.codec, Learns):
                        layer.end_step(self.memory[position], average)
