"""Measure the messages of a step: the time to encode, send, wait and decode, and the error of one message.

Meters keep clock marks and device tensors, and compute numbers when `values` is called, so that no host waits
for a device. An error in measuring is kept as text and does not stop the message.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_compress.codecs.message_error import UNKNOWN, MessageError, compare
from ds_compress.errors import in_one_line
from ds_compress.message.channel import Channel
from ds_compress.message.clock import HostClock
from ds_compress.message.gradient_error import GradientError
from ds_compress.message.observer import Observer, SeenMessage


class _Meter(Observer):
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
    def timed(self, phase: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._times.setdefault(phase, []).append((start, self._mark()))

    def _total_ms(self, name: str) -> float:
        return sum(self._clock.ms(start, end) for start, end in self._times.get(name, ()))


class SendingMeter(_Meter):
    """Measures a sending end for one step.

    After their packets were sent, some messages of the step are compared with what the packets decode to:
    errors hardly differ between the messages of a step, and comparing all of them would cost too much.
    """

    ERRORS = "nonfinite_share", *MessageError._fields, "gradient_error"
    COLUMNS = "step_messages", *ERRORS, "encode_ms", "send_ms"

    def __init__(self, clock: HostClock, compared: Collection[int], gradients: GradientError | None = None):
        """
        Args:
            compared: micro-batches of the messages that are compared; the error is that of the first.
                Empty: only time is measured.
            gradients: takes note of all of them; None: they are activations.
        """
        super().__init__(clock)
        self._compared = compared
        self._gradients = gradients
        self._largest: list[Tensor] = []  # of each message
        self._comparison: Tensor | None = None  # of the message that is compared
        self._listener: Channel | None = None  # decodes the message that is being sent

    def before(self, message: SeenMessage) -> None:
        """Keep what decodes the message, if it is compared."""
        self._listener = None
        with self._measuring():
            if message.message_id.micro_batch in self._compared:
                self._listener = message.channel.as_receiver()

    def after(self, message: SeenMessage) -> None:
        """Measure what the packet did to the message."""
        encoded, listener, self._listener = message.encoded, self._listener, None
        assert encoded is not None
        if not self._compared:
            return
        with self._measuring():
            layout = encoded.layout
            counts = _counting(layout.exempt)
            tensors = [message.tensors[index] for index in counts]
            self._largest.append(largest(tensors))
            if message.message_id.micro_batch not in self._compared:
                return
            arrived = message.decoded
            if arrived is None:
                assert listener is not None
                arrived = listener.decode(encoded.packet, layout, message.message_id, lambda _: encoded.extra)
            decoded = [arrived[index] for index in counts]
            if self._comparison is None:
                self._comparison = compare(tensors, decoded)
            if self._gradients is not None and layout.compressed:
                self._gradients.add(tensors, decoded)

    def values(self) -> dict[str, float]:
        """Return what was measured since the meter was made, by column.

        step_messages: how many were sent.
        nonfinite_share: of messages that hold inf or nan.
        message_norm, relative_error, token_error, cosine, lost_rows: of the message that was compared,
        see `MessageError`; nan when something in it is not finite.
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
    floats = [each.detach() for each in tensors if each.dtype.is_floating_point and each.numel() > 0]
    if not floats:
        return torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    return torch.stack([torch.stack(each.aminmax()).abs().max().double() for each in floats]).max()
