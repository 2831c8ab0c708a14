"""Measure the messages of a step: the time to encode, send, wait and decode, and the error of one message.

Meters keep clock marks and device tensors, and compute numbers when `values` is called, so that no host waits
for a device. An error in measuring is kept as text and does not stop the message.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_compress.codec import MessageId
from ds_compress.codecs.message_error import UNKNOWN, MessageError, compare
from ds_compress.errors import in_one_line
from ds_compress.message.channel import Channel
from ds_compress.message.clock import HostClock
from ds_compress.message.gradient_error import GradientError
from ds_compress.message.layout import Encoded, MessageLayout
from ds_compress.transport.p2p import Receiver, Sender


class _Meter:
    """Times by name, as pairs of marks."""

    def __init__(self, clock: HostClock):
        self.failure = ""  # the first, in one line
        self._clock = clock
        self._times: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Keep errors of measuring as text, which holds no tensors: the message goes on its way."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or in_one_line(error)

    def _mark(self) -> Any:
        with self._measuring():
            return self._clock.mark()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._times.setdefault(name, []).append((start, self._mark()))

    def _total_ms(self, name: str) -> float:
        return sum(self._clock.ms(start, end) for start, end in self._times.get(name, ()))


class SendingMeter(_Meter):
    """Measures a sending end for one step.

    After their packets were sent, some messages of the step are compared with what the packets decode to:
    errors hardly differ between the messages of a step, and comparing all of them would cost too much.
    """

    COLUMNS = (
        "step_messages",
        "nonfinite_share",
        "message_norm",
        "relative_error",
        "token_error",
        "cosine",
        "gradient_error",
        "encode_ms",
        "send_ms",
    )

    def __init__(self, clock: HostClock, compared: Container[int], gradients: GradientError | None = None):
        """
        Args:
            compared: micro-batches of the messages that are compared; the error is that of the first.
            gradients: takes note of all of them; None: they are activations.
        """
        super().__init__(clock)
        self._compared = compared
        self._gradients = gradients
        self._is_compressed = False  # the latest message: not in the warm-up
        self._largest: list[Tensor] = []  # of each message
        self._comparison: Tensor | None = None  # of the message that is compared
        self._tensors: Sequence[Tensor] = ()  # those that count, of the message between encode and send
        self._decode: Callable[[Tensor], list[Tensor]] | None = None

    def encode(
        self,
        channel: Channel,
        tensors: Sequence[Tensor],
        message_id: MessageId,
        memory: Callable[[int], Tensor],
    ) -> Encoded:
        """Encode a message as `channel` does, and measure how."""
        listener: Channel | None = None
        with self._measuring():
            if message_id.micro_batch in self._compared:
                listener = channel.as_receiver()

        def timed_memory(nbytes: int) -> Tensor:
            with self._timed("memory"):
                return memory(nbytes)

        with self._timed("encode"):
            encoded = channel.encode(tensors, message_id, timed_memory)
        _, extra, message = encoded
        self._is_compressed = message.compressed
        counts = _counting(message.exempt)
        self._tensors = [tensors[index] for index in counts]
        if listener is not None:

            def decode(packet: Tensor) -> list[Tensor]:
                decoded = listener.decode(packet, message, message_id, lambda nbytes: extra)
                return [decoded[index] for index in counts]

            self._decode = decode
        return encoded

    def send(self, sender: Sender, packet: Tensor) -> None:
        """Send a packet, and measure what it did to the message."""
        with self._timed("send"):
            sender.send(packet)
        with self._measuring():
            self._largest.append(largest(self._tensors))
            if self._decode is not None:
                decoded = self._decode(packet)
                if self._comparison is None:
                    self._comparison = compare(self._tensors, decoded)
                if self._gradients is not None and self._is_compressed:
                    self._gradients.add(self._tensors, decoded)
        self._tensors, self._decode = (), None

    def drain(self, sender: Sender) -> None:
        """Wait for what was sent, and measure how long."""
        with self._timed("drain"):
            sender.drain()

    def values(self) -> dict[str, float]:
        """Return what was measured since the meter was made, by column.

        step_messages: how many were sent.
        nonfinite_share: of messages that hold inf or nan.
        message_norm, relative_error, token_error, cosine: of the message that was compared, see
        `MessageError`; nan when something in it is not finite.
        gradient_error: of `GradientError`, with messages compared in earlier steps; 0 of activations.
        encode_ms: time to make the packets. send_ms: time in which the stage was blocked until packets left,
        when sending, at the end of the step, or for the memory of an earlier packet.
        """
        finite = torch.stack(self._largest).isfinite().double().mean().item() if self._largest else 1.0
        error = UNKNOWN if self._comparison is None else MessageError(*self._comparison.tolist())
        return {
            "step_messages": len(self._times.get("send", ())),
            "nonfinite_share": 1 - finite,
            **error._asdict(),
            "gradient_error": self._gradients.value if self._gradients is not None else 0.0,
            "encode_ms": self._total_ms("encode") - self._total_ms("memory"),
            "send_ms": sum(self._total_ms(name) for name in ("memory", "send", "drain")),
        }

    def stamps(self, origin: Any) -> list[float]:
        """Return when each packet was handed to the link, in milliseconds after `origin`."""
        return [self._clock.ms(origin, start) for start, _ in self._times.get("send", ())]


class ReceivingMeter(_Meter):
    """Measures a receiving end for one step."""

    COLUMNS = ("decode_ms", "wait_ms")

    def receive(self, receiver: Receiver, nbytes: int) -> Tensor:
        """Receive a packet, and measure how long it takes."""
        with self._timed("wait"):
            return receiver.receive(nbytes)

    def decode(
        self,
        channel: Channel,
        packet: Tensor,
        message: MessageLayout,
        message_id: MessageId,
        fetch: Callable[[int], Tensor | None] | None,
    ) -> list[Tensor]:
        """Decode a message as `channel` does, and measure how long it takes."""
        with self._timed("decode"):
            return channel.decode(packet, message, message_id, fetch)

    def values(self) -> dict[str, float]:
        """Return by column: wait_ms, in which the stage was blocked until packets arrived; decode_ms."""
        return {"decode_ms": self._total_ms("decode"), "wait_ms": self._total_ms("wait")}

    def stamps(self, origin: Any) -> list[float]:
        """Return when the stage found each packet, in ms after `origin`: no earlier than it came."""
        return [self._clock.ms(origin, end) for _, end in self._times.get("wait", ())]


def _counting(exempt: Sequence[str]) -> list[int]:
    """Return the positions of the tensors whose error is measured: those that are compressed, or else all.

    Others would distort the error: masks may contain -inf, or numbers far larger than the rest.
    """
    return [index for index, why in enumerate(exempt) if not why] or [*range(len(exempt))]


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in a message's float tensors, float64 on the device; inf or nan if one
    holds it."""
    extremes = [torch.stack(t.detach().aminmax()).abs().max() for t in tensors if _is_compared(t)]
    if not extremes:
        return torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    return torch.stack([extreme.double() for extreme in extremes]).max()


def _is_compared(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.numel() > 0
