"""Declarations of C functions, whose arguments are checked here: in C a mistake would damage the heap.

C gets two arrays of 64-bit words (calls.h). The first is made once: the arguments that are known beforehand
and the positions of the others. The second holds the others. Converting each argument by ctypes at every call
would take longer than the work on a small message.
"""

import ctypes
import functools
import math
import struct
from collections.abc import Mapping
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
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""The floats that C++ computes with, and their names in names of functions."""
SIZES = {torch.float16: "16", torch.bfloat16: "16", torch.float32: "32", torch.float64: "64"}
"""Floats that C++ only moves, by the number of their bits in names of functions."""
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

    optional_if: str | None = None
    """The argument that is true if None is allowed instead of a tensor."""


Kind = Buffer | range | type[float]


class Function:
    """A C function that takes addresses, int64_t and float and returns int64_t or nothing."""

    def __init__(self, source: str, name: str, parallel_dim: str | None = None, /, **arguments: Kind):
        """
        Args:
            parallel_dim: the integer argument that counts independent rows; the threads of torch share these.
                The results of all threads are combined by bitwise and.
            arguments: in the order of C; for an integer the range that is allowed.
        """
        self.source, self.name, self.parallel_dim, self.arguments = source, name, parallel_dim, arguments
        self._integers = [name for name, kind in arguments.items() if isinstance(kind, range)]
        self._others = [name for name, kind in arguments.items() if not isinstance(kind, range)]
        # most messages have the shape of the one before; typed: 1.0 is no integer, though it equals one
        self.bind = functools.lru_cache(typed=True)(lambda **known: Call(self, known))
        """Returns a call with arguments that are checked now and not again, by name: those that the sizes and
        dtypes of buffers follow from, and any others. Raises what `__call__` does."""

    def check_types(self, loaded: ctypes.CDLL | None) -> None:
        """Compare the declared arguments with those of the function in a library.

        Raises:
            RuntimeError: they differ: the library was compiled from other sources.
        """
        types = getattr(loaded, f"{self.name}_types")
        types.restype = ctypes.c_char_p
        codes = types().decode()
        kinds = self.arguments.values()
        if len(codes) != len(kinds) or not all(map(_has_type, kinds, codes)):
            raise RuntimeError(
                f"{self.name}: the compiled function takes {codes}, which is not what is declared in Python; "
                "compile the kernels again: `python setup.py build_ext --inplace`"
            )

    def __call__(self, **arguments: Any) -> int:
        """Check all arguments and call the function.

        Raises:
            TypeError: an argument of another kind, dtype or device.
            ValueError: a buffer that is too small or not contiguous, an integer out of its range.
        """
        if arguments.keys() != self.arguments.keys():
            raise TypeError(f"{self.name}: arguments {[*arguments]} came, expected {[*self.arguments]}")
        call = self.bind(**{name: arguments[name] for name in self._integers})
        return call(*[arguments[name] for name in self._others])


def for_each_dtype(
    source: str,
    name: str,
    dtypes: Mapping[torch.dtype, str],
    parallel_dim: str | None = None,
    /,
    **arguments: Kind | tuple[str | int, ...],
) -> dict[torch.dtype, Function]:
    """Declare a C function for each dtype.

    Args:
        name: of the functions, without the suffix for the dtype.
        dtypes: suffix of the function's name for each dtype.
        arguments: see `Function`; the dimensions alone of a buffer of the dtype.
    """

    def of(dtype: torch.dtype) -> dict[str, Kind]:
        return {
            k: Buffer((dtype,), kind) if isinstance(kind, tuple) else kind for k, kind in arguments.items()
        }

    return {
        dtype: Function(source, name + suffix, parallel_dim, **of(dtype)) for dtype, suffix in dtypes.items()
    }


_WORDS = {range: "q", Buffer: "Q", type: "d"}
"""The codes of integers, addresses and floats in `struct`."""


def _has_type(kind: Kind, code: str) -> bool:
    """Return whether C's type `code` (`type_code` in calls.h) is that of an argument of `kind`."""
    if isinstance(kind, Buffer) and code.isdigit():
        return all(dtype.itemsize == int(code) for dtype in kind.dtypes)
    return code == _WORDS[type(kind)]


