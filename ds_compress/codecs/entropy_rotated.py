"""Codec entropy with "rotate": "learned": what is coded are coefficients in a basis of the rows."""

import itertools
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ds_compress.codec import Context, TensorSpec
from ds_compress.codecs import basis
from ds_compress.codecs.entropy_plain import Plain
from ds_compress.codecs.memory import Remembers
from ds_compress.codecs.mixins import DecodesByProduct, Observes
from ds_compress.codecs.reshape import as_message, matrix_shape
from ds_compress.kernels.dispatch import kernels
from ds_compress.kernels.entropy import Frame, frame_of

WIDEST = 2**14
"""Values of a row that a basis is fitted to: its second moment takes 2 GiB then."""


class Rotated(Plain, Remembers, Observes, DecodesByProduct):
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
