"""The exchange of gradients: a quantized reduce-scatter, then an all-gather of the averages.

    every replica                     owner of slice j                      every replica
    x = gradient + e_w
    C(x) of slice j  -- all_to_all -> decodes n packets in rank order
    e_w = x - C(x)                    y = their mean + e_o
                                      C(y)             -- all_gather -->    gradient = C(y), the owner's too
                                      e_o = y - C(y)

The feedback that wraps the codec keeps both residuals, e_w and e_o. Under ZeRO only the owner needs the mean,
so the all-gather is skipped. While the packets of one bucket are in flight, the next buckets are encoded.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ds_compress.codec import Codec
from ds_compress.codecs.message_error import measure_error
from ds_compress.message.layout import Counters
from ds_compress.replicas.slices import AVERAGE, GRADIENT, Gradient, Slice, SliceCodec, Slices
from ds_compress.replicas.transfers import Replicas, Started, Transfer
from ds_compress.transport.codec_stream import without_autocast

MEASURED = 2**20
"""Most values of a bucket that are compared with their exact average, which takes one more all-reduce."""


GATHERS_AFTER, ENDS_AFTER = 2, 4
"""Buckets that are started before the averages of one are sent, and before these are waited for."""


class HasSize(Protocol):
    """Item of a plan whose packet has a known size."""

    @property
    def nbytes(self) -> int: ...


Item = TypeVar("Item", bound=HasSize)
T = TypeVar("T")


class _Sent(NamedTuple):
    """A slice in an exchange, with its position in the gradient and the size of its packet."""

    slice: Slice
    values: Tensor  # the gradient of its parameter, 1-D
    start: int  # in `values`
    nbytes: int  # of its packet
    gathered: bool  # whether every replica needs the average

    def write(self, average: Tensor, scale: float) -> None:
        """Replace this slice of the gradient by `average` times `scale`."""
        part = self.values[self.start : self.start + self.slice.spec.numel]
        part.copy_(average[: part.numel()] if scale == 1.0 else average[: part.numel()] * scale)


Rounds = Generator[Transfer, Tensor | None, None]


@dataclass
class _InFlight:
    """A bucket in exchange, of which a transfer is in flight."""

    exact: list[tuple[Tensor, Tensor]] | None  # of `Exchange._exact`, if it is measured
    rounds: Rounds
    started: Started | None  # None: all averages are in place


class Exchange:
    """Averages gradients over replicas. All replicas must call it with the same gradients, in one order."""

    def __init__(
        self,
        replicas: Replicas,
        codec: Codec,
        bucket_bytes: int,
        seed: int = 0,
        has_checksum: bool = False,
        itemsize: int = 4,
        *,
        widths: Mapping[int, int] | None = None,
    ):
        """
        Args:
            codec: wrapped in its feedback.
            bucket_bytes: most bytes of uncompressed gradients in one exchange; a larger gradient has its own.
            seed: of the codec's random choices.
            has_checksum: whether packets carry a checksum.
            itemsize: bytes per value in DeepSpeed's all-reduce, for the counters.
            widths: see `Slices`.
        """
        self.replicas = replicas
        self.codec = SliceCodec(codec, seed, has_checksum, replicas.stage, content=replicas.content)
        self.slices = Slices(replicas.size, widths)
        self.sent = Counters()
        self.quality = math.nan, math.nan
        """Relative error and cosine of the last measured bucket, against its exact average."""
        self._in_flight = list[_InFlight]()
        self._measures = False
        self._sums: Tensor | None = None  # [exact averages and errors, values], added up over measured steps
        self._bucket_bytes = bucket_bytes
        self._itemsize = itemsize

    def average(self, gradients: Sequence[Gradient], factor: float, scale: float, step: int) -> None:
        """Replace the values of `gradients` by `factor` times their sum over the replicas.

        Args:
            factor: 1 / replicas for a mean.
            scale: the loss scale of the gradients; residuals are stored without it.
            step: number of completed optimizer steps.

        Raises:
            CompressionError: a packet is not the expected one.
        """
        for bucket in fill_buckets(gradients, lambda each: each.values.nbytes, self._bucket_bytes):
            self.start(bucket, factor, scale, step)
        self.finish()

    def start(self, bucket: Sequence[Gradient], factor: float, scale: float, step: int) -> None:
        """Encode and send a bucket of gradients; `finish` replaces their values, or a later `start` does.

        Transfers of earlier buckets are waited for after a fixed number of calls, so that all replicas start
        theirs in one order. Args: see `average`.
        """
        with torch.no_grad(), without_autocast():
            measures, self._measures = self._measures, False
            exact = self._exact(bucket, factor) if measures else None
            rounds = self.rounds(bucket, factor, scale, step)
            self._in_flight.append(_InFlight(exact, rounds, self.replicas.start(next(rounds))))
            if len(self._in_flight) > GATHERS_AFTER:
                self._advance(self._in_flight[-1 - GATHERS_AFTER])
            if len(self._in_flight) > ENDS_AFTER:
                self._end(self._in_flight.pop(0))

    def finish(self) -> None:
        """Wait for all buckets that were started."""
        with torch.no_grad(), without_autocast():
            for bucket in self._in_flight[-GATHERS_AFTER:]:
                self._advance(bucket)
            while self._in_flight:
                self._end(self._in_flight.pop(0))

    def measure(self) -> None:
        """Have `average` compare the next bucket with its exact average; this takes one more all-reduce."""
        self._measures = True

    def take_gradient_error(self) -> float:
        """Return the norm of all measured errors added up, over that of the exact averages added up.

        The sums start again from zero. Optimizers add up gradients, so errors that later steps correct
        do not count. nan: nothing was measured, or it was not finite.
        """
        sums, self._sums = self._sums, None
        return math.nan if sums is None else float(sums[1].norm() / sums[0].norm())

    def _exact(self, gradients: Sequence[Gradient], factor: float) -> list[tuple[Tensor, Tensor]]:
        """Return exact averages of a bucket, each with the values that its average will replace: of the first
        `MEASURED` values those that this replica gets."""
        starts = itertools.accumulate((each.values.numel() for each in gradients), initial=0)
        sample = [each.values[: max(0, MEASURED - start)] for each, start in zip(gradients, starts)]
        flat = torch.cat([values.float() for values in sample])
        dist.all_reduce(flat, group=self.replicas.groups[0])
        parts = flat.mul_(factor).split([values.numel() for values in sample])
        return [
            (part, values)
            for part, values, each in zip(parts, sample, gradients)
            if values.numel() and each.owner in (None, self.replicas.rank)
        ]

    def _compare(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """Return the relative error and the cosine of averages, given what `_exact` returned; add them up."""
        if not pairs:
            return math.nan, math.nan
        exacts, averages = zip(*pairs)
        whole = torch.cat(exacts)
        sums = torch.stack([whole, torch.cat(averages) - whole])
        if self._sums is not None and self._sums.shape == sums.shape:
            sums += self._sums
        self._sums = sums
        error = measure_error(exacts, averages)
        return error.relative_error, error.cosine

    def _advance(self, bucket: _InFlight) -> bool:
        """Wait for a transfer of a bucket and start its next one; return False if there is none."""
        if bucket.started is None:
            return False
        try:
            bucket.started = self.replicas.start(bucket.rounds.send(bucket.started.wait()))
        except StopIteration:
            bucket.started = None
        return bucket.started is not None

    def _end(self, bucket: _InFlight) -> None:
        """Wait for all transfers of a bucket."""
        while self._advance(bucket):
            pass
        if bucket.exact is not None:
            self.quality = self._compare(bucket.exact)

    def rounds(self, gradients: Sequence[Gradient], factor: float, scale: float, step: int) -> Rounds:
        """Average one bucket: yield each transfer to send, and receive the packets that arrived.

        Args: see `average`.
        """
        size, own = self.replicas.size, self.replicas.rank
        device, plan = gradients[0].values.device, self._plan(gradients)
        sizes = [sum(sent.nbytes for sent in each) for each in plan]
        packets = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        for sent, packet in cut(packets, itertools.chain(*plan)):
            x = sent.slice.take(sent.values, sent.start, scale)
            self.codec.encode(sent.slice, x, packet, GRADIENT, step, own)

        received = yield Transfer(packets, sizes)
        assert received is not None
        # slices of a parameter may touch different numbers of rows, so their packets may differ in size
        most = max(sum(sent.nbytes for sent in each if sent.gathered) for each in plan)
        averages = torch.zeros(most, dtype=torch.uint8, device=device)
        outgoing = iter(cut(averages, [sent for sent in plan[own] if sent.gathered]))
        by_sender = [cut(each, plan[own]) for each in received.view(size, -1)]
        for arrived in zip(*by_sender):
            sent, total = arrived[0][0], None
            for sender, (_, packet) in enumerate(arrived):
                decoded = self.codec.decode(sent.slice, packet, GRADIENT, step, sender)
                total = decoded if total is None else total.add_(decoded)
            assert total is not None
            mean = total.mul_(factor)
            if sent.gathered:
                self.codec.encode(sent.slice, mean, next(outgoing)[1], AVERAGE, step, own)
            else:
                sent.write(mean, scale)

        if most:
            everywhere = yield Transfer(averages)
            assert everywhere is not None
            for owner, each in enumerate(everywhere.view(size, -1)):
                for sent, packet in cut(each, [sent for sent in plan[owner] if sent.gathered]):
                    sent.write(self.codec.decode(sent.slice, packet, AVERAGE, step, owner), scale)
        self._count(gradients, sum(sizes) - sizes[own] + (size - 1) * averages.numel())

    def _count(self, gradients: Sequence[Gradient], wire_bytes: int) -> None:
        """Count a bucket that was averaged, and what this replica has sent for it."""
        size, values = self.replicas.size, sum(gradient.values.numel() for gradient in gradients)
        self.sent.messages += 1
        self.sent.raw_bytes += 2 * (size - 1) * values * self._itemsize // size  # of a ring's all-reduce
        self.sent.wire_bytes += wire_bytes

    def _plan(self, gradients: Sequence[Gradient]) -> list[list[_Sent]]:
        """Return the slices of `gradients`, by owner."""
        plan = [list[_Sent]() for _ in range(self.replicas.size)]
        for gradient in gradients:
            for number, each in enumerate(self.slices.of(gradient)):
                nbytes, start = self.codec.layout(each).nbytes, number * each.spec.numel
                sent = _Sent(each, gradient.values, start, nbytes, gradient.owner is None)
                plan[each.owner].append(sent)
        return plan


def fill_buckets(items: Iterable[T], nbytes: Callable[[T], int], bucket_bytes: int) -> list[list[T]]:
    """Put items in buckets, in order, each of at most `bucket_bytes`, or of one item that is larger."""
    buckets, left = list[list[T]](), 0
    for item in items:
        if not buckets or nbytes(item) > left:
            buckets.append([])
            left = bucket_bytes
        buckets[-1].append(item)
        left -= nbytes(item)
    return buckets


def cut(packets: Tensor, plan: Iterable[Item]) -> Iterator[tuple[Item, Tensor]]:
    """Yield each item of `plan` with its packet; `packets` contains them in the order of `plan`."""
    offset = 0
    for sent in plan:
        yield sent, packets[offset : offset + sent.nbytes]
        offset += sent.nbytes
