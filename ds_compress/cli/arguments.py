"""Arguments that several subcommands take, and how a wrong one is refused: in one line."""

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ds_compress.errors import shown

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST_SHAPE = 2**40
"""Elements; PyTorch counts bytes in 64 bits."""


_RUN = 'was removed: "recipe": "auto" measures the model in its run'
_LAYOUTS = "was removed: train a few steps with each layout, and compare with `ds-compress report`"
OLD = {
    "--held-mb": "is now --activation-mb",
    "--hostfile": "was removed: deepspeed --hostfile FILE --num_gpus 1 --module ds_compress doctor",
    "--max-error": "was removed: use --quality",
    "--model": f"{_RUN}, and advise takes --forward-ms, or --finetune",
    "--probe": f"{_RUN}, and advise takes --forward-ms",
    "--replicas": _LAYOUTS,
    "--parameters": _LAYOUTS,
    "stage-times": f"{_RUN}, and prints compute times for advise",
}
"""Options and commands of earlier releases: what to use instead, where a command does not know them."""


class Parser(argparse.ArgumentParser):
    """Refuses bad arguments in one line, without the usage that `--help` shows."""

    def error(self, message: str) -> NoReturn:
        words = message.split()
        came = {word.strip("'").partition("=")[0] for word in words}
        found = [f"{old} {instead}" for old, instead in OLD.items() if old in came]
        self.exit(2, f"{self.prog}: {'; '.join([' '.join(words), *found])}\n")


def shape(text: str) -> tuple[int, ...]:
    """Parse `4,1024,768` to a tuple."""
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or math.prod(sizes) > LARGEST_SHAPE:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a shape like 4,1024,768, of at most {LARGEST_SHAPE:,} elements"
        )
    return sizes


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an argument that counts."""
    # int() takes 1_0, spaces, and digits of other scripts, too
    return number(least, most, lambda text: int(text) if text.isascii() and text.isdigit() else math.nan)


def number(least: float, most: float, kind: Callable[[str], Any] = float) -> Callable[[str], Any]:
    """Return the type of an argument that measures; `kind` reads its text."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # nan is not
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not allowed: should be {least:.15g} to {most:.15g}"
            )
        return value

    return parse


def numbers(least: float, most: float) -> Callable[[str], list[float]]:
    """Return the type of an argument like 16,16,18."""
    parse = number(least, most)
    return lambda text: [parse(part) for part in text.split(",")]


def device(text: str) -> torch.device:
    """Parse the name of the CPU, or of a GPU that is here."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    allowed = ["cpu", *(["cuda"] if gpus else []), *gpus]
    if text not in allowed:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not here; allowed: {', '.join(allowed)}")
    return torch.device(text)


def add_import(parser: Any) -> None:
    """Add `--import`, for commands that know codecs and feedbacks by name."""
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import a module, or a .py file, that registers codecs, feedbacks or policies of your own",
    )


def add_message(parser: Any, required: bool = True) -> None:
    """Add `--stages`, and `--shape` and `--dtype` of what they send."""
    parser.add_argument(
        "--stages", type=integer(1, 2**16), required=required, help="number of pipeline stages"
    )
    parser.add_argument(
        "--shape",
        type=shape,
        required=required,
        help="shape of the tensor between two stages, such as 4,1024,768",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of that tensor")
