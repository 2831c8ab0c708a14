"""Connections are made over one client of the job's store."""

import threading
import time

import psutil
import pytest
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ds_compress.transport import connections
from ds_compress.transport.connections import connect
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal


def clients_of_the_store():
    """How many connections of this process lead to the store of the job."""
    store = _get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return sum(bool(c.raddr) and c.raddr.port == store.port for c in psutil.Process().net_connections("tcp"))


def count_clients():
    before = clients_of_the_store()
    if dist.get_rank() == 1:
        made = connect([((0, 1), 3), ((1, 2), 3)], seconds=60)
    else:
        made = connect([(sorted([1, dist.get_rank()]), 3)], seconds=60)
    dist.barrier()  # one side is connected before the other
    assert made
    return before, clients_of_the_store()


def test_ranks_open_no_further_connection_to_the_store():
    """Each opened four, of each of which the server looked up the name: a job of 32 ranks started 15 s later
    where a name server lost some questions, and rank 0 held 128 sockets more."""
    for before, after in run_ranks(3, count_clients):
        assert after == before > 0


def meet(seconds):
    """What ranks 0 and 1 come to when rank 2 does not come."""
    rank, store = dist.get_rank(), _get_default_store()
    if rank == 0:
        said = refusal(connect, [((0, 1), 1), ((0, 2), 1)], seconds)
        store.set("ended", "")
        return said
    made = connect([((0, 1), rank % 2)], seconds)[0]
    store.wait(["ended"])  # rank 0 may be slower to notice that it is connected with rank 1
    return len(made)


@pytest.mark.extended
def test_a_rank_that_does_not_come_holds_up_no_connection_with_others():
    said, made, _ = run_ranks(3, meet, 5)
    assert said.startswith("link: ranks 0, 2 could not connect (ds_compress.link.timeout_s: 5): ")
    assert made == 1


class GoneStore(dist.HashStore):
    def check(self, keys):
        raise dist.DistNetworkError("Connection reset by peer")


class SlowRendezvous(connections.Rendezvous):
    def wake(self):
        super().wake()
        time.sleep(0.05)


def lose_the_store():
    connections._get_default_store = GoneStore
    connections.Rendezvous = SlowRendezvous
    connections.ENDING_S = 60  # on a busy machine threads need more than a second
    before = threading.active_count()
    said = refusal(connect, [((0, 1), 20)], 60)
    return said, threading.active_count() - before


def test_a_store_that_is_gone_is_told_and_no_thread_waits_for_it():
    """Threads that it woke sometimes said first that a key had not come within the time-out.

    A program that ended while they left gloo was aborted: "terminate called without an active exception".
    """
    said, threads = run_ranks(1, lose_the_store)[0]
    assert said.endswith("Connection reset by peer") and not threads
