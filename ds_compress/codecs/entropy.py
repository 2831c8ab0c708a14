"""Codec entropy: a uniform quantizer whose codes are entropy coded, at a constant size."""

import copy
import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs.directions import (
    add_directions,
    factors_bits,
    factors_layout,
    most_directions,
    subtract_directions,
)
from ds_compress.codecs.mixins import FollowsForward, layers
from ds_compress.codecs.shapes import as_message, matrix_shape
from ds_compress.errors import CompressionError
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.entropy.format import COARSER, LARGEST_NUMEL, CodeLayout, frame_of, least_words

SHIFT_BITS = 8
"""Bits of the shift of a row."""

TOLERANCE = 2
"""Octaves below the median within which rows of activations stay: shifting all raised the loss of SmolLM2 by
0.3 % more at 3 bits. Small rows of gradients, that of an attention sink above all, need the most digits."""

DITHERED_REACH = 2.0 ** (COARSER + 1)
"""Half of the coarsest step of a dithered message, as a multiple of its largest magnitude, at most."""

ROUNDED_BASIS = 1.05
"""Largest norm of the rest of a message without its directions: a basis of int8 is not quite orthonormal."""

FACTORS = 0.3
"""Largest share of a packet that the factors of directions take. At 3.3 bits of 128 values a row, with an
eighth the token error of a Llama trained for 300 steps was .11, with .3 it is .06. In a pretrained model few
directions matter, and at its width they take less."""

ALONG_BITS = 16
"""Bits of the component of a row along its activation."""

ALONG = 1 / 8
"""Largest share of a packet that these components take: below a width of 86 at 1.5 bits there are none. At a
width of 128 they take a twelfth, and 1,200 steps of a Llama cost .9 % instead of 1.5 % (CHANGELOG.md)."""

MOST_SPECS = 1024
"""Specs of gradients of which a codec remembers whether these components are sent."""


