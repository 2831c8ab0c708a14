"""Connections of some ranks' own, made by these alone."""

import pytest
import torch
from torch import distributed as dist

from ds_compress.transport import connections
from ds_compress.transport.connections import connect
from tests.support.ranks import run_ranks


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
        monkeypatch.setattr(connections, "_stores", lambda of_job: [of_job])
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
