"""Two ranks on processors of different capability, as far as one machine can play them.

python -m tests.support.unlike BLOCKS          one rank; started by `run`
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from launch.ports import reserved_port

OLDER = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
"""What makes torch and MKL compute as on a processor without vector instructions."""
STEPS = 12
MARK = "result: "


def run(*blocks, environments=({}, OLDER)):
    """What both ranks said to each block: hashes of what they mirror, or the error that stopped them."""
    common = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = []
    with reserved_port() as port:
        for rank, environment in enumerate(environments):
            own = {"MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.unlike", json.dumps(blocks)],
                    env={**os.environ, **common, **own},
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=Path(__file__).parents[2],
                )
            )
        said = [rank.communicate(timeout=240)[0].splitlines() for rank in ranks]
    return list(zip(*([line.partition(MARK)[2] for line in lines if MARK in line] for lines in said)))


def said_to(block):
    """What this rank says: hashes of what it mirrors after some steps, or the error that stopped it."""
    from ds_compress.errors import CompressionError
    from tests.feedback.test_feedback_pipeline import digests
    from tests.support.pipeline import batches, build, ds_config

    try:
        engine, data = build(2, ds_config(block)), batches()
        for _ in range(STEPS):
            engine.train_batch(data)
        return str(digests(engine))
    except CompressionError as error:
        return str(error)


def main():
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for block in json.loads(sys.argv[1]):
        print(MARK, said_to(block), sep="")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
