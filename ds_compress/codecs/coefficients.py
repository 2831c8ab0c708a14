"""What the codecs have in common that send rows as coefficients in an eigenbasis of them."""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, Parts, TensorSpec
from ds_compress.codecs import basis
from ds_compress.codecs.memory import Remembers
from ds_compress.codecs.mixins import DecodesByProduct, Observes
from ds_compress.codecs.reshape import as_message, matrix_shape

WIDEST = 2**14
"""Values of a row that a basis is fitted to: its second moment takes 2 GiB then."""


class Coefficients(Codec, Remembers, Observes, DecodesByProduct):
    """With `"rotate": "learned"`: the coefficients of rows in the eigenbasis of those of the warm-up.

    A subclass sends them, all rows' first ones first. The basis turns lengths into themselves, so the error
    is that of the coefficients.
    """

    needs_warmup = True

    @abstractmethod
    def coded(self, coefficients: Tensor, h: int, ctx: Context, out: Parts | None) -> Parts:
        """The payload of the first `coefficients` of rows of h, fp32 [at most h, n], by falling variance;
        `out` is what `encode` was given."""

    @abstractmethod
    def decoded(self, parts: Parts, n: int, h: int, ctx: Context) -> Tensor:
        """The first coefficients, fp32 [at most h, n], that `parts` stand for; the others are 0."""

    def sent(self, n: int, h: int, ctx: Context) -> int:
        """How many coefficients of each row are sent."""
        return h

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        if not x.numel():
            layout = self.layout(TensorSpec.of(x))
            return tuple(torch.zeros(shape, dtype=dtype, device=x.device) for shape, dtype in layout)
        n, h = matrix_shape(x.shape)
        rows = x.detach().reshape(n, h).float().contiguous()  # the last bits of a product depend on the order
        directions = self._basis(h, ctx)[:, : self.sent(n, h, ctx)]
        return self.coded(directions.T @ rows.T, h, ctx, out)

    def decode(self, parts: Parts, spec: TensorSpec, ctx: Context) -> Tensor:
        if not spec.numel:
            return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        n, h = matrix_shape(spec.shape)
        directions = self._basis(h, ctx)[:, : self.sent(n, h, ctx)]
        return as_message(self.decoded(parts, n, h, ctx).T @ directions.T, spec)

    def observe(self, x: Tensor, ctx: Context) -> None:
        basis.observe(x, self._key(matrix_shape(x.shape)[1], ctx), ctx)

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        basis.check(memory, self.name, rank=None)

    def _key(self, h: int, ctx: Context, *period: str) -> str:
        return ".".join([self.name, str(ctx.position), ctx.direction, *period, str(h)])

    def _basis(self, h: int, ctx: Context) -> Tensor:
        return basis.basis(self._key(h, ctx), h, h, ctx)

    def error_bound(self, spec: TensorSpec) -> float:
        return 1.0 + 2.0**-16  # rounding, of the basis and of two products

    def refuses(self, spec: TensorSpec) -> str:
        _, h = matrix_shape(spec.shape)
        if h > WIDEST:
            return f'its rows have {h:,} values, allowed with "rotate": {WIDEST:,}'
        return super().refuses(spec)
