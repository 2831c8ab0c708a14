"""What the links between the ranks of this launch carry."""

import os
import time

import torch
from torch import distributed as dist

from ds_compress.errors import CompressionError

MEASURED_BYTES = 4 << 20
MEASURED_MESSAGES = 8


def measured_gbps() -> float:
    """Gbit/s of the slowest link between neighbouring ranks; every rank calls it.

    Raises:
        CompressionError: there is one rank alone.
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
    """Gbit/s of the slowest link from a rank to the next, one measured at a time; the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    message = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, device="cpu")
    seconds = torch.zeros(ranks, dtype=torch.float32, device="cpu")
    for sender in range(ranks - 1):
        dist.barrier()
        for sent in range(MEASURED_MESSAGES + 1):
            if sent == 1:  # the first one opens the connection
                started = time.perf_counter()
            if rank == sender:
                dist.send(message, sender + 1)
            elif rank == sender + 1:
                dist.recv(message, sender)
        if rank == sender + 1:
            seconds[rank] = time.perf_counter() - started
    dist.all_reduce(seconds)
    return 8e-9 * MEASURED_BYTES * MEASURED_MESSAGES / seconds.max().item()
