"""Which kernels run on a device: one table of functions per backend, and one override.

`reference` is plain PyTorch: it specifies every operation and runs on any device. `cpu` is C++ and numpy,
`triton` is for GPUs. Each algorithm has a folder with a file of that name per backend; the operations in its
`__all__` are registered. An operation that a backend lacks is that of the reference. All backends give the
same bits, except of products. These are all operations; their docstrings in reference.py say more. n is any
size, a message is fp32, bf16, fp16 or fp64, a key has 64 bits, a finite flag is a bool of one element.

quantize: groups of G values, G a multiple of 8; parts are packed codes, uint8 [n, G * bits / 8], steps and
offsets, bf16 [n], in units of the values

    quantize(groups, grid, dither, out, size)          [n, G], or any shape if `size` is G; dither: a key
                                                       -> parts, in the memory `out` if that is given
    dequantize(parts, grid, dtype, shape, dither)      -> [n, G] or `shape`, of `dtype` fp32 or bf16

feedback: a state is fp32, bf16, or int8 codes of its shape and fp32 scales [numel / 128]; scale is the loss
scale, by which messages are larger than states

    quantize_with_residual(values, residual, scale, residual_decay, error_weight, grid, size, out)
                                                       fp32 or bf16 [n * G] -> parts, next residual
    quantize_change(values, state, scale, grid, size, out)       -> parts, next state
    dequantize_change(parts, state, scale, grid, dtype)          -> values of state's shape, next state
    delta(x, state, factor)                            -> x - factor * state in x's dtype
    add_residual(x, residual, factor, finite)          -> x + factor * residual in x's dtype
    update_residual(x, residual, sent, scale, residual_decay, error_weight)
                                                       -> next residual, flag: it can be kept
    choose(condition, first, second)                   flag, two of a shape -> one of them

topk: entries are int64 indices [count] or bits, uint8 [numel / 8], lowest first; counts are in entries

    select_largest(x, k, values)                       [rows, d] -> entries of the k largest of each row,
                                                       their values [rows * k], in memory `values` if given
    gather(x, entries, count)                          -> [count], nan if x is not finite
    scatter(values, entries, shape)                    [count] -> `shape`, else zeros
    pack_bits(bits)                                    bool [n] -> uint8 [n / 8]
    unpack_bits(packed, numel)                         -> bool [numel]
    list_bits(packed, numel, count)                    -> int64 [count], ascending

entropy: words are int16 [frame.words], frame a `CodeLayout`, tolerance and shifts in octaves

    encode_entropy(x, frame, dither, tolerance)        [frame.numel], or [rows, width], whose rows are shifted
                                                       -> words, shifts int8 [rows]
    decode_entropy(words, frame, dtype, dither, shifts)
                                                       -> [frame.numel] of fp32 or bf16, flag: a possible code

directions: a product of fp32 [rank, width] and coefficients, int8 [rows, rank] in units of 2^exponents, int8
[rows]; backends round its sums differently

    subtract_product(m, dual, basis)                   [rows, width] -> rest, codes, exponents
    add_product(rest, codes, exponents, basis)         rest + codes * basis, in place
    project(m, onto)                                   [rows, width], twice -> lengths along rows, fp32 [rows]
    set_projection(m, onto, lengths)                   m with such lengths, in place; not finite: as it is
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_compress.kernels import library
from ds_compress.kernels.entropy.format import frame_of
from ds_compress.kernels.memory import is_out_of_memory
from ds_compress.kernels.quantize.grid import Grid

logger = logging.getLogger(__name__)

ALGORITHMS = ("quantize", "feedback", "topk", "entropy", "directions")
ON_GPU = ("quantize", "feedback", "entropy")
"""Those with kernels in Triton; the others run in PyTorch on a GPU."""

CPU_DEVICE = torch.device("cpu")


class Backend:
    """Functions by the name of their operation, as attributes."""

    def __init__(self, name: str, functions: Mapping[str, Callable[..., Any]]):
        self.name, self.functions = name, dict(functions)
        vars(self).update(functions)

    if TYPE_CHECKING:

        def __getattr__(self, operation: str) -> Any: ...


def load(name: str, algorithms: tuple[str, ...] = ALGORITHMS) -> Backend:
    """Import the files `name`.py of `algorithms` and return the backend that their functions make up.

    Raises:
        ImportError: a file needs a package that is not installed.
    """
    functions = {} if name == "reference" else dict(reference.functions)
    for algorithm in algorithms:
        module = import_module(f"ds_compress.kernels.{algorithm}.{name}")
        functions |= {operation: getattr(module, operation) for operation in module.__all__}
    return Backend(name, functions)


reference = load("reference")
cpu = load("cpu")

_override: Backend | None = None


@cache  # every message asks: a known device costs no Python frame
def kernels(device: torch.device) -> Backend:
    """Return the backend for tensors on `device`."""
    return _override or (cpu if device.type == "cpu" else on_gpu(device) or reference)


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Use `backend` for all devices; for tests."""
    global _override
    _override, before = backend, _override
    kernels.cache_clear()
    try:
        yield
    finally:
        _override = before
        kernels.cache_clear()


