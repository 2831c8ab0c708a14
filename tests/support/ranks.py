"""Run functions on real ranks, and make what all workers of pytest share once.

Ranks are forked processes that share the imports of this one, over gloo, with a time-out.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._dynamo  # by the first optimizer: here once, and not in each rank

import ds_compress.engine.attach  # noqa: F401  (hooks the engine and registers codecs, for all tests)
from launch.ports import reserved_port

with contextlib.suppress(ImportError):  # another release of DeepSpeed may not have it
    import deepspeed.module_inject.auto_ep_layer

# Point-to-point messages do not use it, and building it needs a C++ compiler
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def run_ranks(world_size: int, function, *args: Any, timeout: float = 600, check: bool = True) -> list[Any]:
    """Run `function(*args)` on `world_size` ranks of a process group; return the results in rank order.

    Raises what a rank raised; with `check=False` its traceback is in the results instead. After `timeout`
    seconds, which only ranks that hang need, all are killed and the test fails.
    """
    _import_optimizers()
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        children = [_fork(rank, world_size, port, Path(folder), function, args) for rank in range(world_size)]
        _wait(children, timeout)
        results = []
        for rank in range(world_size):
            path = Path(folder, str(rank))
            ok, value = pickle.loads(path.read_bytes()) if path.exists() else (False, "died without a result")
            if not ok and check:
                raise AssertionError(f"rank {rank} of {world_size}:\n{value}")
            results.append(value)
        return results


def _import_optimizers() -> None:
    """Import here, not in each rank, what ZeRO and bf16 need: with torch's compiler it takes 1.5 s."""
    with contextlib.suppress(ImportError):  # another release of DeepSpeed may not have it
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def rank_environment(rank: int, ranks: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """What tells a process which rank it is, and where all meet."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_PORT": port}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": address}


def _fork(rank: int, world_size: int, port: int, folder: Path, function, args) -> int:
    child = os.fork()
    if child:
        return child
    gc.freeze()  # a collection would copy all that was imported, and free stores without their threads
    code = 1
    try:
        os.environ.update(rank_environment(rank, world_size, port))
        torch.set_num_threads(1)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        result = True, function(*args)
        code = 0
    except BaseException:
        result = False, traceback.format_exc()
    (folder / f"{rank}.part").write_bytes(pickle.dumps(result))
    (folder / f"{rank}.part").rename(folder / str(rank))
    try:
        if code == 0:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    finally:  # or a rank whose peers have died would go on as another pytest
        os._exit(code)


def run_launches(
    count: int, world_size: int, function, *args: Any, restarted: tuple[int, ...] = ()
) -> list[list[Any]]:
    """Run `function(launch, *args)` on all ranks of `count` jobs at once, each a world of its own.

    Those in `restarted` are expected to die once, and run again.
    """
    _import_optimizers()
    with ProcessPoolExecutor(count, get_context("fork"), gc.freeze) as pool:
        jobs = [pool.submit(_launch, n in restarted, world_size, function, n, *args) for n in range(count)]
        return [pickle.loads(job.result()) for job in jobs]


def _launch(is_restarted: bool, *job: Any) -> bytes:
    """What `run_ranks` returns, pickled: tensors would be shared with a process that ends."""
    if is_restarted:
        run_ranks(*job, check=False)
    return pickle.dumps(run_ranks(*job))


def _wait(children: list[int], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    running = set(children)
    while running and time.monotonic() < deadline:
        running = {pid for pid in running if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        time.sleep(0.01)
    for pid in running:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    if running:
        raise AssertionError(f"{len(running)} of {len(children)} ranks still ran after {timeout} s")


folder_of_run: Path


def begin(basetemp: Path) -> None:
    """Tell where this run of pytest has its temporary files; a worker has a folder of its own there."""
    global folder_of_run
    folder_of_run = basetemp.parent if basetemp.name.startswith("popen-") else basetemp


def once(name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` of this run of pytest, which the first worker fills by `make`; read only."""
    folder, whole = folder_of_run / name, folder_of_run / f"{name}.whole"
    with (folder_of_run / f"{name}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder


def only_where_devices_are() -> None:
    """Let this process, and those forked from it, keep no seed for a kind of device that is not there.

    Keeping it, with the caller's stack as text, takes a millisecond; DeepSpeed seeds before every layer.
    """
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None
