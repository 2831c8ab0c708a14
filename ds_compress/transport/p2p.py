"""The link: moves packets between neighbouring stages.

A channel end holds one `Sender` or `Receiver`. In both modes packets of a channel arrive in the order they
were sent.

blocking: DeepSpeed's own order and process group; each call returns when its packet has left or arrived.
eager:    sends return at once and receives are posted ahead. Each channel of a rank has a process group, or
          connections, of its own, so channels need no common order.

Transfers are those of torch.distributed (`packet_parts.py`): `isend` of deepspeed.comm blocks in older
releases and has no time-outs.
"""

import functools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch.distributed import DistError, Work

from ds_compress.errors import CompressionError
from ds_compress.kernels.memory import is_of_this_rank
from ds_compress.transport import packet_parts
from ds_compress.transport.connections import connect
from ds_compress.transport.packet_memory import Packet, new_packet
from ds_compress.transport.packet_parts import Parts
from ds_compress.transport.staging import Staged, receives_hold_device, transport_for

Pending = Work | Parts | Staged
"""A packet in flight."""


FEW = 3
"""Receives of gradients that are posted at most where they hold the device."""


def packets_in_flight(depth: int) -> int:
    """Return how many packets an eager channel has in flight before its sender waits for the oldest.

    Without a limit an evaluation would have any number. A sender that waits for packet n - F (F: this
    number) before it makes packet n cannot deadlock a schedule of `depth` that asks for its packets one by
    one (tests/transport/test_posting.py); depth + 1 would do, which is what it has in flight after its
    warm-up.
    In other schedules a message leaves early only if its sender would not wait longer for that (`Lookahead`).
    """
    return depth + 3


def posted_ahead(depth: int, are_few: bool = False) -> int:
    """Return how many receives an eager channel keeps posted.

    One packet can be in use while the next `depth` arrive. The neighbour cannot have made one after those, as
    it waits for an answer to the first.

    Args:
        are_few: for gradients, where receives hold the device (`receives_hold_device`). Streams may share a
            queue of it, and with CUDA_DEVICE_MAX_CONNECTIONS=1 all do: what is launched after a receive then
            starts when the packet before that one has come. Neighbours that post a activations and g
            gradients would wait for each other if a + g > depth + 4, or a < depth - 1: for warm-up
            (tests/transport/test_deadlocks.py).
    """
    return min(depth + 1, FEW) if are_few else depth + 1


@dataclass(frozen=True)
class PeerTimeout:
    """How long to wait for a peer, and the name of the channel in the error."""

    place: str = "link"
    seconds: float = 1800.0
    setting: str = "ds_compress.link.timeout_s"
    """Name of the option that gives `seconds`."""

    @functools.cached_property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.seconds)

    def wait(self, work: Pending, peer: object, device: torch.device) -> None:
        """Wait for a transfer from or to the rank `peer`.

        Raises:
            CompressionError: it failed, or took too long; names place and peer.
        """
        try:
            if device.type == "cpu" or not isinstance(work, Work):
                work.wait(self._limit)
            else:  # with a time-out of its own a wait on NCCL would stop the host, not only the stream
                work.wait()
        except RuntimeError as error:
            self.raise_for_peer(error, peer)

    @contextmanager
    def naming(self, peer: object) -> Iterator[None]:
        """Name place and peer in what torch.distributed raises."""
        try:
            yield
        except RuntimeError as error:
            self.raise_for_peer(error, peer)

    def raise_for_peer(self, error: RuntimeError, peer: object) -> NoReturn:
        """Raise `error` as one line that names place and peer; an error of this rank's own work stays."""
        if is_of_this_rank(error):
            raise error
        # gloo writes "[file:line] what happened. What that may mean": keep the middle
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]
        if "timed out" in reason.lower():
            raise CompressionError(
                f"{self.place}: rank {peer} did not answer within {self.seconds:g} s ({self.setting}): its "
                "process died or is stopped, the link is down, its script is busy or caught an error, or it "
                "needs longer than that"
            ) from None
        raise CompressionError(f"{self.place}: rank {peer} is gone: {reason}") from None


