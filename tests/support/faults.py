"""What the living ranks say when something goes wrong, and how long that takes them.

python -m tests.support.faults        prints the table of docs/pipelines.md; `make faults`
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

STAGES = 3
TIMEOUT = 3.0  # seconds, "link": {"timeout_s": ...} of the faulty runs
GRACE = 10.0  # seconds over the time-out that a rank may take to stop
BLOCK = {"min_numel": 0, "forward": {"codec": "bf16"}, "link": {"timeout_s": TIMEOUT, "checksum": True}}
START = 120.0  # seconds until the fault, at most

TITLES = {
    "kill": "SIGKILL in mid-step",
    "stop": "SIGSTOP in mid-step",
    "crash": "exception in the model",
    "body": "a flipped bit in a packet's body",
    "header": "a flipped bit in a packet's header",
    "mismatch": "another block",
}


SILENT = ("kill", "stop")  # after which the rank itself says no more


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    seconds: float  # after the fault; inf: not by itself
    code: int | None
    message: str  # last line that it wrote


def run(fault: str, at: int, mode: str) -> list[Ending]:
    """Let `fault` happen on rank `at` of a pipeline with link `mode`; how all ranks ended."""
    block = {**BLOCK, "link": {**BLOCK["link"], "mode": mode}}
    with tempfile.TemporaryDirectory() as folder:
        moment = Path(folder, "moment")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "tests.support.faulty",
            "--fault",
            fault,
            "--at",
            str(at),
            "--block",
            json.dumps(block),
            "--moment",
            str(moment),
        ]
        logs = [Path(folder, f"rank{rank}") for rank in range(STAGES)]
        ranks = []
        for rank, log in enumerate(logs):
            environment = {
                **os.environ,
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(STAGES),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            with log.open("w") as file:
                ranks.append(
                    subprocess.Popen(
                        command, env=environment, stdout=file, stderr=file, cwd=Path(__file__).parents[2]
                    )
                )
        try:
            ended = _wait(ranks, moment, at if fault == "stop" else None)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        began = float(moment.read_text()) if moment.exists() else float("nan")
        return [
            Ending(ended.get(rank, float("inf")) - began, ranks[rank].returncode, _last_line(log))
            for rank, log in enumerate(logs)
        ]


def _wait(ranks: list[subprocess.Popen], moment: Path, except_for: int | None) -> dict[int, float]:
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
            seen, deadline = True, time.time() + TIMEOUT + 3 * GRACE
        time.sleep(0.02)
    return ended


def _last_line(log: Path) -> str:
    """The error that ended the rank, without the names that torchrun and Python put before it."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+Error: ", line)]
    return re.sub(r"^(\[rank\d+\]: )?(ds_compress\.errors\.)?", "", (errors or lines or [""])[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", nargs="+", default=["eager", "blocking"], help="modes")
    modes = parser.parse_args().link
    print(
        f"Time-out {TIMEOUT:g} s, {STAGES} stages; seconds until each living rank had ended, and its "
        "last line.\n"
    )
    print("| fault | at rank | link | seconds | messages |\n|---|---|---|---|---|")
    late = False
    for mode in modes:
        for fault, title in TITLES.items():
            for at in range(STAGES):
                endings = run(fault, at, mode)
                living = {
                    rank: ending for rank, ending in enumerate(endings) if rank != at or fault not in SILENT
                }
                late = late or not all(ending.seconds <= TIMEOUT + GRACE for ending in living.values())
                seconds = ", ".join(f"{rank}: {ending.seconds:.1f}" for rank, ending in living.items())
                messages = "<br>".join(f"{rank}: {ending.message}" for rank, ending in living.items())
                print(f"| {title} | {at} | {mode} | {seconds} | {messages} |", flush=True)
    sys.exit(late)


if __name__ == "__main__":
    main()
