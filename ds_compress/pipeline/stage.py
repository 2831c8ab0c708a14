"""What one stage of a pipeline sends and receives: its two boundaries, their links, the instruction in
progress.

DeepSpeed's instructions call `p2p.send` or `p2p.recv` once per tensor. `PointToPoint` stands in for that
module: while an instruction runs, the tensors it sends are collected and leave as one packet when it ends;
the first tensor it receives fetches the packet, and each call hands out the next tensor of it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ds_compress.codec import TensorSpec
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Boundary, Channel, MessageId
from ds_compress.message.endpoint import Endpoint
from ds_compress.transport.p2p import Receiver, Sender
from ds_compress.transport.streams import Lane


class Sending:
    """The tensors that one send instruction wants to send."""

    def __init__(self):
        self.tensors: list[Tensor] = []

    def send(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)

    def recv(self, tensor: Tensor) -> None:
        raise CompressionError(
            "a send instruction of DeepSpeed tried to receive: this release is not supported"
        )


class Receiving:
    """The tensors that one receive instruction asks for, from one packet."""

    def __init__(self, fetch: Callable[[], list[Tensor]]):
        self._fetch = fetch
        self._arrived: Iterator[Tensor] | None = None

    def send(self, tensor: Tensor) -> None:
        raise CompressionError(
            "a receive instruction of DeepSpeed tried to send: this release is not supported"
        )

    def recv(self, tensor: Tensor) -> None:
        if self._arrived is None:
            self._arrived = iter(self._fetch())
        # DeepSpeed clones activations and uses gradients before it receives the next, so `tensor` can be the
        # arrived one instead of a copy of it
        tensor.data = next(self._arrived)


class PointToPoint:
    """Stand-in for the module `deepspeed.runtime.pipe.p2p` inside DeepSpeed's pipeline engine.

    Engines without ds_compress, and what engines send outside their instructions, go to the module unchanged.
    """

    def __init__(self, module: Any):
        self._module = module
        self.instruction: Sending | Receiving | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def send(self, tensor: Tensor, dest_stage: int, async_op: bool = False) -> None:
        if self.instruction is None:
            return self._module.send(tensor, dest_stage, async_op)
        self.instruction.send(tensor)

    def recv(self, tensor: Tensor, src_stage: int, async_op: bool = False) -> None:
        if self.instruction is None:
            return self._module.recv(tensor, src_stage, async_op)
        self.instruction.recv(tensor)

    @contextmanager
    def during(self, instruction: Sending | Receiving | None) -> Iterator[None]:
        """Route calls to `instruction`, None for the module itself, and back to what was before at the
        end."""
        before, self.instruction = self.instruction, instruction
        try:
            yield
        finally:
            self.instruction = before


class Stage:
    """All traffic of one stage.

    Micro-batches pass a boundary in order, in both directions, so counting messages within a step gives the
    micro-batch; DeepSpeed's buffer ids are reused and do not.
    """

    def __init__(self, config: Config, p2p: PointToPoint, before: Boundary | None, after: Boundary | None):
        """`before`, `after`: the boundaries to the previous and the next stage, None at the ends of the
        pipeline."""
        self.config = config
        self.before = before
        self.after = after
        self._p2p = p2p
        self._ends: dict[str, Endpoint] = {}
        self._lanes: dict[int, Lane] = {}  # by boundary
        self.groups: list[Any] = []  # process groups of its channels alone
        self.step = 0
        self.training = False
        self.loss_scale = 1.0
        self._loaded = 0

    def connect(
        self,
        instruction: str,
        channel: Channel,
        end: Sender | Receiver,
        second: Sender | Receiver,
        lane: Lane,
    ) -> None:
        """Let `instruction` ("SendActivation", ...) use `channel` over `end`.

        Args:
            second: for packets that only some messages have, on a group of its own where receives are posted
                ahead.
            lane: of the boundary, for both its channels.
        """
        self._ends[instruction] = Endpoint(channel, end, second, lane)
        self._lanes[channel.boundary.number] = lane

    @property
    def boundaries(self) -> list[Boundary]:
        return [boundary for boundary in (self.before, self.after) if boundary is not None]

    @property
    def ends(self) -> list[Endpoint]:
        return list(self._ends.values())

    @property
    def sending(self) -> list[Channel]:
        """The channels this stage sends on."""
        return [end.channel for end in self._ends.values() if end.sends]

    @contextmanager
    def running(self, step: int, training: bool, loss_scale: float = 1.0) -> Iterator[None]:
        """Round one schedule of the engine; returns when all packets have left."""
        self.step, self.training, self.loss_scale = step, training, loss_scale
        self._loaded = 0
        for end in self._ends.values():
            end.micro_batch = 0
        for boundary in self.boundaries:
            boundary.begin_step()
        yield
        for end in self._ends.values():
            if end.sends:
                end.lane.run(functools.partial(self._drain, end))
        for lane in self._lanes.values():
            lane.join()

    def in_lane(self, boundary: Boundary, work: Callable[[], None]) -> None:
        """Do `work`, on what `boundary` remembers, where its codecs work, and before anything that
        follows."""
        lane = self._lanes[boundary.number]
        lane.run(work)
        lane.join()

    def load(self, batch: Sequence[Any]) -> None:
        """Take note of the samples in what the data loader returned, on the first stage."""
        source = self.config.sample_ids
        if source and self.before is None and self.training:
            self.after.announce(self._loaded, source.of(batch))
            self._loaded += 1

    def expect(self, instruction: str, tensors: Sequence[Tensor], count: int, raw_tail: int = 0) -> None:
        """Announce the `count` messages of this schedule, with tensors like `tensors` (see
        `Receiver.expect`)."""
        end = self._ends[instruction]
        message = end.channel.message(tuple(map(TensorSpec.of, tensors)), self._moment(0), raw_tail)
        end.lane.run(lambda: end.link.expect(message.packet.nbytes, count))

    @contextmanager
    def send(self, instruction: str, raw_tail: int = 0) -> Iterator[None]:
        """Collect what the send instruction inside sends, and send it as one packet; `raw_tail`: see
        `Channel`."""
        if (
            self._p2p.instruction is not None
        ):  # an instruction that calls the engine's method of the same name
            yield
            return
        message = Sending()
        with self._p2p.during(message):
            yield
        self.dispatch(instruction, message.tensors, raw_tail)

    def dispatch(self, instruction: str, tensors: Sequence[Tensor], raw_tail: int = 0) -> None:
        """Send `tensors` as one packet."""
        end = self._ends[instruction]
        moment = self._next_moment(end)

        def work() -> None:
            packet = end.meter.encode(end.channel, tensors, moment, raw_tail, end.link.memory)
            rest = end.channel.rest
            end.meter.send(end.link, packet)
            if rest is not None:
                end.second.send(end.second.memory(rest.numel()).copy_(rest))

        end.lane.run(work, takes=tensors)

    @contextmanager
    def receive(
        self, instruction: str, tensors: Callable[[], Sequence[Tensor]], raw_tail: int = 0
    ) -> Iterator[None]:
        """Serve what the receive instruction inside asks for; `tensors()`: all it will ask for, at its first
        call."""
        if self._p2p.instruction is not None:
            yield
            return
        with self._p2p.during(Receiving(lambda: self.fetch(instruction, tensors(), raw_tail))):
            yield

    def fetch(self, instruction: str, tensors: Sequence[Tensor], raw_tail: int = 0) -> list[Tensor]:
        """The next message, with tensors like `tensors`."""
        end = self._ends[instruction]
        moment = self._next_moment(end)
        message = end.channel.message(tuple(map(TensorSpec.of, tensors)), moment, raw_tail)

        def work() -> list[Tensor]:
            packet = end.meter.receive(end.link, message.packet.nbytes)
            return end.meter.decode(end.channel, packet, message, moment, end.second.receive)

        arrived = end.lane.run(work, gives=True)
        if message.ids and self.after:
            self.after.announce(moment.micro_batch, self.before.sample_ids[moment.micro_batch])
        return arrived

    @staticmethod
    def _drain(end: Endpoint) -> None:
        end.meter.drain(end.link)
        end.second.drain()

    def aside(self):
        """Context for what an instruction sends beside its message: DeepSpeed's shape messages."""
        return self._p2p.during(None)

    def _next_moment(self, end: Endpoint) -> MessageId:
        end.micro_batch += 1
        return self._moment(end.micro_batch - 1)

    def _moment(self, micro_batch: int) -> MessageId:
        return MessageId(self.step, micro_batch, self.training, self.loss_scale)
