"""Fine-tune a Transformers checkpoint as a pipeline, as train.json says (hf/settings.py):

    deepspeed --hostfile hosts --module ds_compress.hf.finetune train.json
    torchrun --nproc_per_node 2 -m ds_compress.hf.finetune train.json
    accelerate launch --use_deepspeed --num_processes 2 -m ds_compress.hf.finetune train.json

Started again, the run continues from its last complete checkpoint, with bit-identical losses.
"""

import argparse
import os
import sys
from pathlib import Path

from ds_compress.errors import CompressionError


def main(argv: list[str] | None = None) -> int:
    """Run this process's part.

    Returns:
        The exit code: 2 for input that is refused, in one line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ds_compress.hf.finetune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", type=Path, help="train.json")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    args = parser.parse_args(argv)
    try:
        _run(args.settings)
    except CompressionError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    return 0


def _run(path: Path) -> None:
    """Run with the settings in `path`."""
    try:
        import deepspeed
        from deepspeed import comm as dist
        from deepspeed.accelerator import get_accelerator

        from ds_compress.hf.collective import raised_on_all_ranks
        from ds_compress.hf.settings import read_settings
        from ds_compress.hf.training import FinetuneRun
    except ImportError as error:
        raise CompressionError(f'{error}; pip install "ds_compress[hf]"') from None
    # DeepSpeed would compile this extension, an all-reduce for inference on CPUs that no pipeline calls
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "LOCAL_RANK" not in os.environ:
        read_settings(path)
        raise CompressionError(
            "no launcher started this process: start it through deepspeed --module, torchrun -m, or "
            "accelerate launch --use_deepspeed -m"
        )
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    with raised_on_all_ranks():  # one machine may have no such file, or another
        settings = read_settings(path)
    FinetuneRun(settings).run()
    # Without an orderly end gloo's threads may abort a process that has already finished
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
