"""ds-compress merge: what ds_compress.hf.finetune trained, as an ordinary Transformers checkpoint."""

import argparse
from pathlib import Path

from ds_compress.cli.console import importing_deepspeed
from ds_compress.errors import CompressionError

HELP = "write a fine-tuned model as a Transformers checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help='folder of the run: "out" in its train.json')
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder to write to; it must be empty or not exist",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="merge the checkpoint with the lowest perplexity (default: the last one)",
    )


def run(args: argparse.Namespace) -> int:
    with importing_deepspeed():
        try:
            from ds_compress.hf.merge import merge
            from ds_compress.hf.run_folder import BEST, LATEST
        except ImportError as error:
            raise CompressionError(f'ds-compress merge: {error}; pip install "ds_compress[hf]"') from None
    merge(args.out, args.to, BEST if args.best else LATEST)
    print(f"wrote {args.to}")
    return 0
