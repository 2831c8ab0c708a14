"""Measure what a message costs beside DeepSpeed's own work: codec `none`, eager link, 2 stages on one
machine.

    deepspeed --num_gpus 2 launch/bench/overhead.py [--kib 16] [--rounds 40]

Two engines with the same layers, one with the key and one without, take steps in turn. The difference of
their processor times, shared out over the messages that a rank sends and receives in a step, is what is
printed: the median over the rounds, so that a machine that gets slower or faster does not count. Waiting
takes no processor time; the steps of stock DeepSpeed wait more.
"""

import argparse
import os
import statistics
import time

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

WARM_UP = 5  # rounds
BLOCKS = {"DeepSpeed": None, "none": {}, "quantize 4 bits": {"codec": {"name": "quantize", "bits": 4}}}


class Scale(nn.Module):
    """A layer that does almost no work."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1, dtype=torch.float32))

    def forward(self, x):
        return x * self.factor


def build(block, micro_batches):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-6}},
        "steps_per_print": 1000000,
    }
    if block is not None:
        config["ds_compress"] = {"forward": block, "backward": block, "min_numel": 0, "monitor": {"every": 0}}
    model = PipelineModule(
        [LayerSpec(Scale), LayerSpec(Scale)],
        num_stages=2,
        loss_fn=lambda output, target: output.mean(),
        partition_method="uniform",
    )
    return deepspeed.initialize(config=config, model=model, model_parameters=model.parameters())[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kib", type=int, default=16, help="of a message (default 16)")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    engines = {name: build(block, args.micro_batches) for name, block in BLOCKS.items()}
    batch = torch.ones(1, 256 * args.kib, dtype=torch.float32), torch.zeros(1, dtype=torch.float32)
    times = {name: [] for name in engines}
    for _ in range(WARM_UP + args.rounds):
        for name, engine in engines.items():
            dist.barrier()
            started = time.process_time()
            engine.train_batch(iter([batch] * args.micro_batches))
            times[name].append(time.process_time() - started)
    messages = 2 * args.micro_batches
    for name in list(engines)[1:]:
        pairs = zip(times[name][WARM_UP:], times["DeepSpeed"][WARM_UP:])
        extra = statistics.median(mine - stock for mine, stock in pairs) / messages
        print(
            f"rank {dist.get_rank()}: {name}: {1e6 * extra:+.0f} us a message of {args.kib} KiB", flush=True
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
