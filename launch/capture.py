"""Capture the messages of any model: activations and gradients at the cuts of a sequence of layers.

    from launch.capture import capture
    messages = capture(layers, cuts=[2, 4], inputs=x, loss=lambda y: cross_entropy(y, labels))

    python launch/capture.py FILE ...      errors of codecs on files that `save` wrote

A message is a tensor [samples, ...]: the output of layer cut - 1, and the gradient of the loss by it.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ds_compress import config  # noqa: F401  (registers the codecs)
from ds_compress.cli.bench import size_and_error
from ds_compress.codec import build

CODECS: tuple[dict[str, object], ...] = (
    *({"name": "quantize", "bits": bits} for bits in (2, 3, 4)),
    *({"name": "quantize", "bits": bits, "hadamard": True} for bits in (2, 3, 4)),
)


def capture(
    layers: Sequence[nn.Module], cuts: Sequence[int], inputs: Tensor, loss: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The messages of one micro-batch, by "CUT.forward" and "CUT.backward"; gradients of the parameters are
    added to."""
    crossing, x = {}, inputs
    for number, layer in enumerate(layers):
        if number in cuts:
            x.retain_grad()
            crossing[number] = x
        x = layer(x)
    loss(x).backward()
    messages = {}
    for number, message in crossing.items():
        if message.grad is None:
            raise ValueError(f"cut {number}: the loss does not depend on what crosses it")
        messages[f"{number}.forward"] = message.detach().clone()
        messages[f"{number}.backward"] = message.grad.clone()
    return messages


def save(messages: dict[str, Tensor], file: Path) -> None:
    save_file({name: message.contiguous() for name, message in messages.items()}, file)


def errors(messages: dict[str, Tensor], codec: dict[str, object], direction: str) -> tuple[float, float]:
    """Bits per value, and token errors, means over the messages of `direction`."""
    rows = [size_and_error(build(codec), x) for name, x in messages.items() if name.endswith(direction)]
    return statistics.fmean(bits for bits, _ in rows), statistics.fmean(e.token_error for _, e in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        messages = load_file(file)
        table = Table(title=str(file))
        for title in ("codec", "bits", "forward", "backward"):
            table.add_column(title)
        for codec in CODECS:
            bits, forward = errors(messages, codec, "forward")
            backward = errors(messages, codec, "backward")[1]
            table.add_row(str(build(codec)), f"{bits:.3f}", f"{forward:.3f}", f"{backward:.3f}")
        Console().print(table)


if __name__ == "__main__":
    main()
