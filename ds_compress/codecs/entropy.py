"""Codec entropy: a uniform quantizer whose codes are entropy coded, at a constant size."""

import itertools
import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs import eigenbasis
from ds_compress.codecs.mixins import HardwareDependentDecode, ObservesWarmup, Stateful
from ds_compress.codecs.shapes import LARGEST_FACTOR, as_message, matrix_shape
from ds_compress.errors import CompressionError
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.entropy.format import (
    CLASSES,
    COARSER,
    LARGEST_NUMEL,
    RUN,
    CodeLayout,
    SortedBlocks,
    frame_of,
)
from ds_compress.kernels.numerics import saturate
from ds_compress.registry.options import Steps

MIN_SORTED_NUMEL = 2**12
"""Values from which a message has several tables."""

DITHERED_REACH = 2.0 ** (COARSER + 1)
"""Half of the coarsest step of a dithered message, as a multiple of its largest magnitude, at most."""

MIN_UNIT = RUN // 2
"""Values from which a unit is worth the 2 bits that tell its class."""


class EntropyBase(Codec):
    """One step and one table for the whole tensor; `options` are those of codec entropy."""

    name = "entropy"

    def layout(self, spec: TensorSpec) -> Layout:
        words = self._frame(spec).all_words if spec.numel else 0
        return (((words,), torch.int16),)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        if not x.numel():
            return (torch.empty(0, dtype=torch.int16, device=x.device),)
        frame, dither = self._frame(TensorSpec.of(x)), self._dither(ctx)
        return (kernels(x.device).encode_entropy(x.detach().reshape(-1), frame, dither),)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if not spec.numel:
            return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        return self._decode_words(parts[0], self._frame(spec), spec.dtype, ctx).view(spec.shape)

    def _decode_words(self, words: Tensor, frame: CodeLayout, dtype: torch.dtype, ctx: Context) -> Tensor:
        """Return the values, flat.

        Raises:
            CompressionError: `words` are not valid.
        """
        values, valid = kernels(words.device).decode_entropy(words, frame, dtype, self._dither(ctx))
        if valid.device.type == "cpu" and not valid:  # a GPU's values are nan then: the host does not wait
            raise CompressionError("entropy: a damaged code came, no message is coded like that")
        return values

    def _frame(self, spec: TensorSpec) -> CodeLayout:
        """Return the frame of a message of `spec`."""
        return frame_of(spec.numel, self.options.bits, dithered=self.unbiased)

    def _dither(self, ctx: Context) -> int | None:
        """Return the key of the dither, None for none."""
        return ctx.key("dither") if self.unbiased else None

    @property
    def unbiased(self) -> bool:
        return self.options.rounding == "dither"

    def error_bound(self, spec: TensorSpec) -> float:
        if self.unbiased:  # each value is half a step off at most, however coarse that is
            return DITHERED_REACH * math.sqrt(spec.numel)
        return 1.0  # values that need more bits than there are become zeros

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        # at high rates an ideal coder has 1.2 * 2^-rate; tables cost most in small messages
        frame = frame_of(max(spec.numel, 1), self.options.bits, dithered=self.unbiased)
        rate = 16 * frame.capacity / (frame.numel + 256)
        if self.unbiased:  # at low rates four classes say too little
            return 1.4 / math.sqrt(4**rate - 1) if rate >= 1 else max(1.0, rate**-1.6)
        return min(0.99, 1.3 * 2**-rate)

    def refuses(self, spec: TensorSpec) -> str:
        if spec.numel > LARGEST_NUMEL:
            return f"it has {spec.numel:,} values, allowed: {LARGEST_NUMEL:,}"
        return ""