@cache
def on_gpu(device: torch.device) -> Backend | None:
    """Return the backend of those Triton kernels that work on `device`, None if none does; each device is
    tested once, and one warning is logged."""
    if device.type != "cuda":
        return None
    working, reasons = list[str](), list[str]()
    for family, examples in FAMILIES.items():
        try:
            # an old Triton, or a missing C compiler, fails only at the first launch
            self_test(load("triton", family), device, examples)
            working += family
        except Exception as error:
            if is_out_of_memory(error):  # says nothing about Triton
                raise
            reasons.append((str(error).strip() or type(error).__name__).splitlines()[0])
    if not reasons:
        return load("triton", ON_GPU)
    others = f", but for {', '.join(working)}" if working else ""
    said = "; ".join(dict.fromkeys(reasons))
    logger.warning(
        f"ds_compress: Triton kernels are off on {device}{others}, PyTorch is used and slower: {said}"
    )
    # ranks with other kernels are told by the name
    name = f"triton for {', '.join(working)}"
    return Backend(name, load("triton", tuple(working)).functions) if working else None


def prepare() -> None:
    """Load the compiled kernels before the first message, or log a warning that there are none; a GPU needs
    none."""
    if not torch.cuda.is_initialized():
        library.load()


def self_test(backend: Backend, device: torch.device, examples: "Examples | None" = None) -> None:
    """Run one small example of each algorithm on `device`, or the given ones, and wait for it.

    Kernels are compiled at their first launch. Without this test a failure would stop training at its first
    message.

    Raises:
        RuntimeError: an algorithm failed, or gave other bits than the reference; the message names it.
        Exception: memory is used up.
    """
    for name, example in (examples or EXAMPLES).items():
        try:
            results = example(backend, device)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RuntimeError(f"{name}: {reason}") from error
        if not all(map(_is_same, results, example(reference, CPU_DEVICE))):
            raise RuntimeError(f"{name}: its bits differ from those of PyTorch")


def _quantize(backend: Backend, device: torch.device) -> tuple[Tensor, ...]:
    groups, grid = _values(40 * 128, device).view(40, 128), Grid(4, hadamard=True)
    parts = backend.quantize(groups, grid)
    return (*parts, backend.dequantize(parts, grid))


def _feedback(backend: Backend, device: torch.device) -> tuple[Tensor, ...]:
    groups = _values(40 * 128, device).view(40, 128)
    parts, state = backend.quantize_with_residual(groups, (groups.flip(0),), 3.0, 0.0, 1.0, Grid(4), 128)
    return *parts, *state


def _entropy(backend: Backend, device: torch.device) -> tuple[Tensor, ...]:
    values = _values(40_000, device)
    frame = frame_of(values.numel(), 2.5)
    words, _ = backend.encode_entropy(values, frame)
    return words, *backend.decode_entropy(words, frame, torch.float32)


Examples = Mapping[str, Callable[[Backend, torch.device], tuple[Tensor, ...]]]

FAMILIES: dict[tuple[str, ...], Examples] = {
    ("quantize", "feedback"): {"quantize": _quantize, "feedback": _feedback},
    ("entropy",): {"entropy coding": _entropy},
}
"""Algorithms whose kernels in Triton work together or not at all, with their examples. Triton before 3.3 does
not compile those of the first."""

EXAMPLES: Examples = {name: example for each in FAMILIES.values() for name, example in each.items()}


def _values(count: int, device: torch.device) -> Tensor:
    """Return fp32 numbers of both signs with many ties."""
    numbers = torch.arange(count, dtype=torch.int64, device=CPU_DEVICE) * 7919 % 1021 - 510
    return numbers.float().to(device)


def _is_same(result: Tensor, expected: Tensor) -> bool:
    return result.dtype == expected.dtype and torch.equal(result.cpu(), expected)
