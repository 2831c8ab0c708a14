"""Sparsifying codecs: their shared base class, and random selection.

A packet contains the indices of the selected entries (kernels/topk/index_coding), unless the receiver knows
them, and then their values, coded by a second codec. The selection depends on the indices alone: a selected
zero is still selected.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, Parts, TensorSpec, build, register
from ds_compress.codecs import bounds
from ds_compress.codecs.mixins import Selects, VariableSizePayload
from ds_compress.codecs.shapes import clear_rows, matrix_shape, row_bits, with_rows, zero_rows
from ds_compress.errors import CompressionError
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.topk.selection import Selection
from ds_compress.stability import Stability

NARROW = 32
"""Values of a row for which a bit is a small part of a packet."""


@lru_cache(maxsize=1024)  # successive messages have the same shape
def count_kept(length: int, density: float) -> int:
    """Return how many of `length` entries are selected at `density`, at least one.

    Subtracting 1e-9 absorbs the rounding of the product.
    """
    return min(length, max(1, math.ceil(density * length - 1e-9)))


@lru_cache(maxsize=1024)
def rows_of(shape: tuple[int, ...], row: str) -> tuple[int, int]:
    """Return (rows, entries per row): a row is one sample (an index of dim 0) or the whole tensor."""
    numel = torch.Size(shape).numel()
    rows = shape[0] if row == "sample" and len(shape) > 1 else 1
    return rows, numel // rows if rows else 0


def stratified(rows: int, d: int, k: int, generator: torch.Generator) -> Selection:
    """Draw one random entry from each of k segments of every row; their lengths differ by one at most."""
    draw = torch.rand(rows, k, generator=generator, device=generator.device, dtype=torch.float64)
    ends = torch.arange(k + 1, dtype=torch.int64, device=generator.device) * d
    length = ends.div(max(k, 1), rounding_mode="floor").diff()
    inside = (draw * length).long() + (length.cumsum(0) - length)
    chosen = inside + torch.arange(rows, dtype=torch.int64, device=generator.device).unsqueeze(1) * d
    return Selection.at(chosen.flatten(), rows * d)


def _values_codec(choice: object) -> Codec:
    """Build the codec of the selected values."""
    return build("none" if choice == "raw" else choice, "values")


_row = lru_cache(lambda count, dtype, device: TensorSpec((count,), dtype, device))
"""Spec of `count` values; cached because every message needs it."""


class SparseOptions(CodecOptions):
    """Options of all sparsifying codecs."""

    density: float = Field(0.1, gt=0, le=1)
    """Fraction of the entries that are sent."""
    values: Any = Field("raw", json_schema_extra={"anyOf": [{"const": "raw"}, {"registry": "codec"}]})
    """How the selected values are sent: uncompressed, or through the codec with this name or description."""

    @field_validator("values")
    @classmethod
    def _values_are_a_plain_codec(cls, choice: object) -> object:
        inner = _values_codec(choice)
        if isinstance(inner, (Selects, VariableSizePayload)):
            raise CompressionError(f"values: {inner.name!r} cannot carry the kept values; use e.g. 'bf16'")
        return choice


class Sparse(Codec, Selects):
    """Base of sparsifying codecs: gathers the selected values, codes them, and scatters them."""

    is_blind: bool = True
    """Whether the selection ignores the magnitudes of the message."""

    def __init__(self, options: CodecOptions | None = None):
        super().__init__(options)
        self.values = _values_codec(self.options.values)
        self._raw = self.values.name == "none"
        self.keeps_zeros = self.values.keeps_zeros

    def _values_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the shape, dtype and device of the selected values."""
        return _row(self.kept(spec), spec.dtype, spec.device)

    def _marked_rows(self, shape: tuple[int, ...]) -> int:
        """Return the rows of a message that have a bit each: whether all their values are 0. Those of images,
        and narrow ones, have none."""
        if self.keeps_zeros or len(shape) > 3:
            return 0
        rows, width = matrix_shape(shape)
        return rows if rows > 1 and width >= NARROW else 0

    def _values_layout(self, spec: TensorSpec) -> Layout:
        return self.values.layout(self._values_spec(spec)) + row_bits(self._marked_rows(spec.shape))

    def _encode_values(self, x: Tensor, values: Tensor, ctx: Context, out: Parts | None) -> Parts:
        """Encode the selected `values` of `x`."""
        if not self._marked_rows(x.shape):
            return self.values.encode_into(values, ctx, out)
        return with_rows(self.values.encode_into(values, ctx, out and out[:-1]), zero_rows(x), out)

    def _scatter(self, parts: Parts, selection: Selection, spec: TensorSpec, ctx: Context) -> Tensor:
        """Decode the values and scatter them into a tensor of zeros."""
        own = parts[:-1] if self._marked_rows(spec.shape) else parts
        values = own[0] if self._raw else self.values.decode(own, self._values_spec(spec), ctx)
        return clear_rows(selection.scatter(values, spec.shape), parts[len(own) :])

    def error_bound(self, spec: TensorSpec) -> float:
        values = self.values.error_bound(self._values_spec(spec))
        return max(1.0, values) if self.is_blind else bounds.largest_part(self.options.density, values)

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        values = self.values.gaussian_error_bound(self._values_spec(spec))
        if self.is_blind:
            return bounds.random_part(self.kept(spec) / max(spec.numel, 1), values)
        return bounds.largest_part(self.options.density, values)

    def refuses(self, spec: TensorSpec) -> str:
        return self.values.refuses(self._values_spec(spec))


def gather(x: Tensor, selection: Selection) -> Tensor:
    """Return the selected entries of `x`; all of them are nan if any entry of `x` is not finite.

    This is for selections that do not depend on `x`: the receiver must also see an overflow outside of them.
    """
    return kernels(x.device).gather(x, selection.entries, selection.count)


@register("randomk")
class RandomK(Sparse):
    """Keeps one random entry of each of k equal segments of a row; both sides draw them, so no index is sent.

    Stich et al., Sparsified SGD with Memory, NeurIPS 2018, with stratified sampling instead of a uniform
    subset. The probability of each entry is still about `density`, but indices are sorted and need no pass
    over x.
    """

    examples = ({"values": "bf16"}, {"values": {"name": "quantize", "bits": 4, "group_size": 128}})

    class Options(SparseOptions):
        rows: Literal["sample", "tensor"] = "sample"
        """What is a row: each index of dim 0, or the whole tensor."""

    def kept(self, spec: TensorSpec) -> int:
        rows, length = rows_of(spec.shape, self.options.rows)
        return rows * count_kept(length, self.options.density)

    def layout(self, spec: TensorSpec) -> Layout:
        return self._values_layout(spec)

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        ctx.selection = self._draw(TensorSpec.of(x), ctx)
        return self._encode_values(x, gather(x, ctx.selection), ctx, out)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        ctx.selection = self._draw(spec, ctx)
        return self._scatter(parts, ctx.selection, spec, ctx)

    def stability(self, spec: TensorSpec) -> Stability:
        longest = math.ceil(spec.numel / max(self.kept(spec), 1)) or 1  # entries of the longest segment
        values = self.values.stability(self._values_spec(spec)).constant
        return Stability(bounds.largest_part(1 / longest, values))

    def _draw(self, spec: TensorSpec, ctx: Context) -> Selection:
        """Draw the selection from the seed of the message, equal on both sides."""
        rows, length = rows_of(spec.shape, self.options.rows)
        # a different seed than that of the values codec, whose rounding must not depend on the selection
        generator = replace(ctx, seed=ctx.seed + 1).generator(spec.device)
        return stratified(rows, length, count_kept(length, self.options.density), generator)
