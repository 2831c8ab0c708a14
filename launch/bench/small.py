"""Measure what a small message costs, and what a feedback adds to a large one: `make bench-small`.

Small: us of encode and decode through the channel, header and packet included, in fp32, 128 values a group.
Feedback: the speed of encode + decode of 3 MiB in fp32 beside each feedback, as a fraction of that of the
codec alone in the same rounds. One thread works, its own CPU time is the time; medians over the rounds, in
each of which everything is measured once.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ds_compress.cli.bench import benchmark_tensor
from ds_compress.codec import Context, TensorSpec, build
from ds_compress.config import Config
from ds_compress.feedback import FEEDBACKS
from ds_compress.kernels import library
from ds_compress.message.channel import Boundary

SMALL: tuple[dict[str, Any], ...] = (
    {"name": "none"},
    {"name": "quantize", "bits": 4},
    {"name": "quantize", "bits": 4, "hadamard": True},
    {"name": "fp8"},
    {"name": "topk"},
)
SHAPES = ((1, 32, 128), (1, 128, 256))  # 16 and 128 KiB
CALLS = 20  # in a row, of which one is told
LARGE = (3, 256, 1024)
FEEDBACK = ("none", "ef", "ef21", "loco")
CODECS = ({"name": "quantize", "bits": 4}, {"name": "quantize", "bits": 4, "hadamard": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    console.print(small(args.rounds))
    console.print(feedback(args.rounds))


def small(rounds: int) -> Table:
    title = f"us of encode + decode through the channel, fp32, {library.instruction_set()}"
    table = Table("codec", *(f"{list(shape)}" for shape in SHAPES), title=title)
    work = [call for codec in SMALL for shape in SHAPES for call in encode_and_decode_messages(codec, shape)]
    medians = iter([1e6 * seconds for seconds in measured(work, rounds, CALLS)])
    for codec in SMALL:
        table.add_row(name_of(codec), *(f"{next(medians):.1f} + {next(medians):.1f}" for _ in SHAPES))
    return table


def encode_and_decode_messages(codec: dict[str, Any], shape: tuple[int, ...]) -> list[Callable[[], object]]:
    """Return encode and decode of a one-tensor message, with a preallocated packet."""
    x = benchmark_tensor(shape, torch.float32, torch.device("cpu"))
    config = Config({"forward": {"codec": codec}, "min_numel": 0})
    sender, receiver = Boundary(0, config).forward, Boundary(0, config).forward
    message_id = sender.message_id(0, 0)
    packet, _, layout = sender.encode([x], message_id)
    return [
        lambda: sender.encode([x], message_id, lambda nbytes: packet),
        lambda: receiver.decode(packet, layout, message_id),
    ]


def feedback(rounds: int) -> Table:
    title = f"{list(LARGE)} fp32, {library.instruction_set()}: share of the speed without feedback"
    table = Table("codec", *FEEDBACK, title=title)
    work = [call for codec in CODECS for name in FEEDBACK for call in beside(codec, name)]
    medians = measured(work, rounds, 1)
    both = iter([encode + decode for encode, decode in zip(medians[::2], medians[1::2])])
    for codec in CODECS:
        alone, *others = (next(both) for _ in FEEDBACK)
        table.add_row(name_of(codec), f"{1e3 * alone:.3f} ms", *(f"{alone / each:.2f}" for each in others))
    return table


def beside(codec: dict[str, Any], name: str) -> list[Callable[[], object]]:
    """Return encode and decode of training messages by `codec` with feedback `name`."""
    x = benchmark_tensor(LARGE, torch.float32, torch.device("cpu"))
    both = FEEDBACKS.build(name, "feedback").wrap(build(codec))
    sender, receiver = Context(step=1), Context(step=1)
    parts, spec = both.encode(x, sender), TensorSpec.of(x)
    return [lambda: both.encode(x, sender), lambda: both.decode(parts, spec, receiver)]


def measured(work: list[Callable[[], object]], rounds: int, calls: int) -> list[float]:
    """Return the median seconds per call of each function of `work`."""
    for function in work:
        function()
    times = [[seconds(function, calls) for function in work] for _ in range(rounds)]
    return [*map(statistics.median, zip(*times))]


def seconds(function: Callable[[], object], calls: int) -> float:
    """Return the CPU seconds of one call, after a warm-up call that fills the caches."""
    function()
    start = time.thread_time()
    for _ in range(calls):
        function()
    return (time.thread_time() - start) / calls


def name_of(codec: dict[str, Any]) -> str:
    return f"{codec['name']}({', '.join(f'{key}={value}' for key, value in codec.items() if key != 'name')})"


if __name__ == "__main__":
    main()
