"""A basis of the rows of messages, fitted to those of the warm-up and kept in the memory.

Both sides accumulate the second moment of the rows that cross uncompressed, and fit the basis when the first
compressed message comes. The basis is a smooth function of the moment: on two kinds of processor, which sum
in another order, the bases differ by rounding, and no sign or order can flip. It equals `ITERATIONS` steps
of subspace iteration from a start that both sides know, but comes from one eigendecomposition; rows wider
than `EXACT` have theirs in two rounds of blocks:

    first round     eigenvectors of each block of columns
    second round    eigenvectors of each group of the directions found. A group has those of equal rank of all
                    blocks: the strongest directions of all blocks come together.

A basis can follow the messages: both sides accumulate the moment of the same decoded coefficients, and
turn the basis to its eigenvectors from time to time. Such a basis needs no warm-up: it can start as the unit
matrix.

Entries of the memory, where KEY ends with h: KEY.moment, float64 [h, h], until KEY.basis, fp32 [h, h],
replaces it; and a moment of coefficients under a key of its own, until the basis is turned by it.
"""

import functools
import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ds_compress.codec import Context
from ds_compress.codecs.mixins import check_entry, parse_size
from ds_compress.codecs.shapes import LARGEST_FACTOR, boundary_noise
from ds_compress.errors import CompressionError

_STEPS = 8
"""Steps in an octave of variance."""

_OCTAVES = 40
"""Variances so far below the largest count as equal: they are the rounding of zeros in a moment."""


def log_levels(variances: Tensor) -> Tensor:
    """Return the logarithms of `variances`, float64 [h], as int32 [h] in steps of an eighth octave from the
    largest."""
    largest = variances.amax()
    share = torch.where(largest > 0, variances / largest, 1.0).clamp(min=2.0**-_OCTAVES)
    return (_STEPS * share.log2()).round().to(torch.int32)


ITERATIONS = 16
"""Steps of subspace iteration, C V -> V; in flat spectra, the slowest, the error is then within 0.1 % of the
smallest possible."""

EXACT = 1024
"""The widest rows of which a basis is fitted in one piece."""

BLOCK = 768
"""The widest block of wider rows: a basis of 2,048 columns takes less than a second of one core."""

WIDEST = 2**14
"""The widest rows that a basis is fitted to: their second moment takes 2 GiB."""

Start = Callable[[int], Tensor]
"""Makes the matrix [h, h] from which subspace iteration starts; any type and device."""


def accumulate(m: Tensor, key: str, ctx: Context) -> None:
    """Add the rows of `m` to a moment, unless one is inf or nan, or above `LARGEST_FACTOR`.

    Args:
        m: float [n, h].
        key: ends with h. KEY.moment, float64 [h, h], the sum of row^T row, is made or replaced.
    """
    m = m.double()
    new = m.T @ m
    old = ctx.memory.get(f"{key}.moment", torch.zeros_like(new))
    known = (new.diagonal() <= LARGEST_FACTOR**2).all()  # it has the largest numbers of `new`
    ctx.memory[f"{key}.moment"] = old + torch.where(known, new, 0.0)


def fit(key: str, h: int, ctx: Context) -> Tensor:
    """Return KEY.basis; if it is not there, make it of KEY.moment, which it replaces.

    The basis is h x h in fp32: orthonormal columns by falling second moment.

    Args:
        key: begins with the name of the codec.

    Raises:
        CompressionError: no rows were observed.
    """
    if f"{key}.basis" in ctx.memory:
        return ctx.memory[f"{key}.basis"]
    if f"{key}.moment" not in ctx.memory:
        codec = key.partition(".")[0]
        raise CompressionError(
            f"codec {codec!r} at boundary {ctx.boundary}: no message of {h} columns was observed before "
            "the first compressed one; it needs warmup_steps >= 1"
        )
    moment = ctx.memory.pop(f"{key}.moment")
    basis = eigenvectors(moment, lambda size: boundary_noise((size, size), ctx))
    ctx.memory[f"{key}.basis"] = basis = basis.float().contiguous()
    return basis


def rotate_basis(key: str, accumulated: str, ctx: Context) -> None:
    """Turn a basis to the eigenvectors of the coefficients in a moment, which is removed.

    Args:
        key: of the basis, fp32 [h, h], which is replaced.
        accumulated: ACCUMULATED.moment is float64 [h, h], of rows in that basis.

    Raises:
        KeyError: one of the two is not there.
    """
    old, moment = ctx.memory[f"{key}.basis"].double(), ctx.memory.pop(f"{accumulated}.moment")
    # from the directions as they are: those in which nothing arrived stay
    eye = functools.partial(torch.eye, dtype=torch.float64, device=moment.device)
    turned = eigenvectors(moment, eye)
    ctx.memory[f"{key}.basis"] = _orthonormal(old @ turned).float().contiguous()


