"""Connections of some ranks' own, made by these alone."""

import gc
import os
import resource
import select
import signal
import sys

import psutil
import pytest
import torch
from torch import distributed as dist

from ds_compress.engine.wiring import set_connections
from ds_compress.errors import CompressionError
from ds_compress.transport import connections
from ds_compress.transport.connections import AT_ONCE, SPARE, Connection, connect
from ds_compress.transport.p2p import is_connection_lost
from tests.support.calls import wrapped
from tests.support.pipeline import build, ds_config
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


@pytest.mark.parametrize("at_once", [1, AT_ONCE])
@pytest.mark.extended(keep=1)
def test_no_rank_of_a_chain_waits_for_another_for_ever(at_once, monkeypatch):
    monkeypatch.setattr(connections, "AT_ONCE", at_once)
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


def left_alone(seconds):
    """What rank 0 is told when rank 1 never comes, whether a transfer has failed, and how many it tried."""
    if dist.get_rank() == 1:
        return None
    tried = []
    Connection.__init__ = wrapped(Connection.__init__, before=lambda *args: tried.append(args))
    with pytest.raises(CompressionError) as refused:
        connect([((0, 1), 3 * AT_ONCE)], seconds)
    return str(refused.value), is_connection_lost(refused.value), len(tried)


@pytest.mark.extended
def test_one_that_waits_for_nobody_is_told_once_the_time_has_run_out():
    """A pool of threads took the next ones, and waited for these, too: twice the time."""
    (said, is_lost, tried), _ = run_ranks(2, left_alone, 5)
    assert "link: ranks 0, 1 could not connect (ds_compress.link.timeout_s: 5): Dist" in said and is_lost
    assert tried == AT_ONCE


def renumbered(path):
    """What ranks 0 and 1 of a second job of the same processes gather, whose numbers have moved on by one."""
    rank = dist.get_rank()
    made = connect([((0, 1), 2)], seconds=60) if rank < 2 else []
    dist.barrier()  # one side is connected before the other
    made.clear()
    dist.destroy_process_group()
    rank = (rank + 1) % 3
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
    if rank == 2:
        return []
    [[connection]] = connect([((0, 1), 1)], seconds=60)
    everywhere = torch.zeros(2, 1, dtype=torch.int64)
    connection.all_gather(everywhere, torch.tensor([rank])).wait()
    return everywhere.flatten().tolist()


def test_processes_make_connections_in_a_second_job_in_which_they_have_other_ranks(tmp_path):
    """Each counted its own of both jobs: they waited for each other under different names."""
    assert run_ranks(3, renumbered, tmp_path / "store") == [[0, 1], [], [0, 1]]


def short_of_files():
    """What a rank is told when rank 1 may not open the files that it needs."""
    if dist.get_rank() == 1:
        files = connections._files_with(20)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    return refusal(connections.require_files, torch.device("cpu"), 100 + 4 * dist.get_rank())


def test_too_few_files_of_one_rank_are_refused_on_all():
    """It alone was told, and the others waited for it until the time had run out, 30 minutes."""
    for said in run_ranks(2, short_of_files):
        assert said == (
            "ds_compress.link.connections: a rank may open 84 files fewer than they need (`ulimit -Hn`); "
            "allow more, or use fewer connections"
        )


SEVERAL = {"link": {"connections": 64}}
GRADIENTS = {"replicas": {"codec": "bf16"}}


def engine_short_of_files(stages, block, later):
    """What ranks of an engine are told that may open a few files; `later`: more connections are asked for
    once it is there."""
    engine = build(stages, ds_config(block, replicas=2 // stages)) if later else None
    files = connections._files_with(40)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if engine is None:
        return refusal(build, stages, ds_config(block, replicas=2 // stages))
    return refusal(set_connections, engine.ds_compress.stage, engine, 64)


@pytest.mark.parametrize(
    "stages, block, later",
    [(2, SEVERAL, False), (1, {**SEVERAL, **GRADIENTS}, False), (1, GRADIENTS, True)],
    ids=["channels", "exchanges", "exchanges that get more"],
)
def test_files_of_all_connections_of_an_engine_are_counted_before_any_is_made(stages, block, later):
    for said in run_ranks(2, engine_short_of_files, stages, block, later):
        assert "ds_compress.link.connections: a rank may open" in said


def unlike_interfaces():
    """What rank 0 is told whose GLOO_SOCKET_IFNAME names none of this machine's, and then one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "nothing0,lo"
    said = refusal(connect, [((0, 1), 1)], 5)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,nothing0"
    connect([((0, 1), 1)], seconds=60)
    dist.barrier()  # one side is connected before the other
    return said


def test_connections_go_over_the_first_interface_that_gloo_is_told():
    for said in run_ranks(2, unlike_interfaces):
        assert said.startswith("link: ranks 0, 1 could not connect") and "nothing0" in said


def roomy():
    """The soft limit of open files before connections are made, after that, and the hard one."""
    files, (_, hard) = psutil.Process().num_fds(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files + 10, hard))
    made = connect([((0, 1), SPARE + 20)], seconds=60)[0]
    dist.barrier()  # one side is connected before the other
    return len(made), files + 10, *resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_soft_limit_of_open_files_is_raised():
    for made, before, soft, hard in run_ranks(2, roomy):
        assert made == SPARE + 20 and before < soft <= hard


def forked():
    """How a fork ends that collects, or ends with, the connections of its parent."""
    made = connect([((0, 1), 3)], seconds=60)[0]
    dist.barrier()  # one side is connected before the other
    ends = []
    for collects in (True, False):
        if (child := os.fork()) == 0:
            if collects:
                made.clear()
                gc.collect()
                os._exit(0)
            sys.exit(0)
        ended, *_ = select.select([os.pidfd_open(child)], [], [], 60)
        os.kill(child, signal.SIGKILL)  # nothing where it has ended
        os.waitpid(child, 0)
        ends.append(bool(ended))
    return ends


def test_a_fork_ends_without_the_threads_of_its_parents_connections():
    """Workers of a DataLoader that collected an engine which had gone waited for ever."""
    assert run_ranks(2, forked) == [[True, True]] * 2
