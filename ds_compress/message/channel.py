"""One side of a boundary, with its two channels: they turn messages into packets and back.

Sender and receiver of a message each hold a `Boundary` of their own; nothing but packets passes between them.
The same objects serve the pipeline engine and `simulate`.
"""

import copy
import itertools
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, MessageId, Parts, TensorSpec, check_accepted
from ds_compress.codecs.mixins import (
    CodecWrapper,
    FollowsForward,
    ManagesStorage,
    ObservesWarmup,
    Stateful,
    VariableSizePayload,
    layers,
)
from ds_compress.config import DIRECTIONS, BoundaryCodecs, Config
from ds_compress.errors import CompressionError
from ds_compress.kernels.memory import fill, retain_freed_memory
from ds_compress.message.layout import Counters, Encoded, MessageLayout, explain, find_exemptions
from ds_compress.message.packet import PacketLayout
from ds_compress.transport.packet_memory import Packet

MOST_LAYOUTS = 1024
"""Layouts that a channel keeps, those used last: each takes about 3 kB, and with `dynamic_shape` a run may
have messages of ever new shapes."""

Mode = Literal["compressed", "uncompressed"]
"""How messages of an evaluation are sent."""

Kind = tuple[bool, bool, int, tuple[bool, ...] | None]
"""What a layout depends on beside specs: compressed, training, masks at the end, dependence on parameters."""

Fetch = Callable[[int], Packet | None]
"""Gives the extra packet of a message, of so many bytes; None if there is none."""