def check(memory: Mapping[str, Tensor], prefix: str) -> None:
    """Check entries of keys that begin with `prefix` and end with h, just read from a checkpoint.

    Raises:
        CompressionError: the functions here never write such an entry.
    """
    for key, value in memory.items():
        if key.startswith(f"{prefix}."):
            *stem, digits, what = key.split(".")
            h, base = parse_size(digits), ".".join([*stem[:3], digits, "basis"])
            if len(stem) > 3 and base not in memory:  # a moment to turn the basis by
                raise CompressionError(f"entry {key!r} came without {base!r}")
            check_entry(key, value, torch.float64 if what == "moment" else torch.float32, shape=(h, h))


def eigenvectors(moment: Tensor, start: Start) -> Tensor:
    """Return an orthonormal basis of the eigenvectors of `moment`, exact up to `EXACT` columns.

    Args:
        moment: h x h float64, sum over the rows x of x^T x.

    Returns:
        float64 [h, h], by falling second moment.
    """
    # The moment has rounding noise of 1e-16 of its size where it should have zeros. The ridge lifts all
    # eigenvalues above it and changes no eigenvector, so that directions without data are decided by
    # the start, not by noise.
    h, size = len(moment), moment.diagonal().sum()
    moment = torch.where(size > 0, moment / size, 0.0)
    ridge = torch.full_like(size, 1e-10, dtype=torch.float32)
    moment.diagonal().add_(torch.where(size > 0, ridge, 1.0))
    return _in_blocks(moment, start) if h > EXACT else _by_decomposition(moment, start(h).to(moment))[0]


def _by_decomposition(moment: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what `ITERATIONS` steps from `start` converge to, by the eigenvectors U and eigenvalues L.

    The steps span C^16 S = U L^16 (U^T S). Its QR decomposition does not depend on which eigenvectors the
    library chooses where eigenvalues are equal. Rows fall in size, so QR is accurate in each of them.

    Returns:
        The basis, and the second moments along its columns.
    """
    values, vectors = torch.linalg.eigh(moment)
    values, vectors = values.flip(0), vectors.flip(1)
    powers = (values / values[0]).clamp(min=0) ** ITERATIONS
    mixed = _orthonormal(powers.unsqueeze(1) * (vectors.T @ start))
    return vectors @ mixed, (mixed.square() * values.unsqueeze(1)).sum(0)


def _in_blocks(moment: Tensor, start: Start) -> Tensor:
    """Return eigenvectors from two rounds of blocks; see the head of this file."""
    h = len(moment)
    count = -(-h // BLOCK)
    sizes = [h // count + (place < h % count) for place in range(count)]
    ends = list(itertools.accumulate(sizes))
    columns = [slice(end - size, end) for end, size in zip(ends, sizes)]
    starts = {size: start(size).to(moment) for size in set(sizes)}
    first = [_by_decomposition(moment[own, own], starts[size])[0] for own, size in zip(columns, sizes)]
    half = torch.cat([moment[:, own] @ vectors for own, vectors in zip(columns, first)], dim=1)

    basis, variances = torch.zeros_like(moment), []
    ranks = torch.cat([torch.arange(size, dtype=torch.int64, device=moment.device) for size in sizes])
    place = 0
    for group in ranks.argsort(stable=True).split(sizes):
        group = group.sort().values  # block after block
        members = [group[(group >= own.start) & (group < own.stop)] - own.start for own in columns]
        chosen = [vectors[:, own] for vectors, own in zip(first, members)]
        inner = torch.cat([own.T @ half[rows][:, group] for own, rows in zip(chosen, columns)])
        turned, found = _by_decomposition(inner, starts[len(group)])
        parts = turned.split([len(own) for own in members])
        for own, rows, part in zip(chosen, columns, parts):
            basis[rows, place : place + len(group)] = own @ part
        variances.append(found)
        place += len(group)
    moments = torch.cat(variances)
    order = log_levels(moments).argsort(descending=True, stable=True)
    return basis[:, order]


def _orthonormal(m: Tensor) -> Tensor:
    """Return Q of the QR decomposition of `m` with the signs of Gram-Schmidt: libraries choose theirs
    freely."""
    q, r = torch.linalg.qr(m)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)