class Call:
    """A function with known arguments that have been checked; a message has only its own memory checked."""

    def __init__(self, function: Function, known: dict[str, Any]):
        self._source, self._name = function.source, function.name
        self._check_types = function.check_types
        self._known = known  # with the tensors, whose memory must stay
        self._kinds = [*function.arguments.items()]
        needed = {name for kind in function.arguments.values() for name in _needs(kind)}
        if not needed <= known.keys() <= function.arguments.keys():
            expected = f"at least {sorted(needed)}, and others of {[*function.arguments]}"
            raise TypeError(f"{function.name}: {[*known]} came, expected {expected}")
        words: list[Any] = [0] * len(self._kinds)
        self._left: list[tuple[int, torch.dtype | None, int, bool]] = []
        indices = sorted(range(len(self._kinds)), key=lambda index: isinstance(self._kinds[index][1], Buffer))
        for index in indices:  # integers first, which sizes follow from
            name, kind = self._kinds[index]
            asked: tuple[int, torch.dtype | None, int, bool] = index, None, 0, False
            if isinstance(kind, Buffer):
                asked = (
                    index,
                    self._dtype(kind),
                    self._least(kind),
                    bool(kind.optional_if and known[kind.optional_if]),
                )
            if name in known:
                words[index] = self._word(known[name], *asked)
            else:
                self._left.append(asked)
        self._left.sort(key=lambda asked: asked[0])
        self._dtypes, self._leasts = [asked[1] for asked in self._left], [asked[2] for asked in self._left]
        types = [_WORDS[type(kind)] for _, kind in self._kinds]
        given = [asked[0] for asked in self._left]
        self._fixed = struct.pack(f"={1 + len(given)}q{''.join(types)}", len(given), *given, *words)
        self._pack = struct.Struct("=" + "".join(types[index] for index in given)).pack
        self._moves, self._parts = self._shared_out(function.parallel_dim)
        self._entry: tuple[Any, Any] = 0, None  # a library and what it has of that name
        most = max((self._least(kind) for _, kind in self._kinds if isinstance(kind, Buffer)), default=0)
        retain_freed_memory(most * torch.float32.itemsize)  # callers allocate that for each message

    def __call__(self, *values: Any, threads: int | None = None) -> int:
        """Call it with the other arguments, in the order of C.

        Args:
            threads: the largest number of threads; None for that of torch.

        Raises:
            TypeError, ValueError: see `Function`.
        """
        if len(values) != len(self._dtypes):
            expected = [self._kinds[asked[0]][0] for asked in self._left]
            raise TypeError(f"{self._name}: {len(values)} arguments came, expected {expected}")
        words = []
        for value, dtype, least in zip(values, self._dtypes, self._leasts):
            if (  # in one expression, as every message comes by several times
                isinstance(value, Tensor)
                and value.dtype is dtype
                and value.is_cpu
                and value.is_contiguous()
                and value.numel() >= least
            ):
                words.append(value.data_ptr())
            else:
                words.append(self._word(value, *self._left[len(words)]))
        loaded, (known, entry) = library.load(), self._entry
        if loaded is not known:
            self._check_types(loaded)
            entry = getattr(loaded, f"{self._name}_{'in_parts' if self._parts > 1 else 'by_words'}")
            entry.restype = ctypes.c_int64
            self._entry = loaded, entry  # in one go, as other threads may be here
        if self._parts > 1:
            most = min(threads or torch.get_num_threads(), self._parts)
            return entry(self._fixed, self._pack(*words), self._moves, ctypes.c_int64(most))
        return entry(self._fixed, self._pack(*words))

    def _shared_out(self, parallel_dim: str | None) -> tuple[bytes, int]:
        """Plan the parts that threads work on.

        Returns:
            For C: the position of the number of rows, the rows that a part is a multiple of, and the
            bytes by which so many rows advance each argument; and the largest number of parts.
        """
        if parallel_dim is None:
            return b"", 1
        rows = self._known[parallel_dim]
        buffers = [kind for _, kind in self._kinds if isinstance(kind, Buffer) and parallel_dim in kind.dims]
        largest = max(self._least(kind) for kind in buffers)
        row = {
            kind: self._least(kind, **{parallel_dim: kind.per}) for kind in buffers
        }  # entries of so many rows
        unit = math.lcm(64, *(kind.per // math.gcd(kind.per, row[kind]) for kind in buffers))
        moves = [
            row[kind] * unit // kind.per * self._dtype(kind).itemsize if kind in row else 0
            for _, kind in self._kinds
        ]
        index = [name for name, _ in self._kinds].index(parallel_dim)
        parts = min(largest // PART, -(-rows // unit))
        return struct.pack(f"={2 + len(moves)}q", index, unit, *moves), max(1, parts)

    def _word(self, value: Any, index: int, dtype: torch.dtype | None, least: int, optional: bool) -> Any:
        """Return the word that stands for `value`."""
        name, kind = self._kinds[index]
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
        if value is None and optional:
            return 0
        if not isinstance(value, Tensor):
            self._refuse(TypeError, name, f"{type(value).__name__} came, expected a tensor")
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
        raise error(f"{self._source}.{self._name}: {argument}: {reason}")

    def _dtype(self, buffer: Buffer) -> torch.dtype:
        return buffer.dtypes[self._known[buffer.dtype_from] if buffer.dtype_from else 0]

    def _least(self, buffer: Buffer, **instead: int) -> int:
        numel, known = 1, {**self._known, **instead}
        for dim in buffer.dims:
            numel *= known[dim] if isinstance(dim, str) else dim
        return -(-numel // buffer.per)


def _needs(kind: Kind) -> set[str]:
    """Return the arguments that the size and dtype of `kind`, and whether it is optional, follow from."""
    if not isinstance(kind, Buffer):
        return set()
    return {name for name in (*kind.dims, kind.dtype_from, kind.optional_if) if isinstance(name, str)}
