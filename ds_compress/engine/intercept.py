"""What stands in for DeepSpeed's point-to-point module while one of its instructions runs.

DeepSpeed's instructions call `p2p.send` or `p2p.recv` once per tensor. The tensors that a send instruction
sends are collected and leave as one packet when it ends; the first tensor that a receive instruction asks for
fetches the packet, and each call hands out the next tensor of it. Before the first message of a shape
DeepSpeed sends another one, int32 numbers that describe it; what the sender alone knows of the tensors goes
along in its unused end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_compress.errors import CompressionError
from ds_compress.transport.p2p import Receiver, Sender

MARK = 0x44534350
"""Last number of a shape message that says which tensors carry; any other: it does not say."""


class ShapeMessage:
    """DeepSpeed's message of shapes, with one bit for each float tensor of the message that it announces.

    int32 [256]    what DeepSpeed writes | anything ... | bits of float tensors 0-30, from the lowest | MARK
    """

    BITS = 31

    def __init__(self, module: Any, carrying: tuple[bool, ...] | None = None, written: int = 0):
        """
        Args:
            module: `deepspeed.runtime.pipe.p2p`, or what sends and receives in its place.
            carrying: what the sender says of each float tensor; None where it cannot.
            written: how many numbers DeepSpeed writes.
        """
        self._module = module
        self._written = written
        self._bits, self._says = 0, False
        self.carrying = carrying

    def send(self, tensor: Tensor, *where: Any) -> None:
        fits = tensor.dtype == torch.int32 and tensor.numel() >= self._written + 2
        if not fits or self.carrying is None or len(self.carrying) > self.BITS:
            self.carrying = None
        if fits:
            bits = sum(carries << place for place, carries in enumerate(self.carrying or ()))
            end = [bits, 0 if self.carrying is None else MARK]
            tensor.view(-1)[-2:] = torch.tensor(end, dtype=torch.int32, device=tensor.device)
        self._module.send(tensor, *where)

    def recv(self, tensor: Tensor, *where: Any) -> None:
        self._module.recv(tensor, *where)
        bits, mark = tensor.view(-1)[-2:].tolist() if tensor.dtype == torch.int32 else (0, 0)
        self._bits, self._says = int(bits), mark == MARK

    def received(self, floats: int) -> tuple[bool, ...] | None:
        """What the sender said of that many float tensors."""
        return tuple(bool(self._bits >> place & 1) for place in range(floats)) if self._says else None


class ShapeLinks:
    """Links for shape messages of their own: DeepSpeed's keep a stage standing until the next one asks for
    them."""

    def __init__(self, sender: Sender | None, receiver: Receiver | None):
        """To the next stage, from the stage before; None where there is none."""
        self._sender = sender
        self._receiver = receiver

    def send(self, tensor: Tensor, *where: Any) -> None:
        assert self._sender is not None
        self._sender.send(self._sender.memory(tensor.nbytes).copy_(tensor.view(torch.uint8)))

    def recv(self, tensor: Tensor, *where: Any) -> None:
        assert self._receiver is not None
        tensor.view(torch.uint8).copy_(self._receiver.receive(tensor.nbytes))

    def drain(self) -> None:
        """Return when everything sent has left this process."""
        if self._sender is not None:
            self._sender.drain()


class ReceiveBuffer(Tensor):
    """What DeepSpeed receives activations into, and clones to keep what came: here that is no copy where the
    memory of what came is nobody else's, as it is of all that a codec has decoded to new memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _given = False

    def become(self, arrived: Tensor) -> None:
        """Become `arrived`. What is a part of other memory, as a packet is, will be cloned as ever."""
        self.data = arrived
        self._given = arrived.untyped_storage().nbytes() == arrived.nbytes

    def clone(self, *args: Any, **kwargs: Any) -> Tensor:
        given, self._given = self._given, False
        return self.detach() if given else super().clone(*args, **kwargs)


def receiving(buffers: Any) -> Any:
    """The buffers of a message, a tensor, a list or a tuple of them, as `ReceiveBuffer`."""
    if torch.is_tensor(buffers):
        return buffers.as_subclass(ReceiveBuffer)
    return type(buffers)(buffer.as_subclass(ReceiveBuffer) for buffer in buffers)


class PointToPoint:
    """Stand-in for the module `deepspeed.runtime.pipe.p2p` inside DeepSpeed's pipeline engine.

    Engines without ds_compress, and what engines send outside their instructions, go to the module unchanged.
    """

    def __init__(self, module: Any):
        self.module = module
        self._shape_message: ShapeMessage | None = None
        self._sent: list[Tensor] | None = None
        self._fetch: Callable[[], list[Tensor]] | None = None
        self._arrived: Iterator[Tensor] | None = None
        self.busy = False
        """Whether an instruction is in progress, as when one calls the engine's method of the same name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def send(self, tensor: Tensor, dest_stage: int, async_op: bool = False) -> None:
        if self._shape_message is not None:
            self._shape_message.send(tensor, dest_stage, async_op)
        elif self._sent is not None:
            self._sent.append(tensor)
        elif self._fetch is not None:
            raise CompressionError(
                "a receive instruction of DeepSpeed tried to send: this release is not known"
            )
        else:
            self.module.send(tensor, dest_stage, async_op)

    def recv(self, tensor: Tensor, src_stage: int, async_op: bool = False) -> None:
        if self._shape_message is not None:
            self._shape_message.recv(tensor, src_stage, async_op)
        elif self._fetch is not None:
            if self._arrived is None:
                self._arrived = iter(self._fetch())
            # DeepSpeed clones activations and uses gradients before it receives the next, so `tensor` can be
            # the arrived one instead of a copy of it
            arrived = next(self._arrived)
            if isinstance(tensor, ReceiveBuffer):
                tensor.become(arrived)
            else:
                tensor.data = arrived
        elif self._sent is not None:
            raise CompressionError(
                "a send instruction of DeepSpeed tried to receive: this release is not known"
            )
        else:
            self.module.recv(tensor, src_stage, async_op)

    def collect(self, run: Callable[[], None]) -> list[Tensor]:
        """What the send instruction `run` sends."""
        self._sent, self.busy = [], True
        sent = self._sent
        try:
            run()
        finally:
            self._sent, self.busy = None, False
        return sent

    def serve(self, run: Callable[[], None], fetch: Callable[[], list[Tensor]]) -> None:
        """Give the receive instruction `run` what `fetch()` returns when it asks for the first tensor."""
        self._fetch, self._arrived, self.busy = fetch, None, True
        try:
            run()
        finally:
            self._fetch, self._arrived, self.busy = None, None, False

    @contextmanager
    def shape_messages(self, message: ShapeMessage) -> Iterator[None]:
        """Context for a message that an instruction sends beside that of its tensors."""
        self._shape_message = message
        try:
            yield
        finally:
            self._shape_message = None
