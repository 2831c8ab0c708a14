"""The exchange of new parameters as compressed differences, for optimizers with partitioned states.

The owner of a partition has its new values in fp32. All replicas have the same bf16 parameters, the *shadow*.
Each owner sends C(new - shadow). Every replica, the owner included, adds the decoded difference to its
shadow. The next difference contains what a message loses, so no residual is needed (SDP4Bit, arXiv
2410.15526).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ds_compress.codec import Codec, TensorSpec
from ds_compress.message.layout import Counters
from ds_compress.message.packet import ALIGNMENT
from ds_compress.replicas.exchange import Replicas, cut, replica_failures
from ds_compress.replicas.slices import AVERAGE, Slice, SliceCodec


class Range(NamedTuple):
    """Position of a parameter in a flat buffer."""

    start: int
    numel: int
    parameter: int | None  # index among the parameters of the stage; None: it stays exact


class _Part(NamedTuple):
    start: int
    numel: int
    slice: Slice | None  # None: sent uncompressed
    nbytes: int


class ParameterExchange:
    """Gathers the partitions of flat buffers. All replicas must call it with the same buffers and ranges."""

    def __init__(self, replicas: Replicas, codec: Codec, sent: Counters, seed: int, has_checksum: bool):
        """
        Args:
            sent: counters to which the bytes are added.
            seed: of the codec's random choices.
            has_checksum: whether packets carry a checksum.
        """
        self._replicas = replicas
        self._codec = SliceCodec(codec, seed, has_checksum, replicas.stage, use=1)
        self._sent = sent
        self._plans: dict[int, list[list[_Part]]] = {}

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
        size, own = self._replicas.size, self._replicas.rank
        first = own * flat.numel() // size
        if flat.data_ptr() not in self._plans:
            self._plans[flat.data_ptr()] = self._plan(flat, ranges)
        plan = self._plans[flat.data_ptr()]
        nbytes = max(sum(part.nbytes for part in parts) for parts in plan)
        with torch.no_grad():
            packets = torch.zeros(nbytes, dtype=torch.uint8, device=flat.device)
            for part, packet in cut(packets, plan[own]):
                shadow = flat.narrow(0, part.start, part.numel)
                value = new.narrow(0, part.start - first, part.numel)
                if part.slice is None:
                    _raw(packet, shadow).copy_(value)
                else:
                    self._codec.encode(part.slice, value - shadow.float(), packet, AVERAGE, step, own)
            everywhere = torch.empty(size * nbytes, dtype=torch.uint8, device=flat.device)
            with replica_failures():
                dist.all_gather_into_tensor(everywhere, packets, group=self._replicas.group)
            for owner, each in enumerate(everywhere.view(size, -1)):
                for part, packet in cut(each, plan[owner]):
                    shadow = flat.narrow(0, part.start, part.numel)
                    if part.slice is None:
                        shadow.copy_(_raw(packet, shadow))
                    else:
                        change = self._codec.decode(part.slice, packet, AVERAGE, step, owner)
                        shadow.copy_(change.add_(shadow))
        self._sent.raw_bytes += (size - 1) * flat.nbytes // size
        self._sent.wire_bytes += (size - 1) * nbytes

    def _plan(self, flat: Tensor, ranges: Sequence[Range]) -> list[list[_Part]]:
        """Return the parts of each partition of `flat`, without padding."""
        size = flat.numel() // self._replicas.size
        plan = []
        for owner in range(self._replicas.size):
            parts = []
            for each in ranges:
                start = max(each.start, owner * size)
                numel = min(each.start + each.numel, (owner + 1) * size) - start
                if numel <= 0:
                    continue
                if each.parameter is None:
                    nbytes = -(-numel * flat.itemsize // ALIGNMENT) * ALIGNMENT
                    parts.append(_Part(start, numel, None, nbytes))
                    continue
                spec = TensorSpec((numel,), torch.float32, flat.device)
                own = Slice(each.parameter * self._replicas.size + owner, owner, spec)
                parts.append(_Part(start, numel, own, self._codec.layout(spec).nbytes))
            plan.append(parts)
        return plan


def _raw(packet: Tensor, like: Tensor) -> Tensor:
    """Return the packet of an uncompressed part as a view with the dtype of `like`."""
    return packet[: like.nbytes].view(like.dtype)
