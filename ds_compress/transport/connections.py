"""More TCP connections between some ranks of the job, each a process group of gloo.

For a group of `torch.distributed.new_group` all ranks of the job wait, for one after another. These are made
by their ranks alone, some at a time.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, lru_cache
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Work
from torch.distributed.distributed_c10d import _get_default_store

AT_ONCE = 4
"""Connections that are made at a time. Each takes about seven round trips to the store of the job, to which
every rank keeps so many connections more."""

_made: Counter[tuple[int, ...]] = Counter()  # connections so far, by ranks; alike on each of these


class Connection:
    """A TCP connection between every two of some ranks; it closes when it is collected."""

    def __init__(self, ranks: Sequence[int], store: Any, seconds: float):
        """
        Args:
            ranks: of the job, with this one. Each of them makes one, with the same `store`.
            seconds: after which a transfer is given up.
        """
        gloo: Any = dist.ProcessGroupGloo  # torch's types lack most of it
        options = gloo._Options()
        options._devices, options._threads, options._timeout = _devices(), 1, timedelta(seconds=seconds)
        self._group = gloo(store, ranks.index(dist.get_rank()), len(ranks), options)
        self._ranks = ranks

    def isend(self, packet: Tensor, peer: int) -> Work:
        """Start to send `packet` to the global rank `peer`."""
        work: Work = self._group.send([packet], self._ranks.index(peer), 0)
        return work

    def irecv(self, packet: Tensor, peer: int) -> Work:
        """Start to receive into `packet` from the global rank `peer`."""
        work: Work = self._group.recv([packet], self._ranks.index(peer), 0)
        return work

    def all_gather(self, everywhere: Sequence[Tensor], mine: Tensor) -> Work:
        """Start to gather `mine` of each rank in `everywhere`, in the order of ranks."""
        work: Work = self._group.allgather([list(everywhere)], [mine])
        return work


def connect(wanted: Iterable[tuple[Sequence[int], int]], seconds: float) -> list[list[Connection]]:
    """Make so many connections between the ranks of each of the `wanted` (ranks, number).

    Args:
        wanted: sets of ranks, ascending, with this one. All ranks of a set call, for the same number. No rank
            waits for ever if the sets of the job have one order in which every rank gives its own.
        seconds: after which a transfer is given up.
    """
    wanted, named = list(wanted), list[tuple[tuple[int, ...], str]]()
    for ranks in (tuple(ranks) for ranks, number in wanted for _ in range(number)):
        named.append((ranks, f"ds_compress/connections/{ranks}/{_made[ranks]}"))
        _made[ranks] += 1
    if not named:
        return [[] for _ in wanted]
    unused = SimpleQueue[Any]()
    stores = _stores(_get_default_store())
    for store in stores:
        unused.put(store)

    def make(of: tuple[tuple[int, ...], str]) -> Connection:
        ranks, name = of
        store = unused.get()
        try:
            return Connection(ranks, PrefixStore(name, store), seconds)
        finally:
            unused.put(store)

    with ThreadPoolExecutor(len(stores), "ds_compress_connect") as threads:
        made = threads.map(make, named)
        return [[next(made) for _ in range(number)] for _, number in wanted]


@lru_cache(maxsize=1)
def _stores(of_job: Any) -> list[Any]:
    """Return what connections are made by at a time: while a store waits for a key it answers nobody else."""
    return [of_job.clone() for _ in range(AT_ONCE)] if hasattr(of_job, "clone") else [of_job]  # torch 2.5


@cache
def _devices() -> list[Any]:
    """Return the network interfaces of gloo's groups, each with the one thread of all connections over it."""
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if names:
        return [gloo.create_device(interface=name) for name in names.split(",")]
    return [gloo.create_default_device()]
