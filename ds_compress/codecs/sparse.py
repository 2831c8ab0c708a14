"""Codecs that keep some of the entries and send zero for the others: what they share, and two of them.

A packet holds the indices of the kept entries (ds_compress.kernels.indices), where the receiver cannot know
them, then their values through a second codec. What is kept follows from the indices alone: a kept zero is
still kept.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from ds_compress.codec import (
    Codec,
    CodecOptions,
    Context,
    Layout,
    Parts,
    Stability,
    TensorSpec,
    build,
    register,
)
from ds_compress.codecs import bounds, select
from ds_compress.codecs.mixins import BothDirections, ObservesWarmup, Selects, VariableSizePayload
from ds_compress.codecs.shapes import as_message
from ds_compress.errors import CompressionError
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.topk import index_coding as coding
from ds_compress.kernels.topk.selection import Selection


def _values_codec(choice: object) -> Codec:
    return build("none" if choice == "raw" else choice, "values")


_row = lru_cache(lambda count, dtype, device: TensorSpec((count,), dtype, device))
"""That of so many values: kept, as each message asks for it."""


class SparseOptions(CodecOptions):
    density: float = Field(0.1, gt=0, le=1)
    """Fraction of the entries that is kept."""

    values: Any = Field("raw", json_schema_extra={"anyOf": [{"const": "raw"}, {"registry": "codec"}]})
    """How the kept values travel: as they are, or through the codec of that name or description."""

    @field_validator("values")
    @classmethod
    def _values_are_a_plain_codec(cls, choice: object) -> object:
        inner = _values_codec(choice)
        if isinstance(inner, (Selects, BothDirections, VariableSizePayload, ObservesWarmup)):
            raise CompressionError(f"values: {inner.name!r} cannot carry the kept values; use e.g. 'bf16'")
        return choice


class Sparse(Codec, Selects):
    """What sparsifying codecs share: the values of a selection, gathered, sent through a second codec,
    scattered."""

    def __init__(self, options: CodecOptions | None = None):
        super().__init__(options)
        self.values = _values_codec(self.options.values)
        self._raw = self.values.name == "none"

    def gain(self, spec: TensorSpec) -> Tensor | None:
        return None

    def _values_spec(self, spec: TensorSpec) -> TensorSpec:
        return _row(self.kept(spec), spec.dtype, spec.device)

    def _scatter(
        self, parts: tuple[Tensor, ...], selection: Selection, spec: TensorSpec, ctx: Context
    ) -> Tensor:
        values, gain = parts[0], self.gain(spec)
        if not self._raw:
            values = self.values.decode(parts, self._values_spec(spec), ctx)
        if gain is not None:
            values = as_message(values * gain, self._values_spec(spec))
        return selection.scatter(values, spec.shape)

    def error_bound(self, spec: TensorSpec) -> float:
        values = self.values.error_bound(self._values_spec(spec))
        return bounds.largest_part(self.options.density, values)

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        values = self.values.gaussian_error_bound(self._values_spec(spec))
        return bounds.largest_part(self.options.density, values)

    def _blind_error_bound(self, spec: TensorSpec) -> float:
        """The error bound where entries are not chosen by their size."""
        return max(1.0, self._with_gain(spec, self.values.error_bound(self._values_spec(spec))))

    def _blind_gaussian_error_bound(self, spec: TensorSpec) -> float:
        values = self.values.gaussian_error_bound(self._values_spec(spec))
        return bounds.random_part(self.kept(spec) / max(spec.numel, 1), self._with_gain(spec, values))

    def _with_gain(self, spec: TensorSpec, error: float) -> float:
        """The error of values that come with `error`, times the gain."""
        gain = self.gain(spec)
        largest = 1.0 if gain is None or not gain.numel() else gain.max().item()
        return largest - 1 + largest * error

    def refuses(self, spec: TensorSpec) -> str:
        return self.values.refuses(self._values_spec(spec))


def gather(x: Tensor, selection: Selection) -> Tensor:
    """The kept entries of `x`, or nan in their place if any entry of `x` is not finite.

    For selections that were not made from `x`: an overflow outside of them must reach the receiver too.
    """
    return kernels(x.device).gather(x, selection.entries, selection.count)


@register("randomk")
class RandomK(Sparse):
    """Keeps random entries, one from each of k equal stretches of a row; both sides draw them, no index is
    sent.

    Stich et al., Sparsified SGD with Memory, NeurIPS 2018, with stratified sampling in place of a uniform
    subset: each entry is still kept with probability about density, but the indices come out sorted and cost
    no pass over x.
    """

    examples = ({"values": "bf16"},)

    class Options(SparseOptions):
        rows: Literal["sample", "tensor"] = "sample"
        """What counts as a row: each index of dim 0, or the tensor as a whole."""

        unbiased: bool = False
        """Whether the receiver divides each value by the probability of its being kept, so that the mean of
        many messages is x. The error of one message grows; leave it off with error feedback."""

    def kept(self, spec: TensorSpec) -> int:
        rows, length = select.rows_of(spec.shape, self.options.rows)
        return rows * select.kept_of(length, self.options.density)

    def gain(self, spec: TensorSpec) -> Tensor | None:
        if not self.options.unbiased:
            return None
        rows, length = select.rows_of(spec.shape, self.options.rows)
        k = select.kept_of(length, self.options.density)
        return select.stretches(length, k, spec.device).float().repeat(rows)

    def layout(self, spec: TensorSpec) -> Layout:
        return self.values.layout(self._values_spec(spec))

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        ctx.selection = self._draw(TensorSpec.of(x), ctx)
        return self.values.encode_into(gather(x, ctx.selection), ctx, out)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        ctx.selection = self._draw(spec, ctx)
        return self._scatter(parts, ctx.selection, spec, ctx)

    def error_bound(self, spec: TensorSpec) -> float:
        return self._blind_error_bound(spec)

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        return self._blind_gaussian_error_bound(spec)

    def stability(self, spec: TensorSpec) -> Stability:
        longest = math.ceil(spec.numel / max(self.kept(spec), 1)) or 1  # entries of which one is kept
        values = self.values.stability(self._values_spec(spec)).constant
        if self.options.unbiased:
            return Stability(math.sqrt(longest * (1 + values**2) - 1), unbiased=True)
        return Stability(bounds.largest_part(1 / longest, values))

    @property
    def unbiased(self) -> bool:
        return self.options.unbiased

    def _draw(self, spec: TensorSpec, ctx: Context) -> Selection:
        rows, length = select.rows_of(spec.shape, self.options.rows)
        # another seed than the values codec's, whose rounding must not depend on what was selected
        generator = replace(ctx, seed=ctx.seed + 1).generator(spec.device)
        return select.stratified(rows, length, select.kept_of(length, self.options.density), generator)


@register("column")
class TopColumns(Sparse):
    """Keeps whole hidden channels (indices of the last dim), those of largest L2 norm over all other dims.

    Structured sparsity: one index per channel instead of one per entry. The values travel as [rows, channels
    kept].
    """

    Options = SparseOptions
    examples = ({"values": "bf16"},)

    def kept(self, spec: TensorSpec) -> int:
        return self._values_spec(spec).numel

    def _values_spec(self, spec: TensorSpec) -> TensorSpec:
        rows, channels = self._matrix(spec)
        return TensorSpec((rows, select.kept_of(channels, self.options.density)), spec.dtype, spec.device)

    def layout(self, spec: TensorSpec) -> Layout:
        channels, values = self._matrix(spec)[1], self._values_spec(spec)
        kept = values.shape[1]
        return self._coder(channels, kept).layout(channels, kept) + self.values.layout(values)

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        spec = TensorSpec.of(x)
        matrix, kept = x.reshape(self._matrix(spec)), self._values_spec(spec).shape[1]
        chosen = select.exact(_column_norms(matrix).unsqueeze(0), kept)
        columns = chosen.indices
        ctx.selection = self._entries(columns, self._matrix(spec))
        indices = self._coder(matrix.shape[1], kept).encode(chosen)
        values = matrix.index_select(1, columns)
        return indices + self.values.encode_into(values, ctx, out and out[len(indices) :])

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        rows, channels = self._matrix(spec)
        kept = self._values_spec(spec).shape[1]
        coder = self._coder(channels, kept)
        split = len(coder.layout(channels, kept))
        columns = coder.decode(parts[:split], channels, kept).indices
        ctx.selection = self._entries(columns, (rows, channels))
        return self._scatter(parts[split:], ctx.selection, spec, ctx)

    @staticmethod
    def _matrix(spec: TensorSpec) -> tuple[int, int]:
        """(rows, channels); a 0-dim tensor is one channel, a tensor without entries has none."""
        channels = spec.shape[-1] if spec.shape else 1
        return (spec.numel // channels, channels) if spec.numel else (0, 0)

    @staticmethod
    def _coder(channels: int, kept: int) -> Any:
        return coding.CODERS[coding.smallest(tuple(coding.CODERS), channels, kept)]

    @staticmethod
    def _entries(columns: Tensor, shape: tuple[int, int]) -> Selection:
        rows, channels = shape
        row = torch.arange(rows, dtype=torch.int64, device=columns.device).unsqueeze(1)
        return Selection.at((row * channels + columns).flatten(), rows * channels)


def _column_norms(matrix: Tensor) -> Tensor:
    """L2 norm of each column, in units of the largest finite magnitude, so that no square leaves the
    range."""
    if not matrix.numel():
        return matrix.new_zeros(matrix.shape[1])
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    largest = wide.abs().nan_to_num_(0, 0).amax()
    return (wide / torch.where(largest > 0, largest, 1)).square().sum(0)
