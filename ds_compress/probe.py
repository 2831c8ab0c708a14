"""What a channel end goes through for every message: nothing more than the work, or the work with meters on it.

A step that is not logged uses `Probe`. Meters keep marks and device tensors, and turn them into numbers when asked.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_compress.channel import Channel, Message, Moment
from ds_compress.clock import HostClock
from ds_compress.link import Receiver, Sender

Memory = Callable[[int], Tensor]


class Probe:
    """Measures nothing."""

    def encode(
        self, channel: Channel, tensors: Sequence[Tensor], moment: Moment, raw_tail: int, memory: Memory
    ) -> Tensor:
        return channel.encode(tensors, moment, raw_tail, memory)

    def send(self, sender: Sender, packet: Tensor) -> None:
        sender.send(packet)

    def drain(self, sender: Sender) -> None:
        sender.drain()

    def receive(self, receiver: Receiver, nbytes: int) -> Tensor:
        return receiver.receive(nbytes)

    def decode(
        self, channel: Channel, packet: Tensor, message: Message, moment: Moment, fetch: Memory
    ) -> list[Tensor]:
        return channel.decode(packet, message, moment, fetch)


OFF = Probe()


class _Meter(Probe):
    """Times by name, as pairs of marks."""

    def __init__(self, clock: HostClock):
        self._clock = clock
        self._times: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def _timed(self, name: str):
        start = self._clock.mark()
        yield
        self._times.setdefault(name, []).append((start, self._clock.mark()))

    def _total_ms(self, name: str) -> float:
        return sum(self._clock.ms(start, end) for start, end in self._times.get(name, ()))


class SendingMeter(_Meter):
    """A sending end for one step; the packet is compared with its message after it is on its way."""

    COLUMNS = ("nonfinite_share", "relative_error", "cosine", "encode_ms", "send_ms")

    def __init__(self, clock: HostClock):
        super().__init__(clock)
        self._comparisons: list[Tensor] = []
        self._message: tuple[Any, ...] = ()  # the one between encode and send

    def encode(self, channel, tensors, moment, raw_tail, memory):
        listener = channel.listener()

        def timed_memory(nbytes: int) -> Tensor:
            with self._timed("memory"):
                return memory(nbytes)

        with self._timed("encode"):
            packet = channel.encode(tensors, moment, raw_tail, timed_memory)
        self._message = tensors, listener, channel.last, moment, channel.rest
        return packet

    def send(self, sender, packet):
        with self._timed("send"):
            sender.send(packet)
        (tensors, listener, message, moment, rest), self._message = self._message, ()
        decoded = listener.decode(packet, message, moment, lambda nbytes: rest)
        self._comparisons.append(compare_tensors(tensors, decoded))

    def drain(self, sender):
        with self._timed("drain"):
            sender.drain()

    def values(self) -> dict[str, float]:
        """What was measured since the meter was made, by column.

        nonfinite_share: of messages that hold inf or nan, before or after compression.
        relative_error, cosine: means over the other messages; nan when there is none.
        encode_ms: until packets are complete. send_ms: that the stage stood still for packets to leave, when sending,
        at the end of the step, or for the memory of an earlier one.
        """
        amounts = torch.stack(self._comparisons).tolist() if self._comparisons else []
        pairs = [pair for pair in (error_and_cosine(*amount) for amount in amounts) if pair is not None]
        errors, cosines = zip(*pairs) if pairs else ([float("nan")], [float("nan")])
        return {
            "nonfinite_share": 1 - len(pairs) / len(amounts) if amounts else 0.0,
            "relative_error": statistics.fmean(errors),
            "cosine": statistics.fmean(cosines),
            "encode_ms": self._total_ms("encode") - self._total_ms("memory"),
            "send_ms": sum(self._total_ms(name) for name in ("memory", "send", "drain")),
        }

    def stamps(self, origin: Any) -> list[float]:
        """When each packet was handed to the link, in milliseconds after `origin`."""
        return [self._clock.ms(origin, start) for start, _ in self._times["send"]]


class ReceivingMeter(_Meter):
    """A receiving end for one step."""

    COLUMNS = ("decode_ms", "wait_ms")

    def receive(self, receiver, nbytes):
        with self._timed("wait"):
            return receiver.receive(nbytes)

    def decode(self, channel, packet, message, moment, fetch):
        with self._timed("decode"):
            return channel.decode(packet, message, moment, fetch)

    def values(self) -> dict[str, float]:
        """By column: wait_ms, that the stage stood still until packets were there; decode_ms."""
        return {"decode_ms": self._total_ms("decode"), "wait_ms": self._total_ms("wait")}

    def stamps(self, origin: Any) -> list[float]:
        """When each packet was there, in milliseconds after `origin`; later than it came when nobody waited."""
        return [self._clock.ms(origin, end) for _, end in self._times["wait"]]


def compare_tensors(sent: Sequence[Tensor], decoded: Sequence[Tensor]) -> Tensor:
    """fp32 [3] on the device: norms of a message's float tensors, of what they decode to, and of the difference.

    All three are divided by the largest magnitude sent, so that no square leaves the range of fp32; a message with inf
    or nan gives something non-finite.
    """
    pairs = [(x.detach(), y) for x, y in zip(sent, decoded) if x.dtype.is_floating_point and x.numel()]
    if not pairs:
        return torch.zeros(3)
    with torch.no_grad():
        largest = torch.stack([torch.stack(x.aminmax()).abs().max().double() for x, _ in pairs]).max()
        scale = torch.where(largest > 0, largest, 1.0)
        norms = []
        for pair in pairs:
            x, y = ((t if t.dtype == torch.float64 else t.float()) / scale for t in pair)
            norms.append(torch.stack([torch.linalg.vector_norm(t).float() for t in (x, y, x - y)]))
        return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def error_and_cosine(sent: float, decoded: float, difference: float) -> tuple[float, float] | None:
    """||x - y|| / ||x|| and <x, y> / (||x|| ||y||) from the three norms; None when one is not finite.

    Nothing sent and nothing decoded is a perfect message.
    """
    amounts = (sent, decoded, difference)
    if not all(abs(amount) < float("inf") for amount in amounts):
        return None
    error = difference / sent if sent else 0.0 if difference == 0 else float("inf")
    product = 2 * sent * decoded
    cosine = (sent**2 + decoded**2 - difference**2) / product if product else float(difference == 0)
    return error, min(1.0, max(-1.0, cosine))
