"""Compare the machines of a launched job: one process per machine reports to rank 0.

Rank 0 gathers the facts of all machines; then each pair of neighbours measures its link.
"""

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from ds_compress.cli.doctor.machine import LOOPBACK, Facts, facts
from ds_compress.errors import CompressionError, failures_at, shown_numbers
from ds_compress.transport.p2p import PeerTimeout
from ds_compress.transport.probe import probe_neighbours

Report = dict[str, Any]
"""`hosts`: facts of each rank; `links`: between ranks b and b + 1."""


class Meeting:
    """All ranks of the job, connected through a TCP store on rank 0."""

    def __init__(self, seconds: float, replicas: int = 1):
        """Connect to the store on rank 0.

        Args:
            seconds: timeout of each wait for another rank.
            replicas: of a pipeline; their links are measured too.

        Raises:
            CompressionError: rank 0 cannot be reached.
        """
        self.seconds = seconds
        try:
            self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except (KeyError, ValueError) as error:
            raise CompressionError(
                f"ds-compress doctor: the launcher set no usable {error}; start it through deepspeed or "
                "torchrun, or without RANK in the environment"
            ) from None
        if self.world % replicas:
            raise CompressionError(
                f"--replicas: {replicas} is not allowed: should divide the {self.world} processes started"
            )
        # the topology says whether neighbouring ranks are stages of a replica, or replicas of a stage
        self.distances = (1, replicas, self.world // replicas)
        theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.timeout = timedelta(seconds=seconds)
        self.name = f"ds-compress doctor: rank {self.rank}"
        place = f"{self.address}:{port}"
        with failures_at(f"{self.name} cannot meet the others at {place}; does a firewall stand between?"):
            store = dist.TCPStore(
                self.address,
                port,
                is_master=self.rank == 0 and not theirs,
                timeout=self.timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
        self.store = dist.PrefixStore("ds_compress doctor", store)

    def report(self) -> Report | None:
        """Gather the report of all machines; return it on rank 0 and None on the others.

        Raises:
            CompressionError: a rank did not join in time, or the connection to it was lost.
        """
        mine = facts(self.address)
        hosts = self.gather("facts", mine)
        # gloo would wait half an hour for a rank that has published an unreachable address
        links = self.measure() if self.agree(not any(is_unreachable(host, hosts) for host in hosts)) else []
        everywhere = merge_links([link for found in self.gather("links", links) for link in found])
        return {"hosts": hosts, "links": everywhere} if self.rank == 0 else None

    def gather(self, what: str, mine: Any) -> list[Any]:
        """Gather one value of every rank; return them on rank 0 and an empty list on the others."""
        with failures_at(f"{self.name} lost rank 0"):
            self.store.set(f"{what} {self.rank}", json.dumps(mine))
        if self.rank:
            return []
        end = time.monotonic() + self.seconds  # for all: half an hour, if each of 16 were waited for
        missing = [rank for rank in range(self.world) if not self._is_set(f"{what} {rank}", end)]
        if missing:
            names = shown_numbers(missing)
            self.store.set("go on", "")
            time.sleep(1.0)  # the store ends with this process: give the others time to read the key
            raise CompressionError(
                f"ds-compress doctor: of {self.world} ranks {names} did not answer within "
                f"{self.seconds:g} s: read what the launcher printed about that machine"
            )
        return [json.loads(self.store.get(f"{what} {rank}")) for rank in range(self.world)]

    def agree(self, value: bool) -> bool:
        """Broadcast rank 0's value to every rank."""
        if self.rank == 0:
            self.store.set("go on", str(value))
            return value
        answer = self._is_set("go on", time.monotonic() + 3 * self.seconds) and self.store.get("go on")
        if not answer:
            raise CompressionError(f"{self.name} got no answer from rank 0")
        return answer == b"True"

    def _is_set(self, key: str, end: float) -> bool:
        """Return whether `key` is set before the time `end`."""
        with failures_at(f"{self.name} lost rank 0"):
            while not self.store.check([key]):
                if time.monotonic() > end:
                    return False
                time.sleep(0.05)
        return True

    def measure(self) -> list[dict[str, Any]]:
        """Connect this rank with the others, and measure incoming bandwidth and round-trip time of its links
        to neighbours and other replicas."""
        gpu = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
        with failures_at(f"{self.name} could not connect to its neighbours"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpu else "gloo",
                store=dist.PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.world,
                timeout=self.timeout,
            )
            try:
                timeout = PeerTimeout("ds-compress doctor: link", self.seconds, "--timeout")
                measured = probe_neighbours(device, timeout, self.distances)
            finally:
                dist.destroy_process_group()
        links = []
        for peer, found in measured.items():
            way = "forward" if peer < self.rank else "backward"
            part = {f"gbps_{way}": 8e-9 * found.incoming, "rtt_ms": 2e3 * found.latency}
            links.append({"ranks": sorted((self.rank, peer)), **part})
        return links


def merge_links(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge what both ends of each link measured: both directions, and the shorter round trip."""
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for part in parts:
        other = found.setdefault(tuple(part["ranks"]), part)
        found[tuple(part["ranks"])] = {**other, **part, "rtt_ms": min(other["rtt_ms"], part["rtt_ms"])}
    return [found[ranks] for ranks in sorted(found)]


def is_unreachable(host: Facts, hosts: list[Facts]) -> bool:
    """Return whether gloo would publish an address at which other machines cannot reach this one."""
    usable = [each["name"] for each in host["interfaces"] if each["name"] != LOOPBACK]
    return any(each["way"] != LOOPBACK for each in hosts) and host["gloo_interface"] not in usable
