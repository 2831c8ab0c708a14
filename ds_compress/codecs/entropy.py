"""A uniform quantizer whose codes are entropy coded, at a constant size."""

import itertools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs import basis
from ds_compress.codecs.memory import Remembers
from ds_compress.codecs.mixins import DecodesByProduct, Observes
from ds_compress.codecs.reshape import as_message, matrix_shape
from ds_compress.errors import CompressionError
from ds_compress.kernels.dispatch import kernels
from ds_compress.kernels.entropy import LARGEST_NUMEL, Frame, frame_of
from ds_compress.registry.options import Steps

LEAST = 2**12
"""Values of a message that is worth several tables."""

WIDEST = 2**14
"""Values of a row that a basis is fitted to: its second moment takes 2 GiB then."""


@register("entropy")
class Entropy(Codec):
    """One uniform step for the whole tensor, entropy coded: the finest one that fits in `bits` per value.

    The size is constant, the error is what varies. `ds_compress.kernels.entropy` draws the packet.
    """

    examples = (
        *({"bits": bits} for bits in (4, 3.3, 2.5, 1)),
        {"bits": 2, "rotate": "learned"},
        {"bits": 2, "contexts": "rows"},
    )

    class Options(CodecOptions):
        bits: float = Field(2.5, ge=0.1, le=6)
        """Size of the packet in bits per value, all included. Tensors of a few dozen values take 2 bytes each
        and 32 for all."""

        rotate: Literal["none", "learned"] = "none"
        """learned: send of each row the coefficients in the eigenbasis of the rows of the warm-up, with
        tables by their rank: the bits go where the variance is. Meant for the activations of a transformer.
        Costs h multiplications for each value of a row of h, on both sides."""

        refresh_steps: Steps = 0
        """With "rotate": every so many steps turn the basis to the eigenvectors of what arrived in them, of
        16 messages. 0: it stays that of the warm-up."""

        contexts: Literal["none", "rows", "columns"] = "none"
        """Four tables, by the largest magnitude of each run of 64 values (rows: for gradients), or of each
        column, which is what the last dimension counts or, of maps, all but the first (columns: for
        activations). Which has which is sent along, in the same packet. Tensors of few values have one."""

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
    def of(cls, options: Any) -> "Entropy":
        kind = Sorted if options.contexts != "none" else Rotated if options.rotate != "none" else cls
        return kind(options)

    def layout(self, spec: TensorSpec) -> Layout:
        words = frame_of(spec.numel, self.options.bits).words if spec.numel else 0
        return (((words,), torch.int16),)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        if not x.numel():
            return (torch.empty(0, dtype=torch.int16, device=x.device),)
        frame = frame_of(x.numel(), self.options.bits)
        return (kernels(x.device).encode_entropy(x.detach().reshape(-1), frame),)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if not spec.numel:
            return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        frame = frame_of(spec.numel, self.options.bits)
        return self._decoded(parts[0], frame, spec.dtype).view(spec.shape)

    def _decoded(self, words: Tensor, frame: Frame, dtype: torch.dtype) -> Tensor:
        """The values, flat."""
        values, valid = kernels(words.device).decode_entropy(words, frame, dtype)
        if valid.device.type == "cpu" and not valid:  # a GPU's values are nan then: the host does not wait
            raise CompressionError("entropy: a damaged code came, no message is coded like that")
        return values

    def error_bound(self, spec: TensorSpec) -> float:
        return 1.0  # of values that no coder can tell in so few bits: zeros

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        # at high rates an ideal coder has 1.2 * 2^-rate; tables cost most in small messages
        frame = frame_of(max(spec.numel, 1), self.options.bits)
        rate = 16 * frame.room / (frame.numel + 256)
        return min(0.99, 1.3 * 2**-rate)

    def refuses(self, spec: TensorSpec) -> str:
        if spec.numel > LARGEST_NUMEL:
            return f"it has {spec.numel:,} values, allowed: {LARGEST_NUMEL:,}"
        return ""


RUN = 64
CLASSES, CLASS_BITS = 4, 2
_PER_WORD = 16 // CLASS_BITS


