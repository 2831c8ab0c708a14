"""Whether a backend can serve a device: each family of its kernels is tried, before training relies on one.

Kernels are compiled when they are first launched, and may fail to for reasons of their own: without a trial
the one that entropy coding needs would stop the run at its first message.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ds_compress.kernels import reference
from ds_compress.kernels.entropy.format import frame_of
from ds_compress.kernels.memory import is_out_of_memory
from ds_compress.kernels.quantize.grid import Grid

LONG = 40_000
"""Entries of a row that is long enough to be sampled."""

CPU = torch.device("cpu")
"""Where plain torch says what the bits should be."""


def check(backend: ModuleType, device: torch.device) -> None:
    """Let every family of `backend` do something small on `device`; the host waits for it.

    Raises:
        RuntimeError: a family failed, or gave other bits than plain torch; it is named.
        Exception: memory is used up, which says nothing of the backend.
    """
    for name, attempt in FAMILIES.items():
        try:
            ours = attempt(backend, device)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RuntimeError(f"{name}: {reason}") from error
        if not all(map(_equal, ours, attempt(reference, CPU))):
            raise RuntimeError(f"{name}: other bits than plain torch's")


def _quantization(by: ModuleType, device: torch.device) -> tuple[Tensor, ...]:
    groups, grid = _values(40 * 128, torch.float32, device).view(40, 128), Grid(4, hadamard=True)
    parts = by.quantize(groups, grid)
    return (*parts, by.dequantize(parts, grid))


def _feedback(by: ModuleType, device: torch.device) -> tuple[Tensor, ...]:
    groups = _values(40 * 128, torch.float32, device).view(40, 128)
    parts, state = by.quantize_with_residual(groups, (groups.flip(0),), 3.0, 0.0, 1.0, Grid(4), 128)
    return *parts, *state


def _selection(by: ModuleType, device: torch.device) -> tuple[Tensor, ...]:
    x, k = _values(LONG, torch.bfloat16, device), LONG // 10
    found = []
    for held, _ in (by.exact(x.view(1, -1), k), by.banded(x.view(1, -1), (0x4300, 0x4380), k)):
        bits = held if held.dtype == torch.uint8 else by.set_bits(held, LONG)
        kept = by.gather(x, bits, k)
        found += [bits, kept, by.scatter(kept, bits, (LONG,))]
    return tuple(found)


def _bit_strings(by: ModuleType, device: torch.device) -> tuple[Tensor, ...]:
    packed = by.pack_bits(_values(LONG, torch.float32, device) >= 0)
    return packed, by.unpack_bits(packed, LONG), by.list_bits(packed, LONG, 100)


def _entropy_coding(by: ModuleType, device: torch.device) -> tuple[Tensor, ...]:
    frame = frame_of(LONG, 2.5)
    words = by.encode_entropy(_values(LONG, torch.float32, device), frame)
    return words, *by.decode_entropy(words, frame, torch.float32)


FAMILIES: dict[str, Callable[[ModuleType, torch.device], tuple[Tensor, ...]]] = {
    "quantization": _quantization,
    "feedback": _feedback,
    "bit strings": _bit_strings,
    "selection": _selection,
    "entropy coding": _entropy_coding,
}


def _values(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Both signs, and many ties."""
    numbers = torch.arange(count, dtype=torch.int64, device=CPU) * 7919 % 1021 - 510
    return numbers.to(dtype).to(device)


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs)
