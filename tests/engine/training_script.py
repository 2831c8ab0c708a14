"""A training script as a user has it, nothing of ds_compress in it; test_launcher.py runs it."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import deepspeed
import torch

from tests.support.pipeline import batches, build

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--config", type=Path)
args = parser.parse_args()

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
rank = torch.distributed.get_rank()
engine = build(torch.distributed.get_world_size(), json.loads(args.config.read_text()))
print(f"rank {rank} engine {type(engine).__module__}.{type(engine).__name__}", flush=True)
data = batches()
for _ in range(3):
    loss = engine.train_batch(data).item()
print(f"rank {rank} trained, loss {loss}", flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
