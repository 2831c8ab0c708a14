"""C functions, and what each may be given: a mistake is an error here that would be a damaged heap there."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels import native

SIZE = range(1 << 62)
NUMBER = range(-(1 << 63), 1 << 63)
FLAG = range(2)
WORD = range(-(1 << 31), 1 << 31)
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""The floats that C++ takes and makes, by their name in it."""
INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Floats of so many bits as torch has them for C++, where they are unsigned."""


@dataclass(frozen=True)
class Buffer:
    """An argument that is contiguous memory of the CPU: a tensor, of which the function gets the address."""

    dtypes: tuple[torch.dtype, ...]
    """What it may hold: the one whose place among them the argument `by` is, or the only one."""

    dims: tuple[str | int, ...]
    """Numbers, and integer arguments by name, whose product over `per`, rounded up, is the least size."""

    by: str | None = None
    per: int = 1

    unless: str | None = None
    """The argument that is true where there may be None in its place."""


class Function:
    """A C function of a source, which takes addresses, int64_t and float and returns int64_t or nothing."""

    def __init__(self, source: str, name: str, /, **arguments: Buffer | range | type[float]):
        """`arguments`: in C's order; of integers the range that is allowed."""
        self.source, self.name, self.arguments = source, name, arguments
        kinds = {range: ctypes.c_int64, Buffer: ctypes.c_void_p, type: ctypes.c_float}
        self._integers = tuple((name, kind) for name, kind in arguments.items() if isinstance(kind, range))
        self._words = tuple(
            (name, kind if isinstance(kind, Buffer) else None) for name, kind in arguments.items()
        )
        self._types = [kinds[type(kind)] for kind in arguments.values()]

    def __call__(self, **arguments: Any) -> int:
        """
        Raises:
            TypeError: an argument of another kind, dtype or device.
            ValueError: a buffer that is too small or not contiguous, an integer out of its range.
        """
        if arguments.keys() != self.arguments.keys():
            raise TypeError(f"{self.name}: arguments {[*arguments]} came, expected {[*self.arguments]}")
        name, words = "", list[Any]()
        try:  # in one function, as every message comes by several times
            for name, allowed in self._integers:
                if not isinstance(arguments[name], int):
                    raise TypeError(f"{arguments[name]!r} came, expected an integer")
                if arguments[name] not in allowed:
                    raise ValueError(f"{arguments[name]} came, expected an integer in {allowed}")
            for name, buffer in self._words:
                value = arguments[name]
                if buffer is None or (value is None and buffer.unless and arguments[buffer.unless]):
                    words.append(value)
                    continue
                if not isinstance(value, Tensor):
                    raise TypeError(f"{type(value).__name__} came, expected a tensor")
                dtype = buffer.dtypes[arguments[buffer.by] if buffer.by else 0]
                if value.dtype != dtype or value.device.type != "cpu":
                    raise TypeError(f"{value.dtype} on {value.device} came, expected {dtype} on the CPU")
                if not value.is_contiguous():
                    raise ValueError(
                        f"shape {[*value.shape]} with strides {value.stride()} came, expected contiguous"
                    )
                numel = 1
                for dim in buffer.dims:
                    numel *= arguments[dim] if isinstance(dim, str) else dim
                if value.numel() < -(-numel // buffer.per):
                    raise ValueError(f"{value.numel()} entries came, expected {-(-numel // buffer.per)}")
                words.append(value.data_ptr())
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.source}.{self.name}: {name}: {error}") from None
        entry = getattr(native.library(self.source), self.name)
        if entry.argtypes is None:
            # in this order: another thread that sees the first calls with both
            entry.restype, entry.argtypes = ctypes.c_int64, self._types
        return entry(*words)
