"""More TCP connections between some ranks of the job, each a process group of gloo.

For a group of `torch.distributed.new_group` all ranks of the job wait, for one after another. These are made
by their ranks alone, many at once (rendezvous.py).
"""

import contextlib
import ctypes
import os
import resource
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cache
from threading import Thread
from typing import Any, NoReturn, Protocol

import psutil
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import Work
from torch.distributed.distributed_c10d import _get_default_store

from ds_compress.errors import CompressionError, in_one_line, shown_numbers
from ds_compress.transport.collectives import lowest
from ds_compress.transport.rendezvous import Mailbox, Rendezvous

AT_ONCE = 16
"""Connections that are made at a time. Of hundreds gloo refuses some."""
ENDING_S = 1.0
"""Seconds for threads to end after one has failed."""
SPARE = 64
"""Files that are left for all else."""
accepting: "weakref.WeakSet[Accepts]" = weakref.WeakSet()
"""What counts on files for connections that others have yet to make."""


class Accepts(Protocol):
    """A part of this process to which others connect."""

    def awaited(self) -> int:
        """Return how many of them have not connected yet."""


class Connection:
    """A TCP connection between every two of some ranks; it closes when it is collected, but not in a fork."""

    def __init__(self, ranks: Sequence[int], store: Any, seconds: float):
        """
        Args:
            ranks: of the job, with this one. Each of them makes one, with the same `store`.
            seconds: after which a transfer is given up.
        """
        gloo: Any = dist.ProcessGroupGloo  # torch's types lack most of it
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [_device()], 1, timedelta(seconds=seconds)
        self._store = store  # else its methods, in Python, go before the group
        self._group = _immortal(gloo(store, ranks.index(dist.get_rank()), len(ranks), options))
        self._ranks = ranks
        weakref.finalize(self, _free, self._group, os.getpid()).atexit = False

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
        seconds: after which a transfer is given up, and the wait for another rank.

    Returns:
        The connections of each of the `wanted`, in the order of these.

    Raises:
        CompressionError: a rank did not come in time.
    """
    wanted, of_job = list(wanted), _get_default_store()
    named = _named([tuple(ranks) for ranks, number in wanted for _ in range(number)], of_job)
    make_room(sum(len(ranks) - 1 for ranks, _ in named))
    rendezvous, tasks = Rendezvous(), deque(enumerate(named))
    made: dict[int, Connection] = {}
    failed: list[tuple[Sequence[int], Exception]] = []

    def work() -> None:
        with contextlib.suppress(IndexError):  # none is left
            while not failed:
                number, (ranks, name) = tasks.popleft()
                try:
                    made[number] = Connection(ranks, Mailbox(rendezvous, ranks, name, seconds), seconds)
                except Exception as error:
                    failed.append((ranks, error))
                rendezvous.wake()

    # not a pool, which waits for its threads when one has failed, and others for ranks that have gone
    threads = [Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(named)))]
    for thread in threads:
        thread.start()
    try:
        rendezvous.serve(of_job, lambda: bool(failed) or len(made) == len(named))
    except RuntimeError as error:
        failed.insert(0, (named[0][0], error))  # threads that waited for keys may have failed of it before
    if failed:
        # those that are not in gloo end now; one that is still in Python would abort the end of the program
        end = time.monotonic() + ENDING_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        _refuse(*failed[0], seconds)
    in_order = iter([made[number] for number in range(len(named))])
    return [[next(in_order) for _ in range(number)] for _, number in wanted]


def _refuse(ranks: Sequence[int], error: Exception, seconds: float) -> NoReturn:
    """Raise `error`; one of torch.distributed as a CompressionError that names the `ranks`."""
    try:
        raise error
    except RuntimeError:
        raise CompressionError(
            f"link: ranks {shown_numbers(ranks)} could not connect (ds_compress.link.timeout_s: "
            f"{seconds:g}): {in_one_line(error)}"
        ) from None


def _named(each: Sequence[tuple[int, ...]], of_job: Any) -> list[tuple[tuple[int, ...], str]]:
    """Return the ranks of each connection and its name, which these ranks alone have in common.

    Counted in the store `of_job`: a process may have had other ranks in a job before this one.
    """
    own = dist.get_rank()
    made = {
        ranks: of_job.add(f"ds_compress/connections of {own}/{ranks}", number) - number
        for ranks, number in Counter(each).items()
    }
    named = []
    for ranks in each:
        named.append((ranks, f"ds_compress/connections/{ranks}/{made[ranks]}"))
        made[ranks] += 1
    return named


class TooFewFiles(CompressionError):
    """More connections than some rank of the job may open files for."""


def require_files(device: torch.device, number: int) -> None:
    """Refuse, on every rank of the job, so many connections more of this one for which some rank may not open
    enough files. Every rank calls it, each with its own number.

    Raises:
        TooFewFiles: the same on all ranks, as others would wait for the one that may not.
    """
    (spare,) = lowest(device, files_left() - number)
    if spare < 0:
        raise TooFewFiles(
            f"ds_compress.link.connections: a rank may open {-spare:,} files fewer than they need "
            "(`ulimit -Hn`); allow more, or use fewer connections"
        )


def files_left() -> int:
    """Return how many more connections this process may open, each a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else max(0, hard - _files_with(0))


def _files_with(number: int) -> int:
    """Return the files that this process needs, with so many connections more, and those that it awaits."""
    return psutil.Process().num_fds() + sum(each.awaited() for each in accepting) + number + SPARE


def make_room(number: int = 0) -> None:
    """Raise the soft limit of open files, if so many connections more, and those that are awaited, need
    that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (needed := _files_with(number)) > soft:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@cache
def _device() -> Any:
    """Return the network interface of gloo's groups, with the one thread of all connections over it."""
    gloo: Any = dist.ProcessGroupGloo
    # a device that connects later can have but one group
    eager = {"lazy_init": False} if "lazy_init" in (gloo.create_default_device.__doc__ or "") else {}
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return _immortal(gloo.create_device(interface=name, **eager))
    return _immortal(gloo.create_default_device(**eager))


def _immortal(thing: Any) -> Any:
    """Keep `thing` until `_free`: in a fork it would wait for threads that are not there, and for ever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def _free(group: Any, process: int) -> None:
    """Let go of what `_immortal` keeps, in the `process` that made it."""
    if os.getpid() == process:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
