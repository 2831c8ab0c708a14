"""Declarations of C functions, whose arguments are checked here: in C a mistake would damage the heap.

C gets one struct, whose members are the arguments in their order, of 8 bytes each (calls.h), and a number of
threads. It is packed by `struct`: to convert each argument by ctypes at every call would take longer than the
work on a small message.
"""

import ctypes
import functools
import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ds_compress.kernels import library
from ds_compress.kernels.memory import retain_freed_memory

SIZE = range(1 << 62)
NUMBER = range(-(1 << 63), 1 << 63)
FLAG = range(2)
WORD = range(-(1 << 31), 1 << 31)
FLOATS = (torch.float32, torch.bfloat16)
"""The floats that C++ computes with."""
PART = 1 << 20
"""Entries of the largest buffer that are worth one more thread; docs/speed.md has measurements."""


@dataclass(frozen=True)
class Buffer:
    """An argument that is a contiguous CPU tensor; the function gets its address."""

    dtypes: tuple[torch.dtype, ...]
    """Its possible dtypes; the argument `dtype_from`, if any, is the index of the one that it has."""

    dims: tuple[str | int, ...]
    """Numbers and names of integer arguments: their product over `per`, rounded up, is the least size."""

    dtype_from: str | None = None
    per: int = 1

    optional: bool = False
    """Whether `bind` takes None for it."""


Kind = Buffer | range | type[float]


class Function:
    """A C function that returns int64_t."""

    def __init__(self, source: str, name: str, /, **arguments: Kind):
        """
        Args:
            source: of the kernels, for messages.
            arguments: in the order of C; for an integer the range that is allowed.
        """
        self.source, self.name, self.arguments = source, name, arguments
        # most messages have the shape of the one before; typed: 1.0 is no integer, though it equals one
        self.bind = functools.lru_cache(typed=True)(lambda **known: Call(self, known))
        """Returns a call with arguments that are checked now and not again, by name: those that the sizes and
        dtypes of buffers follow from, and any others.

        Raises:
            TypeError: an argument of another kind, dtype or device, unknown or missing.
            ValueError: a buffer that is too small or not contiguous, an integer out of its range.
        """


_CODES = {range: "q", Buffer: "Q", type: "d"}
"""The codes of integers, addresses and floats in `struct`."""


class Call:
    """A function with known arguments that have been checked; a message has only its own memory checked."""

    def __init__(self, function: Function, known: dict[str, Any]):
        kinds = function.arguments
        self._function, self._known = function, known  # with the tensors, whose memory must stay
        needed = {name for kind in kinds.values() for name in _needs(kind)}
        if not needed <= known.keys() <= kinds.keys():
            expected = f"at least {sorted(needed)}, and others of {[*kinds]}"
            raise TypeError(f"{function.name}: {[*known]} came, expected {expected}")
        words: dict[str, Any] = dict.fromkeys(kinds, 0)
        # sizes follow from integers, which come first
        for name in sorted(known, key=lambda name: isinstance(kinds[name], Buffer)):
            absent = known[name] is None and getattr(kinds[name], "optional", False)
            words[name] = 0 if absent else self._word(name, known[name])
        self._words = [*words.values()]
        self._pack = struct.Struct("".join(_CODES[type(kind)] for kind in kinds.values())).pack
        sizes = {name: self._size(kind) for name, kind in kinds.items()}
        self._open = [(index, name, *sizes[name]) for index, name in enumerate(kinds) if name not in known]
        most = max(least for _, least in sizes.values())
        self._parts = most // PART
        self._entry: tuple[Any, Any] = 0, None  # a library and what it has of that name
        retain_freed_memory(most * torch.float32.itemsize)  # callers allocate that for each message

    def __call__(self, *values: Any) -> int:
        """Call it with the other arguments, in the order of C.

        Raises:
            TypeError, ValueError: see `Function.bind`.
        """
        if len(values) != len(self._open):
            expected = [name for _, name, *_ in self._open]
            raise TypeError(f"{self._function.name}: {len(values)} arguments came, expected {expected}")
        words = self._words.copy()
        for value, (index, name, dtype, least) in zip(values, self._open):
            if (  # in one expression, as every message comes by several times
                isinstance(value, Tensor)
                and value.dtype is dtype
                and value.is_cpu
                and value.is_contiguous()
                and value.numel() >= least
            ):
                words[index] = value.data_ptr()
            else:
                words[index] = self._word(name, value)
        loaded, (known, entry) = library.load(), self._entry
        if loaded is not known:
            entry = getattr(loaded, self._function.name)
            entry.restype = ctypes.c_int64
            self._entry = loaded, entry  # in one go, as other threads may be here
        threads = min(torch.get_num_threads(), self._parts) if self._parts > 1 else 1
        return entry(self._pack(*words), threads)

    def _word(self, name: str, value: Any) -> Any:
        """Return the word that stands for `value`."""
        kind = self._function.arguments[name]
        if isinstance(kind, range):
            if not isinstance(value, int):
                self._refuse(TypeError, name, f"{value!r} came, expected an integer")
            if value not in kind:
                self._refuse(ValueError, name, f"{value} came, expected an integer in {kind}")
            return value
        if not isinstance(kind, Buffer):
            if not isinstance(value, (int, float)):
                self._refuse(TypeError, name, f"{type(value).__name__} came, expected a number")
            return value
        if not isinstance(value, Tensor):
            self._refuse(TypeError, name, f"{type(value).__name__} came, expected a tensor")
        dtype, least = self._size(kind)
        if value.dtype != dtype or value.device.type != "cpu":
            self._refuse(
                TypeError, name, f"{value.dtype} on {value.device} came, expected {dtype} on the CPU"
            )
        if not value.is_contiguous():
            came = f"shape {[*value.shape]} with strides {value.stride()} came"
            self._refuse(ValueError, name, f"{came}, expected contiguous")
        if value.numel() < least:
            self._refuse(ValueError, name, f"{value.numel()} entries came, expected {least}")
        return value.data_ptr()

    def _refuse(self, error: type[Exception], argument: str, reason: str) -> NoReturn:
        raise error(f"{self._function.source}.{self._function.name}: {argument}: {reason}")

    def _size(self, kind: Kind) -> tuple[torch.dtype | None, int]:
        """Return the dtype and the least entries of a buffer; of another argument None and 0."""
        if not isinstance(kind, Buffer):
            return None, 0
        numel = math.prod(self._known[dim] if isinstance(dim, str) else dim for dim in kind.dims)
        return kind.dtypes[self._known[kind.dtype_from] if kind.dtype_from else 0], -(-numel // kind.per)


def _needs(kind: Kind) -> set[str]:
    """Return the arguments that the size and dtype of `kind` follow from."""
    if not isinstance(kind, Buffer):
        return set()
    return {name for name in (*kind.dims, kind.dtype_from) if isinstance(name, str)}
