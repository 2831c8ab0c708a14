"""Measure the signals of policies where messages are sent; gather them on all ranks in one collective.

Nothing here waits for a device before a decision is due.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ds_compress.codec import Codec, MessageId
from ds_compress.config import DIRECTIONS
from ds_compress.config.policies import Place, Signal
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Channel
from ds_compress.message.gradient_error import GradientError
from ds_compress.message.meters import error_and_cosine, largest, norms
from ds_compress.runtime.interface import MessageSource, Watch

Gather = Callable[[Tensor], Sequence[Tensor]]
"""Gathers a tensor from all ranks, in their order."""

Trials = Mapping[Place, Sequence[Codec]]
"""Codecs to try on the messages of a place, by rung."""


class Signals:
    """The signals of one rank since the last decision."""

    def __init__(self, boundaries: int, rungs: int, device: torch.device, all_gather: Gather):
        """Start without signals; `rungs`: length of the longest ladder."""
        self._boundaries = boundaries
        self._rungs = rungs
        self._device = device
        self._all_gather = all_gather
        self._norms: dict[int, Tensor] = {}  # by boundary: sum and number of finite norms
        # by rung: three norms of an activation, or sums of a gradient; bytes
        self._losses: dict[Place, list[tuple[Tensor | GradientError, int]]] = {}
        self._note: Watch | None = None  # of the norms

    def note_norms(self, source: MessageSource) -> None:
        """Record the norms of gradient messages from now on, in training steps after the warm-up."""

        def watch(channel: Channel, tensors: Sequence[Tensor], message_id: MessageId) -> None:
            if not message_id.training or message_id.step < source.config.warmup_steps:
                return
            floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
            found = torch.stack(
                [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32) for tensor in floats]
            )
            norm = torch.linalg.vector_norm(found).double() / channel.boundary.loss_scale
            finite = norm.isfinite()
            noted = torch.stack([torch.where(finite, norm, 0.0), finite.double()])
            before = self._norms.get(message_id.boundary)
            self._norms[message_id.boundary] = noted if before is None else before + noted

        self._note = watch
        self.stop(source)

    def try_rungs(self, source: MessageSource, trials: Trials, micro_batch: int) -> None:
        """Encode the messages of a micro-batch with each rung, until `stop`."""
        self._losses = {}

        def watch(channel: Channel, tensors: Sequence[Tensor], message_id: MessageId) -> None:
            place = message_id.boundary, message_id.direction
            if self._note and place[1] == "backward":
                self._note(channel, tensors, message_id)
            if not message_id.training or message_id.micro_batch != micro_batch:
                return
            scale = largest(tensors)
            for codec in trials.get(place, ()):
                trial = channel.trial(codec)
                receiver = trial.as_receiver()  # the receiver's state before the message
                packet, extra, message = trial.encode(tensors, message_id)
                message.headers_left = 0  # looking at one would wait for the device
                decoded = receiver.decode(packet, message, message_id, functools.partial(_given, extra))
                nbytes = packet.numel() + (extra.numel() if extra is not None else 0)
                found: Tensor | GradientError = norms(tensors, decoded, scale)
                if place[1] == "backward":
                    found = GradientError()
                    found.add(tensors, decoded)
                self._losses.setdefault(place, []).append((found, nbytes))

        for end in source.ends:
            if end.sends:
                end.watch = watch

    def stop(self, source: MessageSource) -> None:
        """Stop trying rungs."""
        for end in source.ends:
            if end.sends:
                end.watch = self._note if end.channel.direction == "backward" else None

    def state(self) -> dict[str, list[float]]:
        """Return the norms since the last decision, for a checkpoint; wait for the device."""
        return {str(number): noted.tolist() for number, noted in self._norms.items()}

    def resume(self, state: Mapping[str, list[float]]) -> None:
        """Continue with the norms of a checkpoint.

        Raises:
            CompressionError: one belongs to a boundary that the pipeline does not have.
        """
        if not all(int(number) < self._boundaries for number in state):
            raise CompressionError(f"policy: norms of boundaries {list(state)}, there are {self._boundaries}")
        self._norms = {
            int(number): torch.tensor(noted, dtype=torch.float64, device=self._device)
            for number, noted in state.items()
        }

    def gather(
        self, lr: float, ladder_lengths: Mapping[Place, int], micro_batches: int
    ) -> tuple[float, dict[Place, Signal]]:
        """Return rank 0's `lr` and the signals of the places in `ladder_lengths`, then clear them.

        All ranks return the same.
        """
        size = self._boundaries, len(DIRECTIONS), 2 + 2 * self._rungs
        table = torch.zeros(size, dtype=torch.float64, device="cpu")
        for number, noted in self._norms.items():
            table[number, :, :2] = noted.cpu()
        for (number, direction), losses in self._losses.items():
            row = table[number, DIRECTIONS.index(direction), 2:]
            for rung, (found, nbytes) in enumerate(losses):
                if isinstance(found, GradientError):
                    row[rung] = found.value
                else:
                    row[rung] = error_and_cosine(*found.tolist())[0]
                row[self._rungs + rung] = nbytes * micro_batches
        self._norms, self._losses = {}, {}
        mine = torch.cat([torch.tensor([lr], dtype=torch.float64, device="cpu"), table.flatten()]).to(
            self._device
        )
        everywhere = self._all_gather(mine)
        tables = [each[1:].cpu().view_as(table).tolist() for each in everywhere]
        return everywhere[0][0].item(), {
            place: self._signal([each[place[0]][DIRECTIONS.index(place[1])] for each in tables], length)
            for place, length in ladder_lengths.items()
        }

    def _signal(self, rows: Sequence[Sequence[float]], length: int) -> Signal:
        """Combine the rows of all ranks for one place; ranks that do not send there have zeros."""
        total, count = (math.fsum(row[column] for row in rows) for column in (0, 1))
        columns = [[row[2 + rung] for row in rows] for rung in range(length)]
        errors = tuple(math.nan if any(map(math.isnan, column)) else max(column) for column in columns)
        sizes = tuple(max(row[2 + self._rungs + rung] for row in rows) for rung in range(length))
        return Signal(total / count if count else math.nan, errors, sizes)


def _given(extra: Tensor | None, nbytes: int) -> Tensor | None:
    """Return an extra packet without transfer."""
    return extra