class Sorted(Entropy):
    """With `"contexts"`: units of values, runs or columns, by falling magnitude in four contexts of as many.

    Behind the code are the classes of the units, 8 to a word. Values behind the last whole run are in the
    last context.
    """

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        spec = TensorSpec.of(x)
        units, size = self._units(spec)
        if not units:
            return super().encode(x, ctx)
        flat = x.detach().reshape(-1)
        values, rest = flat[: units * size], flat[units * size :]
        if self.options.contexts == "rows":
            values = values.view(units, size)
            largest = values.abs().amax(1)  # exact, in whatever order they are compared
        else:
            largest = values.view(size, units).abs().amax(0)
            values = values.view(size, units).T.contiguous()
        # sign, exponent and 7 digits are enough to rank them by
        rank = (largest.float().view(torch.int32) >> 16).short().argsort(descending=True, stable=True)
        number = torch.arange(units, dtype=torch.int64, device=x.device)
        classes = torch.empty_like(rank).scatter_(0, rank, number * CLASSES // units)
        values = values.index_select(0, _order(classes)).view(-1)
        values = torch.cat([values, rest]) if rest.numel() else values
        return (torch.cat([kernels(x.device).encode_entropy(values, self._frame(spec)), _packed(classes)]),)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        units, size = self._units(spec)
        if not units:
            return super().decode(parts, spec, ctx)
        frame = self._frame(spec)
        values = self._decoded(parts[0][: frame.words], frame, spec.dtype)
        # whatever classes came: an order of the units
        order = _order(_unpacked(parts[0][frame.words :], units))
        number = torch.arange(units, dtype=torch.int64, device=order.device)
        places = torch.empty_like(order).scatter_(0, order, number)
        whole, rest = values[: units * size].view(units, size).index_select(0, places), values[units * size :]
        if self.options.contexts == "columns":
            whole = whole.T.contiguous()
        return (torch.cat([whole.view(-1), rest]) if rest.numel() else whole).view(spec.shape)

    def _units(self, spec: TensorSpec) -> tuple[int, int]:
        """How many there are and values of each; none where the classes would take a share of the words."""
        if self.options.contexts == "rows":
            units, size = spec.numel // RUN, RUN
        else:
            shape = (
                spec.shape if len(spec.shape) < 4 else (spec.shape[0], spec.numel // max(1, spec.shape[0]))
            )
            size, units = matrix_shape(shape)
        few = spec.numel < LEAST or size < RUN // 2 or units < CLASSES
        return (0, 0) if few else (units, size)

    def _frame(self, spec: TensorSpec) -> Frame:
        units, size = self._units(spec)
        cuts = tuple(-(-units * number // CLASSES) * size for number in range(1, CLASSES))
        return frame_of(spec.numel, self.options.bits, cuts, taken=-(-units // _PER_WORD))


def _order(classes: Tensor) -> Tensor:
    """int64 [units]: those of class 0 first, and so on."""
    return classes.to(torch.uint8).argsort(stable=True)


def _packed(classes: Tensor) -> Tensor:
    """int16, `_PER_WORD` of `classes` each."""
    filled = torch.nn.functional.pad(classes, (0, -len(classes) % _PER_WORD)).view(-1, _PER_WORD)
    return (filled << _shifts(classes.device)).sum(1).to(torch.int16)


def _unpacked(words: Tensor, units: int) -> Tensor:
    """int32 [units]."""
    return (words.int().unsqueeze(1) >> _shifts(words.device) & CLASSES - 1).view(-1)[:units]


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 16, CLASS_BITS, dtype=torch.int32, device=device)


class Rotated(Entropy, Remembers, Observes, DecodesByProduct):
    """With `"rotate": "learned"`: the coefficients of rows in the eigenbasis of those of the warm-up.

    One step for all coefficients, each coded at the cost of its own variance, is reverse water-filling:
    those below the step cost next to nothing. They are sent by falling variance, all rows' first ones first,
    in contexts of half an octave each: the last quarter of the coefficients, the one before it, the eighth
    before that, ... Spectra fall like powers of the rank, and variances in a context are of one size.

    The basis turns lengths into themselves, so the error is that of the coefficients.
    """

    needs_warmup = True

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        if not x.numel():
            return super().encode(x, ctx)
        n, h = matrix_shape(x.shape)
        frame = self._frame(n, h)
        rows = x.detach().reshape(n, h).float().contiguous()  # the last bits of a product depend on the order
        coefficients = self._basis(h, ctx).T @ rows.T
        words = kernels(x.device).encode_entropy(coefficients.reshape(-1), frame)
        if self._gathers(ctx):
            self._gather(self._decoded(words, frame, torch.float32).view(h, n), ctx)
        return (words,)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if not spec.numel:
            return super().decode(parts, spec, ctx)
        n, h = matrix_shape(spec.shape)
        of_rows = self._basis(h, ctx)
        coefficients = self._decoded(parts[0], self._frame(n, h), torch.float32).view(h, n)
        if self._gathers(ctx):
            self._gather(coefficients, ctx)
        return as_message(coefficients.T @ of_rows.T, spec)

    def _frame(self, n: int, h: int) -> Frame:
        halves = itertools.takewhile(bool, (h >> octave for octave in itertools.count(1)))
        cuts = dict.fromkeys(cut for half in halves for cut in (half, half + half // 2) if cut < h)
        return frame_of(n * h, self.options.bits, tuple(n * cut for cut in cuts))

    def observe(self, x: Tensor, ctx: Context) -> None:
        basis.observe(x, self._key(matrix_shape(x.shape)[1], ctx), ctx)

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        basis.check(memory, self.name, rank=None)

    def _key(self, h: int, ctx: Context, *period: str) -> str:
        return ".".join([self.name, str(ctx.position), ctx.direction, *period, str(h)])

    def _period(self, ctx: Context) -> str:
        """A part of the key of what is gathered until the basis is turned."""
        return f"since_{ctx.step - ctx.step % self.options.refresh_steps}"

    def _basis(self, h: int, ctx: Context) -> Tensor:
        key = self._key(h, ctx)
        if self.options.refresh_steps and ctx.training:
            kept, present = self._key(h, ctx, "since_*"), self._key(h, ctx, self._period(ctx))
            names = (name.removesuffix(".moment") for name in ctx.memory)
            for past in [name for name in names if fnmatchcase(name, kept) and name != present]:
                basis.turn(key, past, ctx)
        return basis.basis(key, h, h, ctx)

    def _gathers(self, ctx: Context) -> bool:
        """Whether the basis will be turned by this message too."""
        steps = self.options.refresh_steps
        return steps > 0 and ctx.training and ctx.micro_batch == 0 and ctx.step % max(1, steps // 16) == 0

    def _gather(self, coefficients: Tensor, ctx: Context) -> None:
        """`coefficients`: [h, n], as they arrive."""
        basis.gather(coefficients.T, self._key(len(coefficients), ctx, self._period(ctx)), ctx)

    def error_bound(self, spec: TensorSpec) -> float:
        return 1.0 + 2.0**-16  # rounding, of the basis and of two products

    def refuses(self, spec: TensorSpec) -> str:
        _, h = matrix_shape(spec.shape)
        if h > WIDEST:
            return f'its rows have {h:,} values, allowed with "rotate": {WIDEST:,}'
        return super().refuses(spec)
