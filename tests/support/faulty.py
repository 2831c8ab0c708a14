"""One rank of a training run in which something goes wrong; faults.py beside it starts it as a process."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import deepspeed
import torch

import ds_compress  # noqa: F401  (hooks the engine)
from tests.support.pipeline import MICRO_BATCHES, batches, build, ds_config, layers

FAULTY_STEP = 2
LONG = 12.0  # seconds, more than the time-out of these runs and all grace


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def crash():
    raise ValueError("a mistake in the model")


ACTIONS = {"kill": kill, "stop": stop, "crash": crash}
PLACES = {
    "reduce": "allreduce_gradients",
    "loss": "_aggregate_total_loss",
    "save": "_save_checkpoint",
    "load": "_load_checkpoint",
}


def in_forward(engine, action):
    """`action` in the middle of a step, in the forward pass of a micro-batch."""
    calls = 0

    def hook(*_):
        nonlocal calls
        calls += 1
        if calls == FAULTY_STEP * MICRO_BATCHES + 3:
            action()

    engine.module.forward_funcs[0].register_forward_pre_hook(hook)


def before(engine, method, action):
    """Before this rank calls `method` of the engine in a step."""
    original, calls = getattr(engine, method), 0

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == FAULTY_STEP + 1:
            action()
        return original(*args, **kwargs)

    setattr(engine, method, call)


def work_on(engine):
    """In the last step, when nobody is needed for it any more."""
    original, calls = engine._aggregate_total_loss, 0

    def call():
        nonlocal calls
        calls += 1
        loss = original()
        if calls == FAULTY_STEP + 2:
            time.sleep(LONG)
        return loss

    engine._aggregate_total_loss = call


def flip_bits(engine, action, byte):
    """Damage one packet that this rank sends."""
    end = next(end for end in engine.ds_compress.stage.ends if end.sends)
    send, calls = end.link.send, 0

    def damaged(packet):
        nonlocal calls
        calls += 1
        if calls == FAULTY_STEP * MICRO_BATCHES + 3:
            packet[byte] ^= 0x10
            action()
        send(packet)

    end.link.send = damaged


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", required=True)
    parser.add_argument("--at", type=int, required=True, help="rank")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--block", type=json.loads, required=True)
    parser.add_argument("--moment", type=Path, required=True, help="file for the time at which it happens")
    args = parser.parse_args()

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    block = args.block

    def cut():
        while not args.moment.with_name("cut").exists():
            time.sleep(0.01)

    def happens(action=lambda: None):
        def run():
            # complete when it is seen
            args.moment.with_name("now").write_text(str(time.time()))
            args.moment.with_name("now").rename(args.moment)
            action()

        return run

    here = rank == args.at
    if here and args.fault == "mismatch":
        block = {**block, "seed": 5}
        happens()()
    replicas = torch.distributed.get_world_size() // args.stages
    engine = build(args.stages, ds_config(block, replicas=replicas), layers(2 * args.stages))
    what, _, where = args.fault.partition("-")
    action = {**ACTIONS, "cut": cut}.get(what)
    if here and action and where:
        before(engine, PLACES[where], happens(action))
    elif here and action:
        in_forward(engine, happens(action))
    if here and args.fault in ("body", "header"):
        flip_bits(engine, happens(), 40 if args.fault == "body" else 9)
    if not here and args.fault == "early":
        work_on(engine)
    data = batches(engine.grid.get_data_parallel_id())
    for _ in range(FAULTY_STEP + 2):
        engine.train_batch(data)
        if where in ("save", "load"):
            engine.save_checkpoint(args.moment.parent / "checkpoints")
        if where == "load":
            engine.load_checkpoint(args.moment.parent / "checkpoints")
    if args.fault == "early":
        if here:
            happens()()
        return
    print("trained to the end", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
