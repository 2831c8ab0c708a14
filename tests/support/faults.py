"""What the living ranks say when something goes wrong, and how long that takes them.

python -m tests.support.faults        prints the table of docs/failures.md; `make faults`
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from launch.ports import reserved_port
from tests.support.hosts import ADDRESSES, WIRE, Hosts, reason_for_none, two_hosts
from tests.support.warm import TRAINING, interpreter

TIMEOUT = 3.0  # seconds, "link": {"timeout_s": ...} of the faulty runs
LATE = 10.0  # seconds over the time-out after which the table says that a rank was late
GRACE = 60.0  # the same for tests, which run on busy machines
BLOCK = {"min_numel": 0, "forward": {"codec": "bf16"}, "link": {"timeout_s": TIMEOUT, "checksum": True}}
START = 600.0  # seconds until the fault, at most


@dataclass(frozen=True)
class Fault:
    title: str
    stages: int = 3
    replicas: int = 1
    silent: bool = False  # the rank itself says no more
    hosts: bool = False  # the rank is alone on its host, and the link to it is cut

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas

    @property
    def possible(self) -> bool:
        return not (self.hosts and reason_for_none())


FAULTS = {
    "kill": Fault("SIGKILL in mid-step", silent=True),
    "stop": Fault("SIGSTOP in mid-step", silent=True),
    "cut": Fault("link cut for good in mid-step", hosts=True),
    "crash": Fault("exception in the model"),
    "body": Fault("a flipped bit in a packet's body"),
    "header": Fault("a flipped bit in a packet's header"),
    "mismatch": Fault("another block"),
    "kill-reduce": Fault("SIGKILL, others in the all-reduce of gradients", 2, 2, silent=True),
    "stop-reduce": Fault("SIGSTOP, others in the all-reduce of gradients", 2, 2, silent=True),
    "cut-reduce": Fault("link cut for good in the all-reduce of gradients", 2, 2, hosts=True),
    "crash-reduce": Fault("exception, others in the all-reduce of gradients", 2, 2),
    "stop-loss": Fault("SIGSTOP, others in the broadcast of the loss", silent=True),
    "stop-save": Fault("SIGSTOP, others save a checkpoint", silent=True),
    "stop-load": Fault("SIGSTOP, others load a checkpoint", silent=True),
    "cut-loss": Fault("link cut for good in the broadcast of the loss", hosts=True),
}

HARMLESS = {"early": Fault("it has ended, others are not through with their last step")}


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    seconds: float  # after the fault; inf: not by itself
    code: int | None
    messages: list[str]  # the errors that it wrote
    chained: bool  # whether one of them came with the traceback of another


def run(name: str, at: int, mode: str, depth: int = 1) -> list[Ending]:
    """Let fault `name` happen on rank `at` of a pipeline with link `mode`; how all ranks ended."""
    fault = (FAULTS | HARMLESS)[name]
    block = {**BLOCK, "link": {**BLOCK["link"], "mode": mode, "depth": depth}}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts()) if fault.hosts else None
        moment = Path(folder, "moment")
        logs = [Path(folder, f"rank{rank}") for rank in range(fault.ranks)]
        # a fork of another process would not be on the host of the program that asks for it
        python = sys.executable if hosts else interpreter(TRAINING)
        words = [python, "-m", "tests.support.faulty", "--fault", name, "--at", str(at)]
        words += ["--stages", str(fault.stages), "--block", json.dumps(block), "--moment", str(moment)]
        # rank 0 is where all meet
        address, port = (
            (ADDRESSES[at == 0], 29500) if hosts else ("127.0.0.1", stack.enter_context(reserved_port()))
        )
        ranks = []
        for rank, log in enumerate(logs):
            environment = {
                **os.environ,
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(fault.ranks),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                **({"GLOO_SOCKET_IFNAME": WIRE} if hosts else {}),
            }
            command = [*hosts.on(rank == at), *words] if hosts else words
            with log.open("w") as file:
                ranks.append(
                    subprocess.Popen(
                        command, env=environment, stdout=file, stderr=file, cwd=Path(__file__).parents[2]
                    )
                )
        try:
            except_for = at if name.startswith("stop") else None
            ended = _wait(ranks, moment, except_for, hosts)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        began = float(moment.read_text()) if moment.exists() else float("nan")
        return [
            Ending(ended.get(rank, float("inf")) - began, ranks[rank].returncode, *_said(log))
            for rank, log in enumerate(logs)
        ]


def _wait(
    ranks: list[subprocess.Popen], moment: Path, except_for: int | None, hosts: Hosts | None
) -> dict[int, float]:
    """When each rank ended, those that did within the time-out and a generous grace."""
    ended: dict[int, float] = {}
    deadline = time.time() + START
    waiting = {rank for rank in range(len(ranks)) if rank != except_for}
    seen = False
    while waiting and time.time() < deadline:
        for rank in list(waiting):
            if ranks[rank].poll() is not None:
                ended[rank] = time.time()
                waiting.discard(rank)
        if not seen and moment.exists():
            if hosts:
                hosts.cut()
                moment.with_name("cut").touch()
            seen, deadline = True, time.time() + TIMEOUT + GRACE
        time.sleep(0.02)
    return ended


def _said(log: Path) -> tuple[list[str], bool]:
    """The errors in a log, without what torch and Python put before them; whether one was chained."""
    text = re.sub(r"^\[rank\d+\]: ?", "", log.read_text(errors="replace"), flags=re.MULTILINE)
    lines = re.findall(r"^(?:[\w.]+(?:Error|Exception): |ds_compress: rank).*", text, re.MULTILINE)
    errors = [line.removeprefix("ds_compress.errors.") for line in lines]
    chained = "was the direct cause of" in text or "another exception occurred" in text
    return list(dict.fromkeys(errors)), chained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", nargs="+", default=["eager", "blocking"], help="modes")
    parser.add_argument("--fault", nargs="+", default=list(FAULTS), choices=FAULTS, metavar="FAULT")
    args = parser.parse_args()
    print(f"Time-out {TIMEOUT:g} s; seconds until each living rank had ended, and what it said.\n")
    print("| fault | at rank | link | seconds | messages |\n|---|---|---|---|---|")
    late = False
    for mode in args.link:
        for name in args.fault:
            fault = FAULTS[name]
            for at in range(fault.ranks) if fault.possible else ():
                endings = run(name, at, mode)
                living = {r: ending for r, ending in enumerate(endings) if r != at or not fault.silent}
                late = late or not all(ending.seconds <= TIMEOUT + LATE for ending in living.values())
                seconds = ", ".join(f"{rank}: {ending.seconds:.1f}" for rank, ending in living.items())
                messages = "<br>".join(
                    f"{rank}: {' / '.join(ending.messages)}{' (chained)' * ending.chained}"
                    for rank, ending in living.items()
                )
                print(f"| {fault.title} | {at} | {mode} | {seconds} | {messages} |", flush=True)
    sys.exit(late)


if __name__ == "__main__":
    main()