@dataclass(eq=False)
class Endpoint:
    """An end of a channel on one rank."""

    peer: int
    """Global rank of the other end."""
    device: torch.device
    groups: Sequence[Any] = (None,)
    """What packets go over, in parts: a process group (`channel_groups`), None for the default one, or
    connections (`connect`)."""
    timeout: PeerTimeout = PeerTimeout()
    depth: int = 1
    """Depth of the schedule that an eager end supports, from the next batch on."""
    is_eager: bool = True
    are_answers: bool = False
    """Whether its packets answer others, as gradients do."""

    def __post_init__(self) -> None:
        self._transport = transport_for(self.device)

    def _start(self, transfer: Callable[..., Pending], packet: Packet) -> Pending:
        """Start `isend` or `irecv` of a packet."""
        try:
            return transfer(packet.memory, self.peer, self.groups)
        except RuntimeError as error:
            self.timeout.raise_for_peer(error, self.peer)

    def renew(self) -> None:
        """Prepare for packets of another layout; called while none is in flight."""


class Sender(Endpoint):
    """The sending end of a channel; a packet's memory is used again when it has left."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._in_flight: deque[tuple[Packet, Pending]] = deque()
        self._free: list[Packet] = []

    def memory(self, nbytes: int) -> Packet:
        """Return a packet of so many bytes that no transfer uses; zeros when new."""
        # Counted, not polled: gloo's is_completed() stays False until someone waits
        while len(self._in_flight) >= packets_in_flight(self.depth):
            self._release()
        if self._free and self._free[-1].nbytes != nbytes:
            # Not kept by size: a codec of variable size would fill the machine with packets
            self._free.clear()
        if self._free:
            return self._free.pop()
        return new_packet(nbytes, self.device)

    def send(self, packet: Packet) -> None:
        """Send `packet`, which came from `memory`; a blocking end returns when it has left."""
        self._in_flight.append((packet, self._start(self._transport.isend, packet)))
        if not self.is_eager:
            self.drain()

    def renew(self) -> None:
        self._free.clear()  # of another layout: the gaps between its parts are not zero

    def drain(self) -> None:
        """Return when everything sent has left this process."""
        while self._in_flight:
            self._release()

    def _release(self) -> None:
        packet, work = self._in_flight.popleft()
        self.timeout.wait(work, self.peer, self.device)
        self._free.append(packet)


class Receiver(Endpoint):
    """The receiving end of a channel: keeps receives posted for the packets that it expects. For any other,
    and on a blocking link that is all of them, a receive is posted when it is asked for.

    On NCCL a posted receive occupies the device until its packet comes. That packet must not depend on work
    that this rank has not launched yet, or both sides wait forever. So the first receives are posted when the
    first packet is asked for. In 1F1B of `depth` this rank has then launched all that the neighbour needs for
    the next `depth` packets, because their warm-ups differ by that many passes.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._posted: deque[tuple[Packet, Pending]] = deque()
        self._memory: list[Packet] = []  # for packets that are expected
        self._in_use: Packet | None = None
        self._other: Packet | None = None  # for all others
        self._to_post = 0
        self._at_once = not receives_hold_device(self.device)

    def expect(self, nbytes: int, count: int) -> None:
        """Announce that the next `count` packets have `nbytes` each."""
        missing = len(self._posted) + self._to_post
        if missing:
            raise CompressionError(
                f"link: {missing} packets from rank {self.peer} that were expected never came: the batch "
                "before this one was interrupted; restart all ranks"
            )
        ahead = posted_ahead(self.depth, are_few=self.are_answers and not self._at_once)
        if len(self._memory) != ahead or self._memory[0].nbytes != nbytes:
            self._memory = [self._empty(nbytes) for _ in range(ahead)]
        self._in_use = None
        self._to_post = count
        if self._at_once:
            self._post_all()

    def receive(self, nbytes: int) -> Packet:
        """Return the next packet; the next call overwrites it."""
        if self._in_use is not None:
            self._post(self._in_use)
        elif not self._posted:
            self._post_all()
        if not self._posted:  # none was expected
            if self._other is None or self._other.nbytes != nbytes:
                self._other = self._empty(nbytes)
            self._to_post = 1
            self._post(self._other)
        self._in_use, work = self._posted.popleft()
        self.timeout.wait(work, self.peer, self.device)
        return self._in_use

    def _post_all(self) -> None:
        for packet in self._memory:
            self._post(packet)

    def _post(self, packet: Packet) -> None:
        if self._to_post:
            self._to_post -= 1
            self._posted.append((packet, self._start(self._transport.irecv, packet)))

    def _empty(self, nbytes: int) -> Packet:
        return new_packet(nbytes, self.device, torch.empty)


