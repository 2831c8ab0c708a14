"""Codec lowrank: a row of h numbers is sent as r coefficients of a basis, which is sent along."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.mixins import Stateful, check_entry, parse_size
from ds_compress.codecs.shapes import WIRE_DTYPES, as_message, boundary_noise, matrix_shape
from ds_compress.kernels.numerics import LARGEST_FACTOR, cast, is_finite, saturate
from ds_compress.stability import Stability


@register("lowrank")
class LowRank(Codec, Stateful):
    """The product of two thin factors, from one power iteration that starts where the last message ended.

    PowerSGD (Vogels et al., arXiv 1905.13727, algorithm 1) on the message M of n rows and h columns: P = M Q
    is made orthonormal, Q' = M^T P; P (n x r) and Q' (h x r) are sent and stand for P Q'^T. The sender keeps
    Q' as the Q of its next message, so that the iteration goes on while the row space of the messages changes
    slowly. Where the factors would hold as many numbers as M (a high rank, few rows), M itself is sent in
    their dtype.
    """

    class Options(CodecOptions):
        rank: int = Field(8, ge=1, le=2**16)
        """Columns of each factor, r above."""
        dtype: Literal["bf16", "fp32"] = "bf16"
        """How the factors travel."""

    def factor_rank(self, shape: tuple[int, ...]) -> int | None:
        """Return the rank of the factors for a message of `shape`, None if the message is no larger."""
        n, h = matrix_shape(shape)
        rank = min(self.options.rank, n, h)
        return rank if rank * (n + h) < n * h else None

    def layout(self, spec: TensorSpec) -> Layout:
        n, h = matrix_shape(spec.shape)
        dtype = WIRE_DTYPES[self.options.dtype]
        rank = self.factor_rank(spec.shape)
        if rank is None:
            return (((n, h), dtype),)
        return ((n, rank), dtype), ((h, rank), dtype)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        n, h = matrix_shape(x.shape)
        dtype = WIRE_DTYPES[self.options.dtype]
        rank = self.factor_rank(x.shape)
        m = x.detach().reshape(n, h)
        if rank is None:
            return (cast(m, dtype),)
        m = saturate(m.to(self._dtype_of_products(x)), LARGEST_FACTOR)
        key, q = self.start(rank, h, ctx)
        q = q.to(x.device)
        p, finite = orthonormal((m @ q.to(m.dtype)).float())  # not finite, if m is not
        q_next = (p.T.to(m.dtype) @ m).float().T
        ctx.memory[key], finite = warm_start(q_next, q, finite)
        return p.to(dtype), torch.where(finite, q_next, torch.nan).to(dtype)

    def start(self, rank: int, h: int, ctx: Context) -> tuple[str, Tensor]:
        """Return the key of the last message's Q in the memory, and that Q, h x rank; noise before it."""
        key = f"lowrank.{ctx.position}.{ctx.direction}.{h}x{rank}"
        return key, ctx.memory[key] if key in ctx.memory else boundary_noise((h, rank), ctx)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        p, *q = (part.to(self._dtype_of_products(spec)) for part in parts)
        return as_message(p @ q[0].T if q else p, spec)

    def _dtype_of_products(self, message: Tensor | TensorSpec) -> torch.dtype:
        """Return on a GPU the message's dtype if the factors have it, too; else fp32: many CPUs take ten
        times as long for products of bf16."""
        is_theirs = message.dtype == WIRE_DTYPES[self.options.dtype] and message.device.type != "cpu"
        return message.dtype if is_theirs else torch.float32

    @property
    def decodes_alike(self) -> bool:
        return False

    def error_bound(self, spec: TensorSpec) -> float:
        rank = self.factor_rank(spec.shape)
        if rank is None:
            return bounds.rounding(WIRE_DTYPES[self.options.dtype], spec.dtype)
        return 1 + self._rounding(rank)

    def stability(self, spec: TensorSpec) -> Stability:
        """Return the stability for normal values: what the basis misses changes the next basis (PowerSGD)."""
        return Stability(self.gaussian_error_bound(spec))

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        rank = self.factor_rank(spec.shape)
        if rank is None:
            return self.error_bound(spec)
        return bounds.random_part(rank / min(matrix_shape(spec.shape)), self._rounding(rank))

    def _rounding(self, rank: int) -> float:
        """Return the largest error of rounding both factors."""
        return math.sqrt(rank) * torch.finfo(WIRE_DTYPES[self.options.dtype]).eps

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        for key, value in memory.items():
            if key.startswith("lowrank."):
                h, _, rank = key.rpartition(".")[2].partition("x")
                check_entry(key, value, torch.float32, shape=(parse_size(h), parse_size(rank)))


def orthonormal(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 `p` with orthonormal columns, and whether it was finite, 0-dim bool; rows of zeros stay."""
    finite = is_finite(p)
    p = torch.where(finite, p, 0.0)  # what QR makes of nan is up to the library
    return torch.where(p.any(1, keepdim=True), torch.linalg.qr(_near_one(p)).Q, 0.0), finite


def warm_start(q_next: Tensor, q: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Q of the next message, and whether `finite` and `q_next` is.

    Only the directions of Q's columns matter; of equal length, the weak are not lost beside the strong.
    """
    largest = q_next.abs().amax(dim=0)
    finite = finite & largest.isfinite().all()
    return torch.where(finite & (largest > 0), q_next / largest, q).contiguous(), finite


def _near_one(p: Tensor) -> Tensor:
    """Scale `p` by the power of two that brings its largest magnitude to [0.5, 1).

    Without it QR's squares of 1e-30 would vanish.
    """
    _, exponent = torch.frexp(p.abs().amax())
    return p * torch.exp2(-exponent.clamp(-126, 126).float())
