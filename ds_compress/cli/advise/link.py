"""Measure the links between the ranks of this launch."""

import os

import torch
from torch import distributed as dist

from ds_compress.errors import CompressionError
from ds_compress.transport.p2p import PeerTimeout
from ds_compress.transport.probe import probe_neighbours


def measured_gbps() -> float:
    """Gbit/s of the slowest link between neighbouring ranks; every rank calls it.

    Raises:
        CompressionError: there is only one rank.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise CompressionError(
            "--measure: start it on the ranks to measure between, for example: "
            "torchrun --nproc-per-node 2 -m ds_compress advise --measure ..."
        )
    dist.init_process_group("gloo")
    gbps = slowest_link_gbps()
    dist.barrier()
    dist.destroy_process_group()
    return gbps


def slowest_link_gbps() -> float:
    """Gbit/s of the slowest link from a rank to the next one; the same on every rank."""
    links = probe_neighbours(torch.device("cpu"), PeerTimeout("ds-compress advise --measure"))
    incoming = [link.incoming for peer, link in links.items() if peer < dist.get_rank()]
    slowest = torch.tensor(min(incoming, default=float("inf")), dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    return 8e-9 * slowest.item()
