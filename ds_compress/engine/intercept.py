"""Stand-ins for `send` and `recv` of DeepSpeed's point-to-point module while a pipeline instruction runs.

Pipeline instructions call `p2p.send` or `p2p.recv` once per tensor, DeepSpeed's own as well as those of
projects that import the module themselves. A send instruction's tensors are collected and leave as one packet
when the last of the message is there. The first tensor that a receive instruction asks for fetches the
packet, and each call hands out the next tensor of it.

Before the first message of a shape DeepSpeed sends a shape message: int32 numbers that describe the tensors.
At its unused end the sender marks that packets follow, and which tensors depend on parameters. Without this
mark both sides leave the boundary to DeepSpeed. Sender and receiver find the tensors of a message by one
rule, in the order of the calls: the next tensor with the number of values and the dtype of the next tensor
announced belongs to the message; every other one goes DeepSpeed's way. Both see the same sequence of tensors,
so they agree on all of them. DeepSpeed's own instructions send nothing but messages: a tensor of theirs that
is not like the one announced is an error, as the receiver would wait for another one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ds_compress.engine.announced_tensors import Specs, as_announced, is_alike, refuse
from ds_compress.engine.deepspeed import DEEPSPEED
from ds_compress.message.channel import Channel
from ds_compress.transport.p2p import Receiver, Sender

PACKETS, DEPENDENCE = 0x44534350, 0x44534351
"""Last number of a shape message that packets follow; `DEPENDENCE`: the bits before it are valid."""


class ShapeMessage:
    """DeepSpeed's shape message, and what ds_compress adds: whether packets follow, and one bit for each
    float tensor of them.

    int32 [256]    what DeepSpeed writes | anything ... | bits of float tensors 0-30, from the lowest | a mark
    """

    BITS = 31

    def __init__(self, module: Any, dependence: tuple[bool, ...] | None = None, written: int | None = None):
        """
        Args:
            module: `deepspeed.runtime.pipe.p2p`, or what sends and receives in its place.
            dependence: of each float tensor, whether it depends on parameters; None if not known.
            written: how many numbers DeepSpeed writes; None where no packets will follow.
        """
        self._module = module
        self._written = written
        self._bits, self._mark = 0, 0
        self.dependence = dependence
        self.announces_packets = False
        """Whether packets follow, once it was sent or received."""

    def send(self, tensor: Tensor, *where: Any) -> None:
        is_int32 = tensor.dtype == torch.int32
        if self._written is not None and is_int32 and tensor.numel() >= self._written + 2:
            self.announces_packets = True
            if self.dependence is None or len(self.dependence) > self.BITS:
                self.dependence, end = None, [0, PACKETS]
            else:
                end = [sum(bit << place for place, bit in enumerate(self.dependence)), DEPENDENCE]
            tensor.view(-1)[-2:] = torch.tensor(end, dtype=torch.int32, device=tensor.device)
        else:
            self.dependence = None
            if is_int32 and _mark(tensor):  # left in the memory by a message before
                tensor.view(-1)[-1] = 0
        self._module.send(tensor, *where)

    def recv(self, tensor: Tensor, *where: Any) -> None:
        self._module.recv(tensor, *where)
        self._mark = _mark(tensor) if tensor.dtype == torch.int32 else 0
        self._bits = int(tensor.view(-1)[-2]) if self._mark else 0
        self.announces_packets = self._mark != 0

    def received(self, floats: int) -> tuple[bool, ...] | None:
        """Return what the sender announced about that many float tensors."""
        if self._mark != DEPENDENCE:
            return None
        return tuple(bool(self._bits >> place & 1) for place in range(floats))


def _mark(tensor: Tensor) -> int:
    """Return the mark that a shape message ends with; 0: it has none."""
    last = int(tensor.view(-1)[-1]) if tensor.numel() > 1 else 0
    return last if last in (PACKETS, DEPENDENCE) else 0


class ShapeLinks:
    """Links for shape messages: with DeepSpeed's own, a stage waits until the next one asks for them."""

    def __init__(self, sender: Sender | None, receiver: Receiver | None):
        """To the next stage, from the stage before; None where there is none."""
        self._sender = sender
        self._receiver = receiver

    def send(self, tensor: Tensor, *where: Any) -> None:
        assert self._sender is not None
        packet = self._sender.memory(tensor.nbytes)
        packet.memory.copy_(tensor.view(torch.uint8))
        self._sender.send(packet)

    def recv(self, tensor: Tensor, *where: Any) -> None:
        assert self._receiver is not None
        tensor.view(torch.uint8).copy_(self._receiver.receive(tensor.nbytes).memory)

    def drain(self) -> None:
        """Return when everything sent has left this process."""
        if self._sender is not None:
            self._sender.drain()


