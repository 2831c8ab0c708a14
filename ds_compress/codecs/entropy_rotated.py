"""Codec entropy with "rotate": "learned": what is coded are coefficients in a basis of the rows."""

import itertools
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ds_compress.codec import Context, Parts
from ds_compress.codecs import basis
from ds_compress.codecs.coefficients import Coefficients
from ds_compress.codecs.entropy_plain import Plain
from ds_compress.kernels.dispatch import kernels
from ds_compress.kernels.entropy import Frame, frame_of


class Rotated(Coefficients, Plain):
    """One step for all coefficients, each coded at the cost of its own variance, is reverse water-filling:
    those below the step cost next to nothing. They are sent by falling variance, all rows' first ones first,
    in contexts of half an octave each: the last quarter of the coefficients, the one before it, the eighth
    before that, ... Spectra fall like powers of the rank, and variances in a context are of one size.
    """

    def coded(self, coefficients: Tensor, h: int, ctx: Context, out: Parts | None) -> Parts:
        n = coefficients.shape[1]
        words = kernels(coefficients.device).encode_entropy(coefficients.reshape(-1), self._frame(n, h))
        if self._gathers(ctx):
            self.decoded((words,), n, h, ctx)  # gathers what the other side will
        return (words,)

    def decoded(self, parts: Parts, n: int, h: int, ctx: Context) -> Tensor:
        coefficients = self._decoded(parts[0], self._frame(n, h), torch.float32).view(h, n)
        if self._gathers(ctx):
            basis.gather(coefficients.T, self._key(h, ctx, self._period(ctx)), ctx)
        return coefficients

    def _basis(self, h: int, ctx: Context) -> Tensor:
        key = self._key(h, ctx)
        if self.options.refresh_steps and ctx.training:
            kept, present = self._key(h, ctx, "since_*"), self._key(h, ctx, self._period(ctx))
            names = (name.removesuffix(".moment") for name in ctx.memory)
            for past in [name for name in names if fnmatchcase(name, kept) and name != present]:
                basis.turn(key, past, ctx)
        return super()._basis(h, ctx)

    def _period(self, ctx: Context) -> str:
        """A part of the key of what is gathered until the basis is turned."""
        return f"since_{ctx.step - ctx.step % self.options.refresh_steps}"

    def _gathers(self, ctx: Context) -> bool:
        """Whether the basis will be turned by this message too."""
        steps = self.options.refresh_steps
        return steps > 0 and ctx.training and ctx.micro_batch == 0 and ctx.step % max(1, steps // 16) == 0

    def _frame(self, n: int, h: int) -> Frame:
        halves = itertools.takewhile(bool, (h >> octave for octave in itertools.count(1)))
        cuts = dict.fromkeys(cut for half in halves for cut in (half, half + half // 2) if cut < h)
        return frame_of(n * h, self.options.bits, tuple(n * cut for cut in cuts))
