"""Argument types that several subcommands take."""

import argparse

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shape(text: str) -> tuple[int, ...]:
    """`4,1024,768` as a tuple."""
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape like 4,1024,768")
    return sizes