class ReceiveBuffer(Tensor):
    """Give DeepSpeed received activations without the copy that its `clone()` would make.

    Decoded tensors own their memory, so `clone()` returns them; views of a packet are still copied.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _given = False

    def become(self, arrived: Tensor) -> None:
        """Become `arrived`; views of other memory, such as a packet, are cloned later."""
        self.data = arrived
        self._given = arrived.untyped_storage().nbytes() == arrived.nbytes

    def clone(self, *args: Any, **kwargs: Any) -> Tensor:
        given, self._given = self._given, False
        return self.detach() if given else super().clone(*args, **kwargs)


def receiving(buffers: Any) -> Any:
    """Return the buffers of a message, a tensor, a list or a tuple of them, as `ReceiveBuffer`."""
    if torch.is_tensor(buffers):
        return buffers.as_subclass(ReceiveBuffer)
    return type(buffers)(buffer.as_subclass(ReceiveBuffer) for buffer in buffers)


@dataclass(slots=True)
class Sending:
    """The tensors that a send instruction sends to one stage: those of messages, and others."""

    stage: int
    channel: Channel
    expected: Callable[[], Specs | None]
    """Gives tensors like those of a message; empty: whatever is sent; None: it is left to DeepSpeed."""
    dispatch: Callable[[list[Tensor]], None]
    """Sends a message."""
    is_one_message: bool = False
    """Whether all that the instruction sends is one forward message, as in DeepSpeed's own."""
    specs: Specs | None = None
    message: list[Tensor] = field(default_factory=list)
    """Its tensors so far."""
    later: list[tuple[Any, ...]] = field(default_factory=list)
    """Other tensors, sent while a message was incomplete."""


@dataclass(slots=True)
class Receiving:
    """The tensors that a receive instruction asks one stage for: those of messages, and others."""

    stage: int
    expected: Callable[[], Specs | None]
    """See `Sending`."""
    fetch: Callable[[Specs], list[Tensor]]
    """Receives a message with such tensors."""
    copies: bool
    """Whether a tensor keeps its memory. DeepSpeed's own instructions clone activations and use gradients
    before they receive the next, so there the tensor becomes the arrived one instead."""
    specs: Specs | None = None
    arrived: list[Tensor] = field(default_factory=list)
    """Arrived tensors of the message in progress, the last one first."""


class PointToPoint:
    """What stands in for `send` and `recv` of the module `deepspeed.runtime.pipe.p2p`.

    Engines without ds_compress, and what engines send outside their instructions, go to the functions that
    were there before.
    """

    def __init__(self, send: Callable[..., Any] | None, recv: Callable[..., Any] | None):
        self.original = SimpleNamespace(send=send, recv=recv)
        self._shape_message: ShapeMessage | None = None
        self.sending: Sending | None = None
        """What the send instruction in progress sends."""

        self.receiving: Receiving | None = None
        """What the receive instruction in progress receives."""

    @classmethod
    def over(cls, module: Any) -> "PointToPoint":
        """Return the stand-ins in `module`, put there when they are not there yet."""
        found = getattr(module.send, "__self__", None)
        if not isinstance(found, cls):
            found = cls(module.send, module.recv)
            module.send, module.recv = found.send, found.recv
        return found

    def send(self, tensor: Tensor, dest_stage: int, async_op: bool = False) -> None:
        sending = self.sending
        if self._shape_message is not None:
            self._shape_message.send(tensor, dest_stage, async_op)
            return
        if sending is None or dest_stage != sending.stage:
            self.original.send(tensor, dest_stage, async_op)
            return
        message = sending.message
        if not message:
            sending.specs = sending.expected()
        specs = sending.specs
        if specs is None:
            self.original.send(tensor, dest_stage, async_op)
            return
        if not specs or sending.is_one_message:
            message.append(tensor)
            return
        spec = specs[len(message)]
        is_equal = tensor.shape == spec.shape and tensor.dtype == spec.dtype
        if is_equal or is_alike(tensor, spec):
            message.append(tensor if is_equal else tensor.detach().reshape(spec.shape))
            if len(message) == len(specs):
                if sending.later:
                    self.finish(sending)
                else:
                    sending.message = []
                    sending.dispatch(message)
        elif sys._getframe(1).f_globals is DEEPSPEED:
            refuse(sending.channel, len(message), tensor, specs)
        elif message:
            sending.later.append((tensor.clone(), dest_stage, async_op))  # its memory may be used again
        else:
            self.original.send(tensor, dest_stage, async_op)

    def finish(self, sending: Sending) -> None:
        """Send the tensors collected so far, then the others.

        Raises:
            CompressionError: they are not those announced.
        """
        message, sending.message = sending.message, []
        specs = sending.specs
        sending.dispatch(as_announced(sending.channel, message, specs) if specs else message)
        while sending.later:
            self.original.send(*sending.later.pop(0))

    def recv(self, tensor: Tensor, src_stage: int, async_op: bool = False) -> None:
        receiving = self.receiving
        if self._shape_message is not None:
            self._shape_message.recv(tensor, src_stage, async_op)
            return
        if receiving is None:
            self.original.recv(tensor, src_stage, async_op)
            return
        if not receiving.arrived:
            receiving.specs = receiving.expected()
        specs = receiving.specs
        if not specs or src_stage != receiving.stage:
            self.original.recv(tensor, src_stage, async_op)
            return
        spec = specs[-len(receiving.arrived)]
        is_equal = tensor.shape == spec.shape and tensor.dtype == spec.dtype
        if not is_equal and not is_alike(tensor, spec):
            self.original.recv(tensor, src_stage, async_op)
            return
        if not receiving.arrived:
            receiving.arrived = receiving.fetch(specs)[::-1]
        arrived = receiving.arrived.pop()
        if not is_equal:
            arrived = arrived.view(tensor.shape)
        if receiving.copies:
            tensor.detach().copy_(arrived)
        elif isinstance(tensor, ReceiveBuffer):
            tensor.become(arrived)
        else:
            tensor.data = arrived

    @contextmanager
    def shape_messages(self, message: ShapeMessage) -> Iterator[None]:
        """Intercept a message that an instruction sends beside that of its tensors."""
        self._shape_message = message
        try:
            yield
        finally:
            self._shape_message = None