def is_connection_lost(error: BaseException | None) -> bool:
    """Return whether `error` is, or was raised for, a transfer that failed, as it does when a peer ends."""
    while error is not None:
        if isinstance(error, DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
            return True
        error = error.__context__
    return False


def channel_groups(
    boundaries: int, uses: Sequence[str] = ("forward", "backward"), seconds: float = 1800.0
) -> dict[tuple[int, str], list[Any]]:
    """Create process groups, all of every rank, by (boundary % 2, use): each of the `uses` has one for the
    even and one for the odd boundaries.

    A stage has one even and one odd boundary, and a use has one direction, so a rank has at most one channel
    in a group. NCCL may run all work of a group in order, so no channel waits for another one's packets. All
    ranks must take part in creating a group, and this number of groups serves any number of stages.

    Args:
        boundaries: of the pipeline. Every rank of the job passes the same.
        seconds: after which NCCL gives up a transfer.
    """
    return {
        (parity, use): [dist.new_group(timeout=timedelta(seconds=seconds))]
        for use in uses
        for parity in range(min(boundaries, 2))
    }


def meet(rank: int, peer: int, device: torch.device, groups: Sequence[Any], seconds: float) -> None:
    """Send a byte from one of two ranks to the other, so that NCCL connects them now; both call it.

    Args:
        rank, peer: global ranks, of this process and the other one.
        groups: as `Endpoint.groups`.
        seconds: of the time-out, for errors.

    Raises:
        CompressionError: the other rank is gone, or did not come.
    """
    timeout, byte = PeerTimeout(seconds=seconds), torch.zeros(1, dtype=torch.uint8, device=device)
    with timeout.naming(peer):
        transfer = packet_parts.isend if rank < peer else packet_parts.irecv
        timeout.wait(transfer(byte, peer, groups), peer, device)


class ExchangeConnections:
    """The connections between the ranks of each of some sets. Every rank of the job has one, and calls
    `set_number` alike; its groups are those of the set that this rank is in."""

    def __init__(self, sets: Sequence[Sequence[int]], exchanged: str, seconds: float):
        """
        Args:
            sets: ranks in ascending order. A rank is in at most one.
            exchanged: what the ranks send each other, for errors.
            seconds: after which a transfer is given up.
        """
        self.timeout = PeerTimeout(exchanged, seconds)
        self.groups: list[Any] = []
        """The process group of the first connection, and more connections."""
        self.ranks: Sequence[int] = ()
        for ranks in sets:  # all ranks of the job make the groups of all sets, as torch counts them
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds))
            if dist.get_rank() in ranks:
                self.ranks, self.groups = ranks, [group]

    def files_for(self, number: int) -> int:
        """Return how many files more this rank opens for so many."""
        return (number - len(self.groups)) * (len(self.ranks) - 1) if self.ranks else 0

    def set_number(self, number: int) -> None:
        """Have so many from the next packet on; none is in flight."""
        if self.ranks:
            more = connect([(self.ranks, max(0, number - len(self.groups)))], self.timeout.seconds)
            self.groups[number:] = more[0]

    def links(self, device: torch.device) -> Iterator[tuple[Sender, Receiver, bool]]:
        """Yield ends to the ranks before and after this one in its set, and whether this one is the first of
        the two. No rank waits for another if all take them in this order."""
        own = self.ranks.index(dist.get_rank()) if self.ranks else 0
        for first in sorted((own - 1, own), key=lambda first: first % 2):
            if 0 <= first < len(self.ranks) - 1:
                peer = self.ranks[first + 1 if first == own else first]
                link = peer, device, self.groups, self.timeout
                yield Sender(*link), Receiver(*link), first == own
