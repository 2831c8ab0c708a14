"""How packets get from each replica to others. A collective of gloo has one TCP connection between two ranks.

Over several connections the same bytes come, in the same places:

    packets for all    an all-gather in each process group, of a part of them
    packets for each   sent from replica to replica (`transport/packet_parts.py`)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import Work

from ds_compress.errors import CompressionError, in_one_line
from ds_compress.kernels.memory import is_of_this_rank
from ds_compress.transport import packet_parts
from ds_compress.transport.p2p import ExchangeConnections, PeerTimeout
from ds_compress.transport.packet_parts import Parts


class Transfer(NamedTuple):
    """What a replica sends at once. With `sizes`, replica r receives sizes[r] bytes from each."""

    packets: Tensor  # 1-D, uint8; or numbers that are summed, of any shape
    sizes: list[int] | None = None
    """Bytes for each replica, in the order of their ranks; None: each replica gets all packets."""
    is_summed: bool = False
    """Whether each replica gets the sum of what all send, instead of packets."""


Works = list[tuple[int | None, Work | Parts]]
"""What a transfer waits for, with the global rank of the other replica; None: a collective."""


@dataclass(frozen=True)
class Started:
    """A transfer in flight."""

    replicas: "Replicas"
    arrived: Tensor
    """What it fills: from one replica after another, or the sum."""
    works: Works

    def wait(self) -> Tensor:
        """Return what has arrived, once it has.

        Raises:
            CompressionError: it failed, or took too long.
        """
        for peer, work in self.works:
            if isinstance(work, Work) and peer is None:
                with replica_failures(self.replicas):
                    work.wait()
            else:
                self.replicas.timeout.wait(work, peer, self.arrived.device)
        return self.arrived


@dataclass(frozen=True)
class Replicas:
    """The replicas of a stage, and this rank among them."""

    size: int
    rank: int
    groups: Sequence[Any] = (None,)
    """The process group of the first connection, in which nothing else is sent, and more connections; sums
    use the first alone."""
    stage: int = 0  # of the pipeline
    content: str = "gradients"  # of what they exchange, for lines to the user
    between: str = "replicas"
    timeout: PeerTimeout = PeerTimeout()

    @classmethod
    def over(cls, connections: ExchangeConnections, stage: int, **names: str) -> "Replicas":
        """Return those of the set of `connections` that this rank is in; `names`: `content`, `between`."""
        ranks, groups = connections.ranks, connections.groups
        own = ranks.index(dist.get_rank())
        return cls(len(ranks), own, groups, stage, **names, timeout=connections.timeout)

    @property
    def exchanged(self) -> str:
        """Return what is exchanged, and by whom, for lines to the user."""
        return f"{self.content} between {self.between}"

    def start(self, transfer: Transfer) -> Started:
        """Start a transfer; all replicas start theirs in one order.

        Raises:
            CompressionError: a process group is broken, as after the end of a replica.
        """
        packets, sizes, is_summed = transfer
        options = {"group": self.groups[0], "async_op": True}
        if is_summed:
            with replica_failures(self):
                return Started(self, packets, [(None, dist.all_reduce(packets, **options))])
        received = packets.numel() if sizes is None else sizes[self.rank]
        arrived = torch.empty(self.size * received, dtype=torch.uint8, device=packets.device)
        with replica_failures(self):
            if len(self.groups) > 1:
                if sizes is None:
                    return Started(self, arrived, self._start_for_all(packets, arrived))
                works = self._start_for_each(packets.split(sizes), arrived.chunk(self.size))
                return Started(self, arrived, works)
            if sizes is None:
                work = dist.all_gather_into_tensor(arrived, packets, **options)
            else:
                work = dist.all_to_all_single(arrived, packets, [received] * self.size, sizes, **options)
        return Started(self, arrived, [(None, work)])

    def _start_for_all(self, packets: Tensor, arrived: Tensor) -> Works:
        own_parts = packet_parts.cut(packets, len(self.groups))
        parts_of_all = map(list, packet_parts.cut(arrived.view(self.size, packets.numel()), len(self.groups)))
        first = dist.all_gather(next(parts_of_all), own_parts[0], group=self.groups[0], async_op=True)
        others = zip(self.groups[1:], parts_of_all, own_parts[1:])
        return [(None, first), *((None, each.all_gather(of_all, own)) for each, of_all, own in others)]

    def _start_for_each(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Works:
        incoming[self.rank].copy_(outgoing[self.rank])
        works: Works = []
        for other, peer in enumerate(dist.get_process_group_ranks(self.groups[0])):
            if other != self.rank:
                works.append((peer, packet_parts.irecv(incoming[other], peer, self.groups)))
                works.append((peer, packet_parts.isend(outgoing[other], peer, self.groups)))
        return works


@contextmanager
def replica_failures(replicas: Replicas) -> Iterator[None]:
    """Re-raise errors of torch.distributed as CompressionErrors that name what `replicas` exchange."""
    try:
        yield
    except RuntimeError as error:
        if is_of_this_rank(error):
            raise
        raise CompressionError(f"{replicas.exchanged}: {in_one_line(error)}") from None
