"""Measure what messages get of a link over one and over several connections.

    RATE=200mbit RTT_MS=80 LOSS=0.05 launch/two_hosts.sh launch/bench/connections.py --connections 1 16 64

Rank 0 sends messages to rank 1 without a pause, four under way at a time, over each number of connections in
turn. Prints the Mbit/s that came, the seconds that the new connections took, and the sockets and threads of
the process.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ds_compress.transport.connections import connect
from ds_compress.transport.p2p import PeerTimeout, Receiver, Sender

AHEAD = 4


def stream(end: Sender | Receiver, nbytes: int, count: int) -> float:
    """Send or receive `count` messages of `nbytes`; return the seconds that this took."""
    dist.barrier()
    began = time.monotonic()
    if isinstance(end, Sender):
        for _ in range(count):
            end.send(end.memory(nbytes))
        end.drain()
    else:
        end.expect(nbytes, count)
        for _ in range(count):
            end.receive(nbytes)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64], help="ascending")
    parser.add_argument("--mib", type=int, default=16, help="of a message (default: 16)")
    parser.add_argument("--seconds", type=float, default=20, help="of each number, about (default: 20)")
    parser.add_argument("--local_rank", type=int, help="from the launcher")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, nbytes, groups = dist.get_rank(), args.mib << 20, [None]
    for number in args.connections:
        began = time.monotonic()
        groups += connect([((0, 1), number - len(groups))], seconds=1800)[0]
        connected = time.monotonic() - began
        kind = Receiver if rank else Sender
        end = kind(1 - rank, torch.device("cpu"), groups[:number], PeerTimeout(), AHEAD - 1)
        # As many as take the seconds at the rate of the first ones
        count = torch.tensor(max(AHEAD, round(args.seconds * AHEAD / stream(end, nbytes, AHEAD))))
        dist.broadcast(count, src=1)
        seconds = stream(end, nbytes, int(count))
        if rank:
            mbit = 8e-6 * int(count) * nbytes / seconds
            sockets, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
            print(
                f"{number} connections: {mbit:.0f} Mbit/s; made in {connected:.1f} s, "
                f"{sockets} files and {threads} threads in all",
                flush=True,
            )


if __name__ == "__main__":
    main()
