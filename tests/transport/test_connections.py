"""Connections of some ranks' own, made by these alone."""

import gc
import os
import resource
import signal
import sys
import time

import psutil
import pytest
import torch
from torch import distributed as dist

from ds_compress.errors import CompressionError
from ds_compress.transport import connections
from ds_compress.transport.connections import AT_ONCE, Connection, connect
from ds_compress.transport.p2p import is_connection_lost
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal


def in_a_chain(number):
    """What comes from the rank before over each connection to it; even pairs are first on every rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    pairs = sorted([(at, at + 1) for at in (rank - 1, rank) if 0 <= at < last], key=lambda pair: pair[0] % 2)
    made = dict(zip(pairs, connect([(pair, number) for pair in pairs], seconds=60)))
    after, before = made.get((rank, rank + 1), []), made.get((rank - 1, rank), [])
    sent = [one.isend(torch.tensor([10 * rank + at]), rank + 1) for at, one in enumerate(after)]
    found = []
    for one in before:
        came = torch.zeros(1, dtype=torch.int64)
        one.irecv(came, rank - 1).wait()
        found.append(came.item())
    for work in sent:
        work.wait()
    return found


@pytest.mark.parametrize("at_once", [1, 4])
def test_no_rank_of_a_chain_waits_for_another_for_ever(at_once, monkeypatch):
    """A store of torch 2.5 answers nobody else while it waits for a key: there they are made one by one."""
    if at_once == 1:
        monkeypatch.setattr(connections, "_clone", lambda of_job, thread: None)
    ranks = run_ranks(5, in_a_chain, 6)
    assert ranks == [[], *([10 * rank + at for at in range(6)] for rank in range(4))]


def gathered():
    """What ranks 0, 2 and 3 gather over their connections, made twice; rank 1 has no part in them."""
    rank, ranks = dist.get_rank(), (0, 2, 3)
    if rank not in ranks:
        return []
    both = [connect([(ranks, 2)], seconds=60)[0] for _ in range(2)]
    found = []
    for one in (connection for made in both for connection in made):
        everywhere = torch.zeros(3, 1, dtype=torch.int64)
        one.all_gather(everywhere, torch.tensor([rank])).wait()
        found.append(everywhere.flatten().tolist())
    return found


def test_other_ranks_have_no_part_in_them():
    """With `new_group` all ranks of the job waited for each."""
    expected = [[0, 2, 3]] * 4
    assert run_ranks(4, gathered) == [expected, [], expected, expected]


def failing(how, seconds):
    """What rank 0 is told when rank 1 never comes, whether a transfer has failed, and how many it tried."""
    if dist.get_rank() == 1:
        return None
    tried, made = [], Connection.__init__

    def noted(connection, *args):
        tried.append(connection)
        made(connection, *args)

    Connection.__init__ = noted
    if how == "alone":
        with pytest.raises(CompressionError) as refused:
            connect([((0, 1), 12)], seconds)
        return str(refused.value), is_connection_lost(refused.value), len(tried)
    files = psutil.Process().num_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (files + 10, files + 20))
    return refusal(connect, [((0, 1), 12)], seconds), False, len(tried)


def test_one_that_waits_for_nobody_is_told_once_the_time_has_run_out():
    """A pool of threads took the next ones, and waited for these, too: twice the time."""
    (said, is_lost, tried), _ = run_ranks(2, failing, "alone", 5)
    assert "link: ranks 0, 1 could not connect (ds_compress.link.timeout_s: 5): Dist" in said and is_lost
    assert tried == AT_ONCE


def test_too_few_files_are_refused_before_any_connection_is_made():
    (said, _, tried), _ = run_ranks(2, failing, "files", 600)
    assert tried == 0
    assert "ds_compress.link.connections: 12 more need as many open files" in said and "`ulimit -Hn`" in said


def roomy():
    """The soft limit of open files before connections are made, after that, and the hard one."""
    files, (_, hard) = psutil.Process().num_fds(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files + 10, hard))
    made = connect([((0, 1), 30)], seconds=60)[0]
    return len(made), files + 10, *resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_soft_limit_of_open_files_is_raised():
    for made, before, soft, hard in run_ranks(2, roomy):
        assert made == 30 and before < soft <= hard


def forked():
    """How a fork ends that collects, or ends with, the connections of its parent."""
    made = connect([((0, 1), 3)], seconds=60)[0]
    ends = []
    for collects in (True, False):
        if (child := os.fork()) == 0:
            if collects:
                made.clear()
                gc.collect()
                os._exit(0)
            sys.exit(0)
        deadline, ended = time.monotonic() + 60, 0
        while not ended and time.monotonic() < deadline:
            ended, _ = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        ends.append(bool(ended))
    return ends


def test_a_fork_ends_without_the_threads_of_its_parents_connections():
    """Workers of a DataLoader that collected an engine which had gone waited for ever."""
    assert run_ranks(2, forked) == [[True, True]] * 2