@register("entropy")
class Entropy(EntropyBase):
    """One uniform step for the whole tensor, entropy coded: the finest one that fits in `bits` per value.

    The size is constant, the error varies. `ds_compress.kernels.entropy.format` draws the packet.
    """

    examples = (
        *({"bits": bits} for bits in (4, 3.3, 2.5, 1)),
        {"bits": 2, "rotate": "learned"},
        {"bits": 2, "contexts": "rows"},
        {"bits": 2, "contexts": "columns"},
        {"bits": 2, "rounding": "dither"},
        {"bits": 2, "rounding": "dither", "contexts": "rows"},
        {"bits": 2, "rounding": "dither", "rotate": "learned"},
    )

    class Options(CodecOptions):
        bits: float = Field(2.5, ge=0.1, le=6)
        """Size of the packet in bits per value, all included. Tensors of a few dozen values take 2 bytes each
        and 32 for all."""

        rounding: Literal["nearest", "dither"] = "nearest"
        """dither: add a random part of a step to each value before it is rounded, and subtract it when it is
        decoded. Both sides draw it, so it is not sent. The error does not depend on the values, and its mean
        is 0: for gradients of few bits, where a systematic error costs more than a larger random one.
        nearest, where small values become 0, has the smaller error."""

        rotate: Literal["none", "learned"] = "none"
        """learned: send the coefficients of each row in an eigenbasis of the rows. Coefficients of larger
        variance get more bits. Meant for the activations of a transformer. Both sides multiply each row of h
        values by an h x h matrix."""

        refresh_steps: Steps = 0
        """With "rotate": steps between updates of the basis, each from 16 messages; the first updates come
        after 1, 2, 4, ... steps. No warm-up is needed: rows are not rotated before the first update. 0: the
        basis of the warm-up stays."""

        contexts: Literal["none", "rows", "columns"] = "none"
        """Use four code tables instead of one. rows, for gradients: the table of a run of 64 values
        depends on its largest magnitude. columns, for activations: the same for each index of the last
        dimension (of images: of all dimensions but the first). The packet contains the choices. Small
        tensors use one table."""

        @model_validator(mode="after")
        def _refreshes_a_basis(self) -> "Entropy.Options":
            if self.contexts != "none" and self.rotate != "none":
                raise CompressionError(
                    f"contexts: {self.contexts!r} is not allowed where a basis gives them; allowed: 'none', "
                    'or "rotate": "none"'
                )
            if self.refresh_steps and self.rotate == "none":
                raise CompressionError(
                    f"refresh_steps: {self.refresh_steps} is not allowed without a basis; allowed: 0, or "
                    '"rotate": "learned"'
                )
            return self

    @classmethod
    def of(cls, options: Any) -> EntropyBase:
        if options.contexts != "none":
            return SortedContexts(options)
        return (EigenbasisEntropy if options.rotate != "none" else cls)(options)


