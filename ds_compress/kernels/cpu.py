"""Quantization on the CPU: `reference` compiled by torch.compile, equal to it bit for bit.

The reference writes the result of every operation to memory; fused, there are two passes over the input (the range of
each group, its codes) and one over the output. A setting (bits, group size, dtypes) is compiled once, for tensors of
any length, when its first large message comes. Without a C++ compiler, and for what is not worth compiling, the
reference runs in blocks that fit in the cache.
"""

import logging
import types
from collections.abc import Callable, Iterator
from functools import cache, reduce

import torch
from torch import Tensor

from ds_compress.kernels import reference
from ds_compress.kernels.bits import pack, packed_size, unpack
from ds_compress.kernels.grid import from_codes, minmax_grid, symmetric_grid, symmetric_offset, top_code
from ds_compress.kernels.hadamard import between_runs, inside_runs
from ds_compress.kernels.memory import keep_freed

logger = logging.getLogger(__name__)

COMPILED_NUMEL = 1 << 16
"""From so many values on a compiled kernel is used."""

COMPILED_GROUPS = (32, 64, 128, 256, 512)
"""Group sizes that are compiled: whole vectors, and few enough of them to be written out one by one."""

LANES = 32  # of the widest vector registers, in bf16
BLOCK = 1 << 18  # values that the reference takes at a time: what it makes of them stays in the cache
ROTATED_BLOCK = 1 << 19  # the same for the rotation, which is done by fewer operations


