"""Send and receive packets, the large ones in parts, each over a TCP connection of its own.

gloo opens one connection between two ranks of a process group, so part i of a packet goes over group i, of
torch.distributed or a `Connection`. Both sides know the size of a packet before it comes, so they know its
parts, too. Parts arrive in any order, each in its place; within a group the packets of a channel keep their
order.
"""

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.distributed import Work

WHOLE = 1 << 16
"""Bytes of the smallest packet that is split, in parts of at least a sixteenth of that; a smaller one goes
over the first connection."""
ALIGNMENT = 64
"""Bytes of which the size of each part but the last is a multiple."""
SHORTEST = timedelta(milliseconds=1)
"""Time-out of a part when the time of its packet has run out; gloo takes 0 for its default."""


class Parts:
    """The transfers of all parts of a packet; replaces a `torch.distributed.Work`."""

    def __init__(self, works: list[Work]):
        self._works = works

    def wait(self, timeout: timedelta) -> None:
        """Return when all parts have left or come; `timeout` is for all of them together."""
        deadline = time.monotonic() + timeout.total_seconds()
        for work in self._works:
            work.wait(max(SHORTEST, timedelta(seconds=deadline - time.monotonic())))


def _start(transfer: str, packet: Tensor, peer: int, groups: Sequence[Any]) -> Work | Parts:
    works = [over(group, transfer)(part, peer) for part, group in zip(cut(packet, len(groups)), groups)]
    return Parts(works) if len(works) > 1 else works[0]


isend = functools.partial(_start, "isend")
"""Start to send a packet, uint8 [bytes], to a global rank, over groups."""
irecv = functools.partial(_start, "irecv")
"""Start to receive into a packet, uint8 [bytes], from a global rank, over groups."""


def over(group: Any, transfer: str) -> Callable[[Tensor, int], Work]:
    """Return `isend` or `irecv` of a `Connection`, or of a process group; None is the default one."""
    of_connection: Callable[[Tensor, int], Work] | None = getattr(group, transfer, None)
    return of_connection or functools.partial(getattr(dist, transfer), group=group)


def cut(packet: Tensor, connections: int) -> Sequence[Tensor]:
    """Return views of the parts of `packet`, uint8 [..., bytes], at most one for each of so many connections;
    a small packet is one part."""
    nbytes = packet.shape[-1]
    if connections == 1 or nbytes < WHOLE:
        return [packet]
    return packet.split(max(WHOLE >> 4, -(-nbytes // (connections * ALIGNMENT)) * ALIGNMENT), -1)