@register("entropy")
class Entropy(Codec, FollowsForward):
    """One uniform step for the whole tensor, entropy coded: the finest one that fits in `bits` per value.

    Rows that are much smaller or larger than the others are first multiplied by powers of two, which travel
    as one byte per row; rows of zeros are decoded as zeros. Images, a single row, short rows and messages of
    a few dozen values have no such bytes. The size is constant, the error varies.

    Of each row of a dithered gradient, the component along the activation of that row is sent as one bf16,
    and is as exact as both sides know that direction. Behind norms a gradient is nearly orthogonal to its
    activation, while noise is not, and the noise of the weights that make an attention sink grows with its
    length, 150 times that of other tokens: the sink of a pretrained model faded in a hundred steps
    (docs/evidence.md).
    `ds_compress.kernels.entropy.format` draws the packet.
    """

    examples = (
        *({"bits": bits} for bits in (4, 3.3, 2.5, 1)),
        {"bits": 2, "rounding": "dither"},
        {"bits": 3.3, "rank": 8},
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

        rank: int = Field(0, ge=0, le=64)
        """Directions that are sent apart, as the product of two thin factors: for activations, whose rows
        have most of their energy in a few directions. Fewer where the factors would take more than 30 % of
        the packet, as in messages of few or narrow rows."""

    def __init__(self, options: CodecOptions | None = None):
        super().__init__(options)
        self._forward: Codec | None = None  # the codec of activations, if this one is for their gradients
        self._wants: dict[TensorSpec, bool] = {}  # found by `wants_activation`, which each message calls

    def paired_with(self, forward: Codec) -> Codec:
        if not self.unbiased:
            return self
        paired = copy.copy(self)
        paired._forward, paired._wants = list(layers(forward, Codec))[-1], {}  # type: ignore[type-abstract]
        return paired

    def wants_activation(self, spec: TensorSpec) -> bool:
        """Return whether the component of each row along its activation is sent apart. It is not where the
        forward codec has a larger error than this one: the two sides would mean different directions."""
        if self._forward is None:
            return False
        if spec not in self._wants:
            if len(self._wants) == MOST_SPECS:
                self._wants.clear()
            rows, most = self._rows(spec), ALONG * self.options.bits * spec.numel
            is_known = self._forward.gaussian_error_bound(spec) < _dither_error(self.options.bits)
            self._wants[spec] = 0 < ALONG_BITS * rows <= most and is_known
        return self._wants[spec]

    def layout(self, spec: TensorSpec) -> Layout:
        words, rows = self._frame(spec).words if spec.numel else 0, self._rows(spec)
        rank = self._rank(spec)
        shifts: Layout = (((rows,), torch.int8),) if rows else ()
        along: Layout = (((rows,), torch.bfloat16),) if self.wants_activation(spec) else ()
        factors = factors_layout(rank, *matrix_shape(spec.shape)) if rank else ()
        return (((words,), torch.int16), *shifts, *along, *factors)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        if not x.numel():
            return (torch.empty(0, dtype=torch.int16, device=x.device),)
        spec, values, backend = TensorSpec.of(x), x.detach(), kernels(x.device)
        frame, dither, rows = self._frame(spec), self._dither(ctx), self._rows(spec)
        if not rows:
            words, _ = backend.encode_entropy(values.reshape(-1), frame, dither)
            return (words,)
        values, others = values.reshape(rows, -1), tuple[Tensor, ...]()
        if self.wants_activation(spec):
            if (activation := self._activation(spec, ctx)) is None:
                along = torch.full((rows,), torch.nan, dtype=torch.bfloat16, device=x.device)
            else:
                along = backend.project(values, activation).to(torch.bfloat16)
            others = (along,)
        if rank := self._rank(spec):
            values, factors = subtract_directions(values, rank)
            others += factors
        tolerance = 0 if self.unbiased else TOLERANCE
        return (*backend.encode_entropy(values, frame, dither, tolerance), *others)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if not spec.numel:
            return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        backend, along = kernels(spec.device), self.wants_activation(spec)
        factors, shifts = parts[2 + along :], parts[1] if len(parts) > 1 else None
        # shifted rows may leave the range of fp16
        dtype = torch.bfloat16 if spec.dtype == torch.bfloat16 else torch.float32
        values, valid = backend.decode_entropy(parts[0], self._frame(spec), dtype, self._dither(ctx), shifts)
        if valid.device.type == "cpu" and not valid:  # a GPU's values are nan then: the host does not wait
            raise CompressionError("entropy: a damaged code came, no message is coded like that")
        if factors:
            values = add_directions(values.view(self._rows(spec), -1), *factors)
        if along and (activation := self._activation(spec, ctx)) is not None:
            values = backend.set_projection(values.view(activation.shape), activation, parts[2])
        return as_message(values, spec)

    def _rows(self, spec: TensorSpec) -> int:
        """Return the rows that have a shift, a byte each; 0 for images, and where shifts would take more than
        an eighth of the packet, or bytes that its code needs."""
        rows = matrix_shape(spec.shape)[0]
        bits, needed = spec.numel * self.options.bits, 16 * least_words(spec.numel)
        has_shifts = bits >= max(8 * SHIFT_BITS * rows, SHIFT_BITS * rows + needed)
        return rows if has_shifts and len(spec.shape) < 4 and rows > 1 else 0

    def _rank(self, spec: TensorSpec) -> int:
        """Return the directions that are sent apart: only those of rows that have shifts."""
        if not self.options.rank or not (rows := self._rows(spec)):
            return 0
        bits = spec.numel * self.options.bits
        rest = bits - (SHIFT_BITS + ALONG_BITS * self.wants_activation(spec)) * rows
        most = min(FACTORS * bits, rest - 16 * least_words(spec.numel))
        return max(0, min(self.options.rank, most_directions(most, *matrix_shape(spec.shape))))

    def _frame(self, spec: TensorSpec) -> CodeLayout:
        """Return the frame of the code of a message of `spec`, without what else travels."""
        others = (SHIFT_BITS + ALONG_BITS * self.wants_activation(spec)) * self._rows(spec)
        if rank := self._rank(spec):
            others += factors_bits(rank, *matrix_shape(spec.shape))
        return frame_of(spec.numel, self.options.bits - others / max(spec.numel, 1), self.unbiased)

    def _dither(self, ctx: Context) -> int | None:
        """Return the key of the dither, None for none."""
        return ctx.key("dither") if self.unbiased else None

    def _activation(self, spec: TensorSpec, ctx: Context) -> Tensor | None:
        """Return the activation that a gradient of `spec` belongs to, [rows, width].

        None if this side keeps none: the forward message was left to DeepSpeed, or was of an evaluation, or
        has been answered. The gradient then arrives as the code has it, noise along its activation included.
        """
        if ctx.activation is None:
            return None
        if ctx.activation.shape != spec.shape:
            raise CompressionError(
                f"entropy at boundary {ctx.boundary}, {ctx.direction}: a gradient of {spec} came for an "
                f"activation of {TensorSpec.of(ctx.activation)}; allowed: one of the same shape"
            )
        return ctx.activation.reshape(matrix_shape(spec.shape))

    @property
    def unbiased(self) -> bool:
        return self.options.rounding == "dither"

    @property
    def decodes_alike(self) -> bool:
        return not self.options.rank and self._forward is None

    def error_bound(self, spec: TensorSpec) -> float:
        rest = ROUNDED_BASIS if self._rank(spec) else 1.0  # its largest norm, relative to the message's
        if self.unbiased:  # each value is half a step off at most, however coarse that is
            along = 2.0 * self.wants_activation(spec)  # if the activations of the sides are orthogonal
            return rest * DITHERED_REACH * math.sqrt(spec.numel) + along
        return rest  # values that need more bits than there are become zeros

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        # at high rates an ideal coder has 1.2 * 2^-rate; tables cost most in small messages
        frame = self._frame(spec) if spec.numel else frame_of(1, self.options.bits, self.unbiased)
        rate = 16 * frame.capacity / (frame.numel + 256)
        if self.unbiased:
            return _dither_error(rate - 0.15 * (frame.classes == 1))  # one table codes low rates worse
        return min(0.99, 1.3 * 2**-rate)

    def refuses(self, spec: TensorSpec) -> str:
        if spec.numel > LARGEST_NUMEL:
            return f"it has {spec.numel:,} values, allowed: {LARGEST_NUMEL:,}; 'quantize' takes any number"
        return ""


def _dither_error(rate: float) -> float:
    """Return the largest error of normal values that are dithered and coded with `rate` bits each."""
    return 1.4 / math.sqrt(4**rate - 1) if rate >= 1 else max(1.0, rate**-1.6)  # four classes say too little