class Channel:
    """One direction of one boundary: which tensors are compressed, the packet layouts, the counters."""

    def __init__(self, boundary: "Boundary", direction: str, codec: Codec):
        self.boundary = boundary
        self.direction = direction
        self.sent = Counters()
        self.uncompressed_tail = 0  # tensors at the end of its messages that are never compressed
        self._layouts: dict[tuple[tuple[TensorSpec, ...], Kind], MessageLayout] = {}
        self._latest: dict[Kind, MessageLayout] = {}
        self.adopt(codec)

    @property
    def place(self) -> str:
        """Return what errors call the channel."""
        return f"boundary {self.boundary.number}, {self.direction}"

    def adopt(self, codec: Codec) -> None:
        """Use `codec` from the next message on; the counters go on."""
        self.codec = codec
        self.following = tuple(layers(codec, FollowsForward))  # type: ignore[type-abstract]
        self._layouts.clear()
        self._latest.clear()

    def message_id(self, step: int, micro_batch: int, training: bool = True) -> MessageId:
        """Return the id of a message of this channel; `step`: optimizer steps done before it."""
        return MessageId(self.boundary.number, self.direction, step, micro_batch, training)

    def layout_of(self, tensors: Sequence[Tensor | TensorSpec], message_id: MessageId) -> MessageLayout:
        """Return the layout of a message of tensors like `tensors`."""
        config, training = self.boundary.config, message_id.training
        # both sides find the same
        compressed = training or self.boundary.evaluation == "compressed"
        compressed = compressed and message_id.step >= config.warmup_steps
        dependence = self.boundary.dependence_of(message_id)
        kind = compressed, training, self.uncompressed_tail, dependence
        layout = self._latest.get(kind)
        if layout is not None and len(layout.specs) == len(tensors):
            for spec, tensor in zip(layout.specs, tensors):
                if spec.shape != tensor.shape or spec.dtype != tensor.dtype or spec.device != tensor.device:
                    break
            else:
                return layout
        specs = tuple(map(TensorSpec.of, tensors))  # seldom: hashing all of them takes its time
        layout = self._layouts.pop((specs, kind), None) or self._layout(specs, kind)
        self._latest[kind] = self._layouts[specs, kind] = layout  # now the last one in the dict
        if len(self._layouts) > MOST_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layout

    def _layout(self, specs: tuple[TensorSpec, ...], kind: Kind) -> MessageLayout:
        compressed, training, uncompressed_tail, dependence = kind
        exempt = find_exemptions(specs, uncompressed_tail, self.boundary.config.block, dependence, self.place)
        for spec, reason in zip(specs, exempt):
            if not reason:  # refused in the warm-up already, and on both sides alike
                check_accepted(self.codec, spec, self.place)
        source = self.boundary.config.in_force.sample_ids
        ids = source.count(specs) if source and training and self.direction == "forward" else 0
        if specs[0].device.type == "cpu":  # whatever is made of it is at most in fp32
            retain_freed_memory(max(spec.numel for spec in specs) * torch.float32.itemsize)
        has_checksum = self.boundary.config.block.link.checksum
        return MessageLayout(specs, self.codec if compressed else None, exempt, ids, has_checksum)

    def encode(
        self, tensors: Sequence[Tensor], message_id: MessageId, memory: Callable[[int], Packet] | None = None
    ) -> Encoded:
        """Encode `tensors` to a packet, and count it as sent.

        Args:
            tensors: what DeepSpeed sends in one instruction, in its order; not modified.
            memory: gives a packet of so many bytes to write to; newly allocated when absent.
        """
        message = self.layout_of(tensors, message_id)
        layout = message.packet
        packet = memory(layout.nbytes) if memory else layout.allocate(message.device)
        views, extra, known = layout.views(packet), list[Tensor](), list[bool]()
        with torch.set_grad_enabled(False):  # as no_grad, in a third of its time
            if not message.compressed and message_id.training:
                self._observe(tensors, message, message_id)
            for tensor, (codec, place, position, _) in zip(tensors, message.tensor_plans):
                tensor = tensor.detach() if tensor.requires_grad else tensor
                if codec is None:
                    self.boundary.pass_by(message_id, position, tensor)
                    fill(views[place], (tensor,))
                    continue
                ctx = self.boundary.context(message_id, position)
                ctx.stash.update(self.boundary.left_by(message_id, tensor))
                out = views[place]
                parts = codec.encode_into(tensor, ctx, out)
                if parts is not out:  # some may be made elsewhere, and some go into the extra packet
                    fill(out, parts[: len(out)])
                    extra += parts[len(out) :]
                known += ctx.known
            if message.ids:
                ids = self.boundary.sample_ids[message_id.micro_batch]
                if source := self.boundary.config.in_force.sample_ids:  # no codec may have looked at them
                    source.check(ids, message.specs, self.boundary.number)
                fill(views[-1:], (ids,))
            layout.write_header(packet, message_id)
            encoded = Encoded(packet, self._extra_packet(extra, message_id) if extra else None, message)
        self.sent.add(encoded, known)
        return encoded

    def decode(
        self, packet: Packet, message: MessageLayout, message_id: MessageId, fetch: Fetch | None = None
    ) -> list[Tensor]:
        """Return the tensors in `packet`, with the message's specs; uncompressed ones are views of
        the packet.

        Args:
            fetch: for messages that may have an extra packet.

        Raises:
            CompressionError: the packet is not the expected message.
        """
        layout = message.packet
        if packet.memory.is_cpu or message.headers_left > 0 or layout.has_checksum:
            message.headers_left -= 1
            layout.check(packet, message_id)
        views = layout.views(packet)
        parts = list(map(views.__getitem__, message.places))
        if message.ids:
            self.boundary.sample_ids[message_id.micro_batch] = views[-1].cpu().clone()
        if message.has_extra_payload:
            parts = self._with_extra(parts, message, message_id, fetch)
        with torch.set_grad_enabled(False):
            if not message.compressed and message_id.training:
                self._observe([own[0] for own in parts], message, message_id)
            arrived = []
            for own, (codec, _, position, spec) in zip(parts, message.tensor_plans):
                if codec is None:
                    self.boundary.pass_by(message_id, position, own[0], packet)
                    arrived.append(own[0].detach())  # the next packet of this memory has the same views
                    continue
                ctx = self.boundary.context(message_id, position)
                try:
                    tensor = codec.decode(own, spec, ctx)
                except Exception as error:
                    explain(error, codec, self.place, message_id)
                    raise
                ctx.stash.update(self.boundary.left_by(message_id, tensor, packet))
                arrived.append(tensor.detach() if id(tensor) in map(id, own) else tensor)
        return arrived

    def _observe(self, tensors: Sequence[Tensor], message: MessageLayout, message_id: MessageId) -> None:
        """Let a codec that will take over after the warm-up see what crosses uncompressed until then."""
        observers = list(layers(self.codec, ObservesWarmup))
        for tensor, reason, position in zip(tensors, message.exempt, message.positions):
            if observers and not reason:
                ctx = self.boundary.context(message_id, position)
                for observer in observers:
                    observer.observe(tensor.detach(), ctx)

    def _extra_packet(self, extra: list[Tensor], message_id: MessageId) -> Packet:
        layout = self._extra_layout(tuple((tuple(part.shape), part.dtype) for part in extra))
        packet = layout.allocate(extra[0].device)
        layout.write(packet, message_id, tuple(extra))
        return packet

    def _with_extra(
        self, parts: list[Parts], message: MessageLayout, message_id: MessageId, fetch: Fetch | None
    ) -> list[Parts]:
        """Return `parts` of each tensor, with those that came in an extra packet."""
        extras = [
            codec.extra_payload(own, spec) if isinstance(codec, VariableSizePayload) else ()
            for codec, own, spec in zip(message.codecs, parts, message.specs)
        ]
        layout = self._extra_layout(tuple(itertools.chain.from_iterable(extras)))
        if not layout.parts:
            return parts
        packet = fetch(layout.nbytes) if fetch else None
        if packet is None:
            raise CompressionError(f"{self.place}: no packet follows, expected one of {layout.nbytes} bytes")
        layout.check(packet, message_id)
        views = iter(layout.views(packet))
        return [own + tuple(next(views) for _ in extra) for own, extra in zip(parts, extras)]

    def as_receiver(self) -> "Channel":
        """Return a throw-away copy that decodes the next message as the other side does."""
        channel = copy.copy(self)
        channel.boundary = self.boundary.copied()
        return channel

    def _extra_layout(self, parts: Layout) -> PacketLayout:
        return PacketLayout(parts, "rest", self.boundary.config.block.link.checksum)