class SortedContexts(EntropyBase):
    """With "contexts": runs or columns in four classes by falling magnitude, each with its own table.

    See `kernels.entropy.format`.
    """

    def _frame(self, spec: TensorSpec) -> CodeLayout:
        units = self._units(spec)
        return frame_of(spec.numel, self.options.bits, dithered=self.unbiased, units=units)

    def _units(self, spec: TensorSpec) -> SortedBlocks | None:
        """Return the units of a tensor of `spec`, None if their classes would take too many of its words."""
        columns = self.options.contexts == "columns"
        if columns:
            shape = spec.shape
            if len(shape) >= 4:
                shape = (shape[0], spec.numel // max(1, shape[0]))
            size, count = matrix_shape(shape)
        else:
            count, size = spec.numel // RUN, RUN
        few = spec.numel < MIN_SORTED_NUMEL or size < MIN_UNIT or count < CLASSES
        return None if few else SortedBlocks(count, size, columns)


class EigenbasisEntropy(EntropyBase, Stateful, ObservesWarmup, HardwareDependentDecode):
    """With "rotate": one step for all coefficients in a basis of the rows, with tables by their rank.

    Each coefficient costs the bits of its own variance, which is reverse water-filling: those below the step
    cost next to nothing. They are sent by falling variance, the first ones of all rows first, in contexts of
    half an octave each: the last quarter of the coefficients, the one before it, the eighth before that, ...
    Spectra fall like powers of the rank, so variances in a context are of one size. The basis preserves
    lengths, so the error of a message is that of its coefficients.
    """

    def __init__(self, options: Any):
        super().__init__(options)
        self.needs_warmup = not options.refresh_steps

    def error_bound(self, spec: TensorSpec) -> float:
        # that of the coefficients, and the rounding of the basis and of two products
        return super().error_bound(spec) + 2.0**-16

    def refuses(self, spec: TensorSpec) -> str:
        _, h = matrix_shape(spec.shape)
        if h > eigenbasis.WIDEST:
            return f'its rows have {h:,} values, allowed with "rotate": {eigenbasis.WIDEST:,}'
        return super().refuses(spec)

    def observe(self, x: Tensor, ctx: Context) -> None:
        n, h = matrix_shape(x.shape)
        if x.numel() and f"{self._key(h, ctx)}.basis" not in ctx.memory:
            eigenbasis.accumulate(x.detach().reshape(n, h), self._key(h, ctx), ctx)

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        eigenbasis.check(memory, self.name)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        if not x.numel():
            return super().encode(x, ctx)
        n, h = matrix_shape(x.shape)
        rows = x.detach().reshape(n, h).float().contiguous()  # the last bits of a product depend on the order
        coefficients = self._basis(h, ctx, x.device).T @ saturate(rows, LARGEST_FACTOR).T
        frame = self._frame_of_rows(n, h)
        words = kernels(x.device).encode_entropy(coefficients.reshape(-1), frame, self._dither(ctx))
        if self._accumulates(h, ctx):
            self._decode_coefficients(words, n, h, ctx)  # accumulates what the other side will
        return (words,)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if not spec.numel:
            return super().decode(parts, spec, ctx)
        n, h = matrix_shape(spec.shape)
        basis = self._basis(h, ctx, spec.device)
        return as_message(self._decode_coefficients(parts[0], n, h, ctx).T @ basis.T, spec)

    def _decode_coefficients(self, words: Tensor, n: int, h: int, ctx: Context) -> Tensor:
        """Return the coefficients of n rows, fp32 [h, n], by falling variance."""
        coefficients = self._decode_words(words, self._frame_of_rows(n, h), torch.float32, ctx).view(h, n)
        if self._accumulates(h, ctx):
            eigenbasis.accumulate(coefficients.T, self._period_key(h, ctx), ctx)
        return coefficients

    def _key(self, h: int, ctx: Context, *period: str) -> str:
        return ".".join([self.name, str(ctx.position), ctx.direction, *period, str(h)])

    def _basis(self, h: int, ctx: Context, device: torch.device) -> Tensor:
        key, refresh = self._key(h, ctx), self.options.refresh_steps
        if refresh and not {f"{key}.basis", f"{key}.moment"} & ctx.memory.keys():
            ctx.memory[f"{key}.basis"] = torch.eye(h, dtype=torch.float32, device=device)
        basis = eigenbasis.fit(key, h, ctx)
        if not refresh or not ctx.training:
            return basis
        past, present = self._period_key(h, ctx), self._key(h, ctx, self._period(h, ctx).name)
        if past != present:
            if past:
                eigenbasis.rotate_basis(key, past, ctx)
            ctx.memory[f"{present}.moment"] = torch.zeros(h, h, dtype=torch.float64, device=device)
        return ctx.memory[f"{key}.basis"]

    def _period_key(self, h: int, ctx: Context) -> str:
        """Return the key of the moment by which the basis will be turned, empty before the first message."""
        pattern = self._key(h, ctx, "since_*")
        names = (name.removesuffix(".moment") for name in ctx.memory)
        return next((name for name in names if fnmatchcase(name, pattern)), "")

    def _period(self, h: int, ctx: Context) -> "_Period":
        """Return the period that the step of a message belongs to."""
        first = re.search(r"since_\d+_(\d+)", self._period_key(h, ctx))
        return _Period(int(first[1]) if first else ctx.step, ctx.step, self.options.refresh_steps)

    def _accumulates(self, h: int, ctx: Context) -> bool:
        """Return whether the basis will be turned by this message too."""
        if not self.options.refresh_steps or not ctx.training or ctx.micro_batch:
            return False
        period = self._period(h, ctx)
        return (ctx.step - period.start) % max(1, period.length // 16) == 0

    def _frame_of_rows(self, n: int, h: int) -> CodeLayout:
        halves = itertools.takewhile(bool, (h >> octave for octave in itertools.count(1)))
        cuts = dict.fromkeys(cut for half in halves for cut in (half, half + half // 2) if cut < h)
        return frame_of(n * h, self.options.bits, tuple(n * cut for cut in cuts), self.unbiased)


class _Period:
    """Interval between two basis updates: 1, 1, 2, 4, ... steps, then `refresh`."""

    def __init__(self, first: int, step: int, refresh: int):
        """
        Args:
            first: step of the first message in the basis.
            step: any step of the interval.
            refresh: length of the last intervals, in steps.
        """
        age, last = step - first, 1 << (refresh - 1).bit_length()
        if age < last:
            begin = 1 << age.bit_length() >> 1
            self.length = max(1, begin)
        else:
            begin = age - (age - last) % refresh
            self.length = refresh
        self.start = first + begin
        self.name = f"since_{self.start}_{first}"