def quantize(
    groups: Tensor,
    bits: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    hadamard: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """See `reference.quantize`."""
    n, size = groups.shape
    if generator is not None or groups.numel() < COMPILED_NUMEL:
        return reference.quantize(groups, bits, symmetric, scale_dtype, hadamard, generator)
    keep_freed(groups.nbytes)
    groups = groups.detach()
    scales = [torch.empty(n, dtype=scale_dtype) for _ in range(1 if symmetric else 2)]
    out = (torch.empty(n, packed_size(size, bits), dtype=torch.uint8), *scales)
    one_bit_mean = symmetric and bits == 1  # a sum, and the compiler would choose its order
    if size not in COMPILED_GROUPS or groups.dtype == torch.float64 or one_bit_mean:
        _quantize_blocks(groups, out, bits, symmetric, scale_dtype, hadamard)
    elif not hadamard:
        _encoder(size, groups.dtype, bits, symmetric, scale_dtype)(groups, *out)
    else:
        rotate, encode = _rotator(size, groups.dtype), _encoder(size, torch.float32, bits, symmetric, scale_dtype)
        for block, *parts in _blocks(ROTATED_BLOCK // size, groups, *out):
            rotated = torch.empty(block.shape)
            rotate(block, rotated)
            encode(inside_runs(rotated), *parts)
    return out


def dequantize(
    packed: Tensor,
    step: Tensor,
    offset: Tensor | None,
    bits: int,
    hadamard: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See `reference.dequantize`."""
    n, size = packed.shape[0], packed.shape[1] * 8 // bits
    if n * size < COMPILED_NUMEL:
        return reference.dequantize(packed, step, offset, bits, hadamard, dtype)
    parts = (packed, step) if offset is None else (packed, step, offset)
    keep_freed(n * size * dtype.itemsize)
    values = torch.empty(n, size, dtype=dtype)
    if size not in COMPILED_GROUPS:
        _dequantize_blocks(parts, values, bits, hadamard)
    elif not hadamard:
        _decoder(size, dtype, bits, offset is None, step.dtype, rotated=False)(values, *parts)
    else:
        decode = _decoder(size, torch.float32, bits, offset is None, step.dtype, rotated=True)
        for block, *its_parts in _blocks(ROTATED_BLOCK // size, values, *parts):
            rotated = torch.empty(block.shape)
            decode(rotated, *its_parts)
            block.copy_(inside_runs(rotated))
    return values


def _blocks(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`tensors` of equal length, `rows` rows at a time."""
    return zip(*(tensor.split(max(1, rows)) for tensor in tensors))


def _quantize_blocks(groups: Tensor, out: tuple[Tensor, ...], *options) -> None:
    for block, *parts in _blocks(BLOCK // groups.shape[1], groups, *out):
        for part, result in zip(parts, reference.quantize(block, *options)):
            part.copy_(result)


def _dequantize_blocks(parts: tuple[Tensor, ...], values: Tensor, bits: int, hadamard: bool) -> None:
    for block, packed, step, *offset in _blocks(BLOCK // values.shape[1], values, *parts):
        block.copy_(reference.dequantize(packed, step, offset[0] if offset else None, bits, hadamard))


@cache
def _encoder(size: int, dtype: torch.dtype, bits: int, symmetric: bool, scale_dtype: torch.dtype) -> "Kernel":
    """Quantizes groups [n, size] of `dtype` to packed, step and offset."""

    def encode(groups: Tensor, packed: Tensor, *scales: Tensor) -> None:
        values = groups.float()
        if symmetric:
            step = symmetric_grid(_fold(torch.maximum, values.abs()).amax(1), bits, scale_dtype)
            offset = symmetric_offset(step, bits)
            scales[0].copy_(step)
        else:
            low, high = _fold(torch.minimum, values).amin(1), _fold(torch.maximum, values).amax(1)
            step, offset = minmax_grid(low, high, bits, scale_dtype)
            scales[0].copy_(step)
            scales[1].copy_(offset)
        step, offset = _stored(step).float(), _stored(offset).float()
        position = (values - offset[:, None]) / torch.where(step > 0, step, 1)[:, None] + 0.5
        # `to_codes` clamps before its cast, which comes to the same; integers take fewer instructions, having no nan
        codes = position.to(torch.int32).clamp(0, top_code(bits, symmetric))
        packed.copy_(pack(codes, bits).to(torch.uint8))

    def plain(groups: Tensor, *out: Tensor) -> None:
        _quantize_blocks(groups, out, bits, symmetric, scale_dtype)

    return Kernel(encode, plain)


@cache
def _decoder(
    size: int, dtype: torch.dtype, bits: int, symmetric: bool, scale_dtype: torch.dtype, rotated: bool
) -> "Kernel":
    """Turns packed, step and offset into values [n, size] of `dtype`, or their first half of a rotation."""

    def decode(values: Tensor, packed: Tensor, step: Tensor, *offset: Tensor) -> None:
        start = symmetric_offset(step, bits) if symmetric else offset[0]
        groups = from_codes(unpack(packed, bits), step, _stored(start))
        values.copy_(between_runs(groups) if rotated else groups)

    def plain(values: Tensor, *parts: Tensor) -> None:
        _dequantize_blocks(parts, values, bits, False)
        if rotated:
            values.copy_(between_runs(values))

    return Kernel(decode, plain)


@cache
def _rotator(size: int, dtype: torch.dtype) -> "Kernel":
    """Turns groups [n, size] of `dtype` into the first half of their rotation."""

    def rotate(groups: Tensor, rotated: Tensor) -> None:
        rotated.copy_(between_runs(groups.float()))

    return Kernel(rotate, rotate)


def _fold(operation: Callable[[Tensor, Tensor], Tensor], values: Tensor) -> Tensor:
    """[n, LANES]: `operation` over the vectors of each row, so that one reduction within a vector is left."""
    return reduce(operation, values.split(LANES, dim=1))


def _stored(scale: Tensor) -> Tensor:
    """`scale`, [n], to be read from memory: the compiler would compute it again for every vector of its group."""
    return scale.as_strided(scale.shape, (1,))


class Kernel:
    """A function of tensors of equal length n that fills some of them, compiled once for all n; or, for good when the
    compiler fails, the plain function in its place."""

    failed = False  # of the class: what one kernel meets, all meet

    def __init__(self, function: Callable[..., None], plain: Callable[..., None]):
        self._function = function
        self._plain = plain
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        # both are part of what a compiled function depends on
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            if self._compiled is None and not Kernel.failed:
                self._compile(tensors)
            (self._plain if Kernel.failed else self._compiled)(*tensors)

    def _compile(self, tensors: tuple[Tensor, ...]) -> None:
        try:
            import torch._dynamo
            import torch._inductor.config as inductor

            # torch.compile counts variants per code object and gives up, silently, at the eighth
            code = self._function.__code__.replace(co_name=f"{self._function.__name__}_{id(self)}")
            own = types.FunctionType(code, self._function.__globals__, code.co_name, None, self._function.__closure__)
            compiled = torch.compile(own, fullgraph=True)
            for tensor in tensors:
                torch._dynamo.mark_dynamic(tensor, 0)
            # worker processes for one small kernel cost more than it, and must not be forked from a training process;
            # the check of what the compiler can vectorise costs as much as the kernel itself, and this would fail too
            with inductor.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}):
                compiled(*tensors)
            self._compiled = compiled
        except Exception as error:
            Kernel.failed = True
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            logger.warning("quantize on the CPU runs uncompiled, about five times slower: %s", reason)
