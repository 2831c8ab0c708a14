"""A basis of the rows of messages, fitted to those of a warm-up on both sides alike and kept in the memory.

Both sides accumulate the second moment of the rows that cross uncompressed, and derive the basis when the
first compressed message comes. It is the result of subspace iteration from a start that both sides know, a
smooth function of the moments: where two kinds of processor sum in another order, the bases differ by
rounding and no sign or order can flip.

A basis of all h directions can follow the messages: both sides have the same coefficients of what arrived,
to the bit, and turn the basis to the eigenvectors of those from time to time.

Entries of the memory, where KEY ends with h: KEY.moment, float64 [h, h], until KEY.basis, fp32 [h, rank],
takes its place; and a moment of coefficients under a key of its own, until the basis is turned by it.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, Parts, TensorSpec
from ds_compress.codecs.mixins import (
    HardwareDependentDecode,
    ObservesWarmup,
    Stateful,
    check_entry,
    parse_size,
)
from ds_compress.codecs.shapes import as_message, boundary_noise, matrix_shape
from ds_compress.errors import CompressionError
from ds_compress.kernels.numerics import is_finite

ITERATIONS = 16
"""Of C V -> V; in flat spectra, the slowest, the error is then within 0.1 % of the smallest possible."""


def observe(x: Tensor, key: str, ctx: Context) -> None:
    """Add the rows of `x` to the moment; not those of a message with inf or nan, and none once there is a
    basis.

    Args:
        x: any shape and float dtype; a row is its last dimension, of h values.
        key: ends with h. KEY.moment, float64 [h, h], is made or replaced.
    """
    if x.numel() and f"{key}.basis" not in ctx.memory:
        accumulate(x.detach().reshape(matrix_shape(x.shape)), key, ctx)


def accumulate(m: Tensor, key: str, ctx: Context) -> None:
    """Add the rows of `m` to a moment, unless one is inf or nan.

    Args:
        m: float [n, h].
        key: ends with h. KEY.moment, float64 [h, h], the sum of row^T row, is made or replaced.
    """
    m = m.double()
    new = m.T @ m
    old = ctx.memory.get(f"{key}.moment", torch.zeros_like(new))
    ctx.memory[f"{key}.moment"] = old + torch.where(is_finite(new), new, 0.0)


def turn(key: str, gathered: str, ctx: Context) -> None:
    """Turn the basis, of all directions, to the eigenvectors of the coefficients in the moment of the key
    `gathered`, which goes.

    Args:
        key: of the basis, fp32 [h, h], which is replaced.
        gathered: GATHERED.moment is float64 [h, h], of rows in that basis.

    Raises:
        KeyError: one of the two is not there.
    """
    old, moment = ctx.memory[f"{key}.basis"].double(), ctx.memory.pop(f"{gathered}.moment")
    # from the directions as they are: those in which nothing arrived stay
    present = torch.eye(len(old), dtype=old.dtype, device=old.device)
    new, r = torch.linalg.qr(old @ principal_subspace(moment, present))
    new = new * torch.where(r.diagonal() < 0, -1.0, 1.0)
    ctx.memory[f"{key}.basis"] = new.float().contiguous()


def basis(key: str, h: int, rank: int, ctx: Context) -> Tensor:
    """The basis of the rows observed: h x rank, orthonormal columns by falling second moment, fp32.

    Args:
        key: begins with the name of the codec.

    Raises:
        CompressionError: none were.
    """
    if f"{key}.basis" not in ctx.memory:
        if f"{key}.moment" not in ctx.memory:
            codec = key.partition(".")[0]
            raise CompressionError(
                f"codec {codec!r} at boundary {ctx.boundary}: no message of {h} columns was observed before "
                "the first compressed one; it needs warmup_steps >= 1"
            )
        moment = ctx.memory.pop(f"{key}.moment")
        start = boundary_noise((h, rank), ctx).to(moment)
        ctx.memory[f"{key}.basis"] = principal_subspace(moment, start).float().contiguous()
    return ctx.memory[f"{key}.basis"]


def variances(moment: Tensor, directions: Tensor) -> Tensor:
    """The second moments, float64 [r], along the columns of `directions`, [h, r].

    Args:
        moment: float64 [h, h].
    """
    directions = directions.double()
    return (directions * (moment @ directions)).sum(0)


def check(memory: Mapping[str, Tensor], prefix: str, rank: int | None) -> None:
    """Look at entries of keys that begin with `prefix` and end with h, just read from a checkpoint.

    Args:
        rank: at most, None for h.

    Raises:
        CompressionError: one is none that the functions here could have left.
    """
    for key, value in memory.items():
        if key.startswith(f"{prefix}."):
            h = parse_size(key.split(".")[-2])
            if key.endswith(".moment"):
                check_entry(key, value, torch.float64, shape=(h, h))
            else:
                check_entry(key, value, torch.float32, shape=(h, h if rank is None else min(rank, h)))


def principal_subspace(moment: Tensor, start: Tensor) -> Tensor:
    """Orthonormal basis (h x r) of the r leading eigenvectors of `moment`, by subspace iteration.

    Args:
        moment: h x h float64, sum over the rows x of x^T x.
        start: h x r float64.
    """
    # The moment has rounding noise of 1e-16 of its size where it should have zeros. The ridge lifts all
    # eigenvalues above it and changes no eigenvector, so that a basis wider than the data is decided by
    # `start`, not by noise.
    size = moment.diagonal().sum()
    moment = torch.where(size > 0, moment / size, 0.0)
    ridge = torch.full_like(size, 1e-10, dtype=torch.float32)
    moment.diagonal().add_(torch.where(size > 0, ridge, 1.0))
    v = start
    for _ in range(ITERATIONS):
        v, r = torch.linalg.qr(moment @ v)
        v = v * torch.where(r.diagonal() < 0, -1.0, 1.0)  # Gram-Schmidt's sign: libraries choose freely
    return v


WIDEST = 2**14
"""Values of a row that a basis is fitted to: its second moment takes 2 GiB then."""


class EigenbasisCodec(Codec, Stateful, ObservesWarmup, HardwareDependentDecode):
    """With `"rotate": "learned"`: the coefficients of rows in the eigenbasis of those of the warm-up.

    A subclass sends them, all rows' first ones first. The basis turns lengths into themselves, so the error
    is that of the coefficients.
    """

    needs_warmup = True

    @abstractmethod
    def encode_coefficients(self, coefficients: Tensor, h: int, ctx: Context, out: Parts | None) -> Parts:
        """The payload of the first `coefficients` of rows of h, fp32 [at most h, n], by falling variance;
        `out` is what `encode` was given."""

    @abstractmethod
    def decode_coefficients(self, parts: Parts, n: int, h: int, ctx: Context) -> Tensor:
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
        return self.encode_coefficients(directions.T @ rows.T, h, ctx, out)

    def decode(self, parts: Parts, spec: TensorSpec, ctx: Context) -> Tensor:
        if not spec.numel:
            return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        n, h = matrix_shape(spec.shape)
        directions = self._basis(h, ctx)[:, : self.sent(n, h, ctx)]
        return as_message(self.decode_coefficients(parts, n, h, ctx).T @ directions.T, spec)

    def observe(self, x: Tensor, ctx: Context) -> None:
        observe(x, self._key(matrix_shape(x.shape)[1], ctx), ctx)

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        check(memory, self.name, rank=None)

    def _key(self, h: int, ctx: Context, *period: str) -> str:
        return ".".join([self.name, str(ctx.position), ctx.direction, *period, str(h)])

    def _basis(self, h: int, ctx: Context) -> Tensor:
        return basis(self._key(h, ctx), h, h, ctx)

    def error_bound(self, spec: TensorSpec) -> float:
        return 1.0 + 2.0**-16  # rounding, of the basis and of two products

    def refuses(self, spec: TensorSpec) -> str:
        _, h = matrix_shape(spec.shape)
        if h > WIDEST:
            return f'its rows have {h:,} values, allowed with "rotate": {WIDEST:,}'
        return super().refuses(spec)
