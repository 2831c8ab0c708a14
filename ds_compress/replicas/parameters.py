"""The exchange of new parameters as compressed differences, for optimizers with partitioned states.

The owner of a partition has its new values in fp32. All replicas have the same bf16 parameters, the *shadow*.
Each owner sends C(new - shadow). Every replica, the owner included, adds the decoded difference to its
shadow. The next difference contains what a message loses, so no residual is needed (SDP4Bit, arXiv
2410.15526). A partition is sent in buckets: while one is under way, the next is encoded or decoded.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.codec import Codec, TensorSpec
from ds_compress.message.layout import Counters
from ds_compress.message.packet import ALIGNMENT
from ds_compress.replicas.exchange import cut
from ds_compress.replicas.slices import AVERAGE, RowSpan, Slice, SliceCodec
from ds_compress.replicas.transfers import Replicas, Started, Transfer
from ds_compress.transport.codec_stream import without_autocast


class Range(NamedTuple):
    """Position of a parameter in a flat buffer."""

    start: int
    numel: int
    parameter: int | None  # index among the parameters of the stage; None: it stays exact
    width: int  # values of a row: an index of the first dimension


class _Part(NamedTuple):
    start: int
    numel: int
    slice: Slice | None  # None: sent uncompressed
    nbytes: int


_Bucket = list[list[_Part]]
"""Parts that each replica sends in one transfer."""


class ParameterExchange:
    """Gathers the partitions of flat buffers. All replicas must call it with the same buffers and ranges."""

    def __init__(
        self,
        replicas: Replicas,
        codec: Codec,
        bucket_bytes: int,
        sent: Counters,
        seed: int,
        has_checksum: bool,
    ):
        """
        Args:
            bucket_bytes: most bytes of fp32 values of a partition in one bucket.
            sent: counters to which the bytes are added.
            seed: of the codec's random choices.
            has_checksum: whether packets carry a checksum.
        """
        self._replicas = replicas
        self._codec = SliceCodec(codec, seed, has_checksum, replicas.stage)
        self._bucket_numel = max(1, bucket_bytes // 4)
        self._sent = sent
        self._plans: dict[int, list[_Bucket]] = {}

    def gather(self, flat: Tensor, new: Tensor, ranges: Sequence[Range], step: int) -> None:
        """Update `flat` to the new values of all partitions, apart from the error of the codec.

        Args:
            flat: the shadow, 1-D; the partitions of all replicas have equal sizes.
            new: fp32, the new values of this replica's partition.
            ranges: positions of all parameters in `flat`, in order.
            step: number of completed optimizer steps.

        Raises:
            CompressionError: a packet is not the expected one.
        """
        if flat.data_ptr() not in self._plans:
            self._plans[flat.data_ptr()] = self._plan(flat, ranges)
        plan = self._plans[flat.data_ptr()]
        with torch.no_grad(), without_autocast():
            under_way = [self._send(bucket, flat, new, step) for bucket in plan]
            for bucket, started in zip(plan, under_way):
                self._add(bucket, started.wait(), flat, step)
        size = self._replicas.size
        self._sent.raw_bytes += (size - 1) * flat.nbytes // size
        self._sent.wire_bytes += sum(each.arrived.numel() for each in under_way) * (size - 1) // size

    def _send(self, bucket: _Bucket, flat: Tensor, new: Tensor, step: int) -> Started:
        """Encode and send this replica's parts of a bucket."""
        size, own = self._replicas.size, self._replicas.rank
        first, nbytes = own * flat.numel() // size, max(sum(part.nbytes for part in each) for each in bucket)
        packets = torch.zeros(nbytes, dtype=torch.uint8, device=flat.device)
        for part, packet in cut(packets, bucket[own]):
            shadow = flat.narrow(0, part.start, part.numel)
            value = new.narrow(0, part.start - first, part.numel)
            if part.slice is None:
                _raw(packet, shadow).copy_(value)
            else:
                self._codec.encode(part.slice, value - shadow.float(), packet, AVERAGE, step, own)
        return self._replicas.start(Transfer(packets))

    def _add(self, bucket: _Bucket, everywhere: Tensor, flat: Tensor, step: int) -> None:
        """Add what arrived to the shadow."""
        for owner, each in enumerate(everywhere.view(self._replicas.size, -1)):
            for part, packet in cut(each, bucket[owner]):
                shadow = flat.narrow(0, part.start, part.numel)
                if part.slice is None:
                    shadow.copy_(_raw(packet, shadow))
                else:
                    change = self._codec.decode(part.slice, packet, AVERAGE, step, owner)
                    shadow.copy_(change.add_(shadow))

    def _plan(self, flat: Tensor, ranges: Sequence[Range]) -> list[_Bucket]:
        """Return the buckets, each with as many values of every partition of `flat`, without its padding.

        Partitions hold different parameters. If a large one were not cut, its owner's packets of that bucket
        would be larger than those of the others, which are padded to the same size.
        """
        size, numbers = flat.numel() // self._replicas.size, itertools.count()
        buckets = list[_Bucket]()
        for first in range(0, size, self._bucket_numel):
            bucket: _Bucket = []
            for owner in range(self._replicas.size):
                begin = owner * size + first
                end = min(begin + self._bucket_numel, (owner + 1) * size)
                bucket.append([])
                for each in ranges:
                    start = max(each.start, begin)
                    numel = min(each.start + each.numel, end) - start
                    if numel <= 0:
                        continue
                    if each.parameter is None:
                        nbytes = -(-numel * flat.itemsize // ALIGNMENT) * ALIGNMENT
                        bucket[-1].append(_Part(start, numel, None, nbytes))
                        continue
                    spec = TensorSpec((numel,), torch.float32, flat.device)
                    rows = RowSpan.of(each.width, start - each.start, numel)
                    own = Slice(next(numbers), owner, spec, rows)
                    bucket[-1].append(_Part(start, numel, own, self._codec.layout(own).nbytes))
            buckets.append(bucket)
        return buckets


def _raw(packet: Tensor, like: Tensor) -> Tensor:
    """Return the packet of an uncompressed part as a view with the dtype of `like`."""
    return packet[: like.nbytes].view(like.dtype)
