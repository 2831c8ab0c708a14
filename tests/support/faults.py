"""Kill, stop or damage ranks of real runs, and time how long the others take to end: `make faults`."""

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch

from ds_compress.runtime import connections
from launch.ports import reserved_port
from tests.support.calls import wrapped
from tests.support.interpreters import TRAINING, interpreter
from tests.support.network import ADDRESSES, WIRE, Hosts, reason_for_none, two_hosts
from tests.support.pipeline import MICRO_BATCHES, WIDTH, batches, build, ds_config, layers
from tests.support.ranks import rank_environment
from tests.support.replicas import WIDE, tied_layers, wide_layers

ROOT = Path(__file__).parents[2]
STEP_OF_FAULT = 2


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def crash(*_):
    raise ValueError("a mistake in the model")


ACTIONS = {"kill": kill, "stop": stop, "crash": crash}
PLACES = {
    "tied": "all_reduce",
    "reduce": "allreduce_gradients",
    "exchange": "allreduce_gradients",
    "loss": "_aggregate_total_loss",
    "save": "_save_checkpoint",
    "load": "_load_checkpoint",
}


def before(owner, name, number, action):
    """Let `action` happen before the call of that number of a method, with its arguments."""
    calls = itertools.count(1)

    def act(*args, **_):
        if next(calls) == number:
            action(*args)

    setattr(owner, name, wrapped(getattr(owner, name), act))


def run_rank(fault: str, at: int, stages: int, block: dict[str, Any], moment: str) -> None:
    """Train on this rank of `stages` stages; write to the file `moment` when `fault` happens on rank `at`."""
    moment = Path(moment)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()

    def cut(*_):
        while not moment.with_name("cut").exists():
            time.sleep(0.01)

    def flip_bit(packet):
        packet.memory[40 if fault == "body" else 9] ^= 0x10

    def happens(action=lambda: None):
        def run(*args):
            # complete when it is seen
            moment.with_name("now").write_text(str(time.time()))
            moment.with_name("now").rename(moment)
            action(*args)

        return run

    here = rank == at
    if here and fault == "mismatch":
        block = {**block, "seed": 5}
        happens()()
    replicas = torch.distributed.get_world_size() // stages
    specs, shape = layers(2 * stages), (8, WIDTH)
    if "replicas" in block:
        specs, shape = wide_layers(), (8, WIDE)
    if "tied" in block:
        specs, shape = tied_layers(), (8, WIDE)
    engine = build(stages, ds_config(block, replicas=replicas), specs)
    what, _, where = fault.partition("-")
    in_step = STEP_OF_FAULT * MICRO_BATCHES + 3  # a micro-batch in the middle of a step
    action = {**ACTIONS, "cut": cut}.get(what)
    if here and where == "probe":
        connections.message_rate = lambda *_: happens(action)()
    elif here and action and where:
        owner = engine.ds_compress.tied if where == "tied" else engine
        before(owner, PLACES[where], STEP_OF_FAULT + 1, happens(action))
    elif here and action:
        before(engine.module.forward_funcs[0], "forward", in_step, happens(action))
    if here and fault in ("body", "header"):
        sending = next(end for end in engine.ds_compress.stage.ends if end.sends)
        before(sending.link, "send", in_step, happens(flip_bit))
    data = batches(engine.grid.get_data_parallel_id(), shape=shape)
    for _ in range(STEP_OF_FAULT + 2):
        engine.train_batch(data)
        if where in ("save", "load"):
            engine.save_checkpoint(moment.parent / "checkpoints")
        if where == "load":
            engine.load_checkpoint(moment.parent / "checkpoints")
    print("trained to the end", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


TIMEOUT = 3.0  # seconds, "link": {"timeout_s": ...} of runs with a rank that is silent or late
LATE = 10.0  # seconds over the time-out after which the table says that a rank was late
GRACE = 900.0  # after which a rank hangs, however busy the machine is
BLOCK = {"min_numel": 0, "forward": {"codec": "bf16"}}
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
    "kill-exchange": Fault("SIGKILL, others in the exchange of gradients", 1, 3, silent=True),
    "stop-exchange": Fault("SIGSTOP, others in the exchange of gradients", 1, 3, silent=True),
    "kill-tied": Fault("SIGKILL, others in the exchange of gradients of tied weights", 2, silent=True),
    "stop-loss": Fault("SIGSTOP, others in the broadcast of the loss", silent=True),
    "stop-save": Fault("SIGSTOP, others save a checkpoint", silent=True),
    "stop-load": Fault("SIGSTOP, others load a checkpoint", silent=True),
    "cut-loss": Fault("link cut for good in the broadcast of the loss", hosts=True),
}

WHILE_PROBED = {  # over an eager link
    "kill-probe": Fault("SIGKILL while connections are probed", silent=True),
    "stop-probe": Fault("SIGSTOP while connections are probed", silent=True),
}


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    seconds: float  # after the fault; inf: not by itself
    code: int | None
    messages: list[str]  # the errors that it wrote
    chained: bool  # whether one of them came with the traceback of another


def run(name: str, at: int, mode: str, depth: int = 1) -> list[Ending]:
    """Let fault `name` happen on rank `at` of a pipeline with link `mode`; how all ranks ended."""
    fault = (FAULTS | WHILE_PROBED)[name]
    seconds = TIMEOUT if name.startswith(("stop", "cut")) else GRACE
    block = {**BLOCK, "link": {"timeout_s": seconds, "checksum": True, "mode": mode, "depth": depth}}
    if name in WHILE_PROBED:
        block["link"]["connections"] = "auto"
    if name.endswith("exchange"):
        block["replicas"] = {"codec": "bf16"}
    if name.endswith("tied"):
        block["tied"] = {"codec": "bf16"}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts()) if fault.hosts else None
        moment = Path(folder, "moment")
        logs = [Path(folder, f"rank{rank}") for rank in range(fault.ranks)]
        # a fork of another process would not be on the host of the program that asks for it
        python = sys.executable if hosts else interpreter(TRAINING)
        arguments = json.dumps([name, at, fault.stages, block, str(moment)])
        words = [python, "-m", "tests.support.faults", "rank", arguments]
        # rank 0 is where all meet
        address = ADDRESSES[at == 0] if hosts else "127.0.0.1"
        port = 29500 if hosts else stack.enter_context(reserved_port())
        ranks = []
        for rank, log in enumerate(logs):
            environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
            environment |= rank_environment(rank, fault.ranks, port, address)
            environment |= {"GLOO_SOCKET_IFNAME": WIRE} if hosts else {}
            command = [*hosts.on(rank == at), *words] if hosts else words
            with log.open("w") as file:
                files = {"stdout": file, "stderr": file}
                ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT, **files))
        try:
            except_for = at if name.startswith("stop") else None
            ended = _wait(ranks, moment, except_for, hosts)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        began = float(moment.read_text()) if moment.exists() else float("nan")
        times = [ended.get(rank, float("inf")) - began for rank in range(fault.ranks)]
        return [Ending(s, p.returncode, *_errors_in(log)) for s, p, log in zip(times, ranks, logs)]


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


def _errors_in(log: Path) -> tuple[list[str], bool]:
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
    run_rank(*json.loads(sys.argv[2])) if sys.argv[1:2] == ["rank"] else main()
