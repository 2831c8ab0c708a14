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

from collections.abc import Mapping

import torch
from torch import Tensor

from ds_compress.codec import Context
from ds_compress.codecs.memory import expect, number
from ds_compress.codecs.reshape import boundary_noise, matrix_shape
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
        gather(x.detach().reshape(matrix_shape(x.shape)), key, ctx)


def gather(m: Tensor, key: str, ctx: Context) -> None:
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
            h = number(key.split(".")[-2])
            if key.endswith(".moment"):
                expect(key, value, torch.float64, shape=(h, h))
            else:
                expect(key, value, torch.float32, shape=(h, h if rank is None else min(rank, h)))


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
