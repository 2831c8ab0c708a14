"""Low-rank gradients between replicas: an all-reduce of two thin factors (PowerSGD, arXiv 1905.13727).

    every replica                               all replicas alike
    M = gradient of a matrix + e
    P = M Q                     -- all_reduce -->   P made orthonormal
    Q = M^T P                   -- all_reduce -->   gradient = P Q^T, the mean
    e = M - gradient                                Q starts the next step

All P of a bucket go in one all-reduce, then all Q. No replica is the owner of a mean: each computes it from
the same sums, with the same code. So processors and libraries of all replicas have to be alike.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, TensorSpec
from ds_compress.codecs.lowrank import LowRank, orthonormal, warm_start
from ds_compress.codecs.mixins import layers
from ds_compress.codecs.shapes import WIRE_DTYPES
from ds_compress.feedback.ef import ErrorFeedbackCodec
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.numerics import LARGEST_FACTOR, cast, is_finite, saturate
from ds_compress.replicas.exchange import Exchange, Rounds
from ds_compress.replicas.slices import GRADIENT, Gradient, Slices, is_compressed
from ds_compress.replicas.transfers import Replicas, Transfer


def compressed_parameters(parameters: Iterable[Tensor], codec: Codec) -> dict[int, Tensor]:
    """Return the parameters whose gradients `codec` compresses, by their position in `parameters`."""
    lowrank = next(layers(codec, LowRank), None)
    return {
        number: parameter
        for number, parameter in enumerate(parameters)
        if is_compressed(parameter)
        and (lowrank is None or lowrank.factor_rank(_matrix_shape(parameter)) is not None)
    }


def build_exchange(
    replicas: Replicas, codec: Codec, compressed: Mapping[int, Tensor], *options: Any
) -> Exchange:
    """Return the exchange of gradients that `codec` takes part in.

    Args:
        compressed: of `compressed_parameters`.
        options: of `Exchange`.
    """
    shapes = {number: _matrix_shape(parameter) for number, parameter in compressed.items()}
    if not any(layers(codec, LowRank)):
        return Exchange(replicas, codec, *options, widths={n: width for n, (_, width) in shapes.items()})
    return FactorExchange(replicas, codec, *options, shapes=shapes)


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    return parameter.shape[0], parameter[0].numel()


@dataclass
class _Matrix:
    """A gradient while its factors are under way."""

    values: Tensor  # the gradient, in its own dtype and with the loss scale
    x: Tensor  # without the loss scale, fp32 [n, h]
    residual: Tensor | None
    m: Tensor  # the sum of both
    context: Context
    key: str  # of Q in the memory
    q: Tensor  # fp32 [h, r], of the step before
    p: Tensor  # fp32 [n, r]; orthonormal when all replicas have it
    is_finite: Tensor


class FactorExchange(Exchange):
    """Averages gradients as an `Exchange` does, by their factors."""

    def __init__(
        self, replicas: Replicas, codec: Codec, *options: Any, shapes: Mapping[int, tuple[int, int]]
    ):
        """
        Args:
            codec: `lowrank`, alone or in error feedback.
            options: of `Exchange`.
            shapes: rows and columns of each parameter.
        """
        super().__init__(replicas, codec, *options)
        self.slices = Slices(1)  # whole matrices
        self._shapes = shapes

    def rounds(self, gradients: Sequence[Gradient], factor: float, scale: float, step: int) -> Rounds:
        """Average one bucket: yield each transfer to send, and receive the sums over the replicas.

        Args: see `average`.
        """
        size = self.replicas.size
        (lowrank,) = layers(self.codec.codec, LowRank)
        feedback = next(layers(self.codec.codec, ErrorFeedbackCodec), None)
        dtype = WIRE_DTYPES[lowrank.options.dtype]
        matrices = [self._matrix(lowrank, feedback, each, scale, step) for each in gradients]

        factors = [cast(each.p, dtype) for each in matrices]
        sums = yield _summed(factors)
        for each, p in zip(matrices, _cut(sums, factors)):
            each.p, each.is_finite = orthonormal(p.float())
        nbytes = sum(p.nbytes for p in factors)

        factors = [cast(each.m.T @ each.p, dtype) for each in matrices]
        sums = yield _summed(factors)
        for each, q in zip(matrices, _cut(sums, factors)):
            found = q.float() / size
            each.context.memory[each.key], is_finite = warm_start(found, each.q, each.is_finite)
            mean = each.p @ torch.where(is_finite, found, torch.nan).T
            if feedback is not None and each.residual is not None:
                update = kernels(mean.device).update_residual
                new, kept = update(each.x, each.residual, mean, 1.0, *feedback.weights)
                feedback.state.save(each.context, TensorSpec.of(each.x), new, is_finite & kept)
            each.values.copy_(mean.mul_(factor * size * scale).view(-1))
        nbytes += sum(q.nbytes for q in factors)

        self._count(gradients, 2 * (size - 1) * nbytes // size)

    def _matrix(
        self,
        lowrank: LowRank,
        feedback: ErrorFeedbackCodec | None,
        gradient: Gradient,
        scale: float,
        step: int,
    ) -> _Matrix:
        """Return a gradient with its first factor."""
        (own,), (rows, columns) = self.slices.of(gradient), self._shapes[gradient.parameter]
        x = gradient.values.view(rows, columns).float()
        x = x if scale == 1.0 else x / scale
        context, residual, m = self.codec.context(own, GRADIENT, step), None, x
        if feedback is not None:
            spec = TensorSpec.of(x)
            residual = feedback.state.values(feedback.residual(context, spec), spec)
            m = x + residual
        m = saturate(m, LARGEST_FACTOR)
        key, q = lowrank.start(min(lowrank.options.rank, rows, columns), columns, context)
        q = q.to(x.device)
        p = m @ q
        return _Matrix(gradient.values, x, residual, m, context, key, q, p, is_finite(p))


def _summed(factors: Sequence[Tensor]) -> Transfer:
    return Transfer(torch.cat([factor.reshape(-1) for factor in factors]), is_summed=True)


def _cut(sums: Tensor | None, factors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the sum of each of `factors`, in memory of its own: where it is changes last bits of products."""
    assert sums is not None
    for factor, part in zip(factors, sums.split([factor.numel() for factor in factors])):
        yield part.clone().view(factor.shape)