class Boundary:
    """One side of the cut between stages `number` and `number` + 1: what it keeps, and its two channels."""

    def __init__(self, number: int, config: Config, replica: int = 0):
        """
        Args:
            replica: data-parallel rank; it varies the random choices of the codecs.
        """
        self.number = number
        self.config = config
        self.replica = replica
        self.memory: dict[int, dict[str, Tensor]] = {}  # by tensor position
        self.sample_ids: dict[int, Tensor] = {}  # of the present step, by micro-batch
        self.evaluation: Mode = config.eval
        self.loss_scale = 1.0  # of the gradients of the present step
        self.dependence: tuple[bool, ...] | None = None
        """Whether each float tensor of a message depends on parameters and holds no mask; None while that is
        not known. Equal on both sides."""
        self._saved_dependence: tuple[bool, ...] | None = None  # of the run whose checkpoint was loaded
        self._dependences: dict[int, tuple[bool, ...] | None] = {}  # of the present step, by micro-batch
        self._stashes: dict[tuple[int, int], dict[str, Tensor]] = {}
        codecs: BoundaryCodecs = config.in_force.codecs(number)
        self.forward = Channel(self, "forward", codecs.forward)
        self.backward = Channel(self, "backward", codecs.backward)

    @property
    def channels(self) -> tuple[Channel, Channel]:
        return self.forward, self.backward

    @property
    def known_dependence(self) -> tuple[bool, ...] | None:
        """Return `dependence`, before the first message that of the saved run."""
        return self.dependence or self._saved_dependence

    def keep_dependence(self, saved: tuple[bool, ...] | None) -> None:
        """Let `dependence` be what the run found whose checkpoint is loaded; None: that is not known.

        Messages that crossed before may have had no mask, or one.
        """
        self._saved_dependence = saved
        if saved is not None and len(self.dependence or ()) == len(saved):
            self.dependence = saved

    def begin_step(self, loss_scale: float = 1.0) -> None:
        """Forget what an interrupted step left; `loss_scale`: of the gradients until the next one."""
        self._stashes.clear()
        self._dependences.clear()
        self.loss_scale = loss_scale

    def dependence_of(self, message_id: MessageId) -> tuple[bool, ...] | None:
        """Return `dependence` for a message: of a gradient that of its activation, as activations with other
        tensors may have crossed since."""
        if not message_id.training:
            return self.dependence
        if message_id.direction == "forward":
            self._dependences[message_id.micro_batch] = self.dependence
        return self._dependences.get(message_id.micro_batch, self.dependence)

    def context(self, message_id: MessageId, position: int) -> Context:
        """Return the context of the float tensor at `position` in a message.

        In training a forward message leaves its stash for the backward message of the same micro-batch, which
        takes it away. Evaluation leaves nothing: its stash and what it adds to memory go with the context.
        """
        memory: MutableMapping[str, Tensor] = self.memory.setdefault(position, {})
        forward = message_id.direction == "forward"
        key = (message_id.micro_batch, position)
        if not message_id.training:
            stash, memory = {}, ChainMap({}, memory)
        elif forward:
            stash = self._stashes[key] = {}
        else:
            stash = self._stashes.pop(key, {})
        return Context(  # by name: ** would make a dict of all of them
            boundary=message_id.boundary,
            direction=message_id.direction,
            step=message_id.step,
            micro_batch=message_id.micro_batch,
            training=message_id.training,
            position=position,
            replica=self.replica,
            seed=self.config.block.seed,
            loss_scale=1.0 if forward else self.loss_scale,
            sample_ids=self.sample_ids.get(message_id.micro_batch) if forward else None,
            stash=stash,
            memory=memory,
        )

    def left_by(
        self, message_id: MessageId, tensor: Tensor, packet: Packet | None = None
    ) -> dict[str, Tensor]:
        """Return what `tensor` leaves in its stash for the backward message: itself, if that codec needs it,
        and a copy if it lies in the memory of `packet`, which is used again."""
        if not message_id.training or message_id.direction == "backward":
            return {}
        following = self.backward.following
        if not following or not any(each.wants_activation(TensorSpec.of(tensor)) for each in following):
            return {}
        memory = tensor.untyped_storage().data_ptr()
        is_view = packet is not None and memory == packet.memory.untyped_storage().data_ptr()
        return {"activation": tensor.detach().clone() if is_view else tensor.detach()}

    def pass_by(
        self, message_id: MessageId, position: int, tensor: Tensor, packet: Packet | None = None
    ) -> None:
        """Do with stashes what `context` does, for a tensor that is sent uncompressed.

        Args:
            position: -1 in a message without codecs, and of tensors that are exempt.
            packet: see `left_by`.
        """
        key = message_id.micro_batch, position
        if message_id.training:
            self._stashes.pop(key, None)
            if left := self.left_by(message_id, tensor, packet) if position >= 0 else {}:
                self._stashes[key] = left

    def drop(self, direction: str, old: Codec, new: Codec) -> None:
        """Delete the state of codec `old` in `direction` that codec `new` cannot use.

        A feedback's state stays if its own settings do, whatever codec it wraps: it describes messages, not
        packets. A codec's state stays if the settings of that codec do.
        """
        other = next(name for name in DIRECTIONS if name != direction)
        feedback = _feedback(old) == _feedback(new)
        codec = _inner(old).settings == _inner(new).settings or not isinstance(_inner(old), Stateful)

        def stays(key: str) -> bool:
            if key.startswith(tuple(f"{name}/" for name in DIRECTIONS)):
                return feedback or key.startswith(f"{other}/")
            return codec or other in key.split(".")

        for position, memory in self.memory.items():
            self.memory[position] = {key: value for key, value in memory.items() if stays(key)}

    def copied(self) -> "Boundary":
        """Return a copy with memory and stashes of its own, so that using it changes nothing here."""
        other = copy.copy(self)
        other.memory = {position: dict(memory) for position, memory in self.memory.items()}
        other.sample_ids = dict(self.sample_ids)
        other._stashes = {key: dict(stash) for key, stash in self._stashes.items()}
        return other

    def adopt(self) -> None:
        """Use the codecs that the config has by now, between two steps, on both sides alike."""
        codecs = self.config.in_force.codecs(self.number)
        for channel in self.channels:
            codec: Codec = getattr(codecs, channel.direction)
            if codec is not channel.codec:
                self.drop(channel.direction, channel.codec, codec)
                channel.adopt(codec)
                for layer in layers(codec, ManagesStorage):
                    for memory in self.memory.values():
                        layer.restored(memory)

    def check(self, memories: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Look at what a checkpoint has, by tensor position, before it is restored.

        Raises:
            CompressionError: no codec of this boundary could have left an entry of its name so.
        """
        for memory in memories.values():
            for channel, other in zip(self.channels, DIRECTIONS[::-1]):
                own = {key: value for key, value in memory.items() if not key.startswith(f"{other}/")}
                for layer in layers(channel.codec, Stateful):
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
            # copies, made where the codecs that replace and free them work
            memory = {
                key: value if "/host/" in key else value.to(device, copy=True)
                for key, value in values.items()
            }
            for channel in self.channels:
                for layer in layers(channel.codec, ManagesStorage):
                    layer.restored(memory)
            self.memory[position] = memory


@contextmanager
def evaluated(boundaries: Iterable[Boundary], mode: Mode) -> Iterator[None]:
    """Send messages of evaluation as `mode` says, whatever the block does."""
    before = [(boundary, boundary.evaluation) for boundary in boundaries]
    for boundary, _ in before:
        boundary.evaluation = mode
    try:
        yield
    finally:
        for boundary, own in before:
            boundary.evaluation = own


def _inner(codec: Codec) -> Codec:
    """Return `codec` without a feedback round it."""
    return list(layers(codec, Codec))[-1]  # type: ignore[type-abstract]


def _feedback(codec: Codec) -> Any:
    """Return the settings of the feedback round `codec`; None where there is none."""
    return codec.settings["feedback"] if isinstance(codec, CodecWrapper) else None
