"""Measure packets of sites on their way to and from a store, over one and over several connections.

    RATE=200mbit RTT_MS=80 LOSS=0.05 launch/two_hosts.sh launch/bench/store.py --connections 1 4 16

Rank 0 has the store. Rank 1 reads a packet of random bytes and writes one, with each number of connections in
turn, and prints the medians.
"""

import argparse
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ds_compress.sites.board import Board

PORT, PATIENCE = 29400, timedelta(minutes=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--mib", type=int, default=32, help="of a packet (default: 32)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--local_rank", type=int, help="from the launcher")
    args = parser.parse_args()
    host, packet = os.environ["MASTER_ADDR"], torch.randint(256, (args.mib << 20,), dtype=torch.uint8)
    if os.environ["RANK"] == "0":
        store = TCPStore(host, PORT, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        Board(store).put_packet(0, 0, 0, packet)
        store.set("begin", "")
        store.wait(["end"], PATIENCE)
        return
    needed = 1 + max(args.connections)
    stores = [TCPStore(host, PORT, is_master=False, timeout=PATIENCE) for _ in range(needed)]
    stores[0].wait(["begin"], PATIENCE)
    seconds = {count: list[tuple[float, float]]() for count in args.connections}
    for turn in range(args.turns):
        for count in args.connections:
            further = stores[1 : 1 + count] if count > 1 else []
            board, began = Board(stores[0], further=further), time.monotonic()
            board.packet(0, 0, 0)
            read = time.monotonic()
            board.put_packet(turn + 1, 0, count, packet)
            seconds[count].append((read - began, time.monotonic() - read))
    for count, turns in seconds.items():
        reading, writing = (
            8e-6 * packet.numel() / statistics.median(each) for each in zip(*turns, strict=True)
        )
        print(
            f"{count} connections: read at {reading:.0f} Mbit/s, written at {writing:.0f} Mbit/s", flush=True
        )
    stores[0].set("end", "")
    time.sleep(0.5)


if __name__ == "__main__":
    main()
