"""Run one rank of a pipeline; `launched.py` starts four through the deepspeed launcher."""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.pipe import PipelineModule

from ds_compress.config import DIRECTIONS
from launch.reproduce.run import Run, task_of
from launch.reproduce.settings import Block
from launch.reproduce.task import STAGES, Task


def ds_config(block: Block, task: Task, steps: int, out: Path) -> dict:
    """One micro-batch a step, no ZeRO, bytes written after the last step; no message of the guard's among
    those of training."""
    batch = len(next(task.epoch(0, 0))[0])
    block = {**block, "monitor": {"every": steps}, "guard": {"every": 0}}
    if "warmup_epochs" in block:  # DeepSpeed is given batches, and does not know how long an epoch is
        block["warmup_steps"] = block.pop("warmup_epochs") * task.steps_per_epoch
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": task.gradient_clipping,
        "steps_per_print": 10**9,
        "ds_compress": block,
        "csv_monitor": {"enabled": True, "output_path": str(out), "job_name": "csv"},
    }


def leave(engine: Any, out: Path) -> None:
    """Write this rank's weights, by their names in the whole model, its bytes, and the settings in force."""
    torch.save(engine.module.state_dict(), out / f"rank-{engine.global_rank}.pt")
    sent = {direction: {"raw": 0, "wire": 0} for direction in DIRECTIONS}
    for end in engine.ds_compress.stage.ends:
        own = sent[end.channel.direction]
        own["raw"] += end.channel.sent.raw_bytes
        own["wire"] += end.channel.sent.wire_bytes
    found = {"sent": sent, "adopted": engine.ds_compress.config.adopted}
    (out / f"rank-{engine.global_rank}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", nargs=4, required=True)
    parser.add_argument("--block", type=json.loads, required=True, help="of the run")
    parser.add_argument("--steps", type=int, required=True)
    for path in ("--data", "--results", "--out"):
        parser.add_argument(path, type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no pipeline calls it; needs a compiler
    deepspeed.init_distributed()
    preset, name, setting, seed = args.run
    run = Run(preset, name, setting, int(seed))
    task = task_of(preset, name, args.data, args.results / "cache")
    module = PipelineModule(task.stages(run.seed), STAGES, loss_fn=task.loss, partition_method="uniform")
    optimizer = task.optimizer([p for p in module.parameters() if p.requires_grad])
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=task.schedule(optimizer),
        config=ds_config(args.block, task, args.steps, args.out),
    )
    epochs = (task.epoch(run.seed, number) for number in itertools.count())
    data = itertools.chain.from_iterable(epochs)
    losses = [engine.train_batch(data).item() for _ in range(args.steps)]
    if engine.global_rank == 0:
        found = {"losses": losses, "samples": engine.global_samples}
        (args.out / "losses.json").write_text(json.dumps(found))
    leave(engine, args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
