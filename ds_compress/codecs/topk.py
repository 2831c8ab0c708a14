"""The codec that keeps the entries of largest magnitude."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, Parts, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.mixins import FollowsForward, Selects, layers
from ds_compress.codecs.sidco import above_threshold, least_share
from ds_compress.codecs.sparse import Sparse, SparseOptions, count_kept, gather, rows_of
from ds_compress.errors import CompressionError
from ds_compress.kernels.topk import index_coding as coding
from ds_compress.kernels.topk.selection import Selection, largest
from ds_compress.stability import Stability


class _TopKPlan(NamedTuple):
    """What follows from the options for a shape."""

    rows: int
    length: int
    """Entries of a row."""
    kept: int
    """Entries, over all rows."""
    coder: Any
    """One of `coding.CODERS`."""
    parts: int
    """Payload tensors that it makes."""


@register("topk")
class TopK(Sparse, FollowsForward):
    """Keeps the entries of largest magnitude, exactly k = max(1, ceil(density * d)) of each row's d.

    With `indices: "reuse"`, backward sends the gradient at the entries that forward kept, and no indices: the
    exact gradient of the sparsified forward map (Rudakov et al., arXiv 2401.07788).
    """

    examples = (
        {"indices": "bitmask", "values": "bf16"},
        {"indices": "rice", "values": "bf16"},
        {"indices": "rice", "values": {"name": "quantize", "bits": 4, "group_size": 128}},
        {"indices": "reuse", "values": "bf16"},
        {"density": 0.01, "values": "bf16"},
        {"select": "sidco", "values": "bf16"},
    )

    class Options(SparseOptions):
        indices: Literal["auto", "bitmask", "int16", "int32", "rice", "reuse"] = "auto"
        """How the indices travel: auto takes the smallest of bitmask, int16 and int32; rice is smaller and
        slower; reuse (backward only) sends none."""
        rows: Literal["sample", "tensor"] = "sample"
        """What counts as a row: each index of dim 0, or the tensor as a whole."""
        select: Literal["exact", "sidco"] = "exact"
        """How entries are found: exact, or sidco, which fits a threshold to the magnitudes of a row
        (Abdelmoniem et al., arXiv 2101.10761): for gradients on a GPU, where it takes fewer passes."""

    def __init__(self, options: CodecOptions | None = None):
        super().__init__(options)
        self._forward: Selects = self  # whose selection "reuse" reads
        self.is_blind = self.options.indices == "reuse"

    def paired_with(self, forward: Codec) -> Codec:
        if self.options.indices != "reuse":
            return self
        selecting = next(layers(forward, Selects), None)  # type: ignore[type-abstract]
        if selecting is None:
            own = TopK(self.options.model_copy(update={"indices": "auto"}))
            own.note = (
                f"indices 'reuse' finds nothing to reuse, {forward.name!r} selects no entries; using 'auto'"
            )
            return own
        theirs = {
            key: getattr(forward.options, key) for key in ("density", "rows") if hasattr(forward.options, key)
        }
        for key in theirs:
            mine = getattr(self.options, key)
            if key in self.options.model_fields_set and mine != theirs[key]:
                raise CompressionError(
                    f"topk.{key}: {mine!r} backward with indices 'reuse', but {theirs[key]!r} in forward "
                    f"{forward.name!r}; leave it out backward, or do not reuse"
                )
        copy = TopK(self.options.model_copy(update=theirs))
        copy._forward = selecting
        return copy

    def forward_partner(self) -> Codec | None:
        if self.options.indices != "reuse":
            return None
        return TopK(self.options.model_copy(update={"indices": "auto"}))

    def kept(self, spec: TensorSpec) -> int:
        if self._forward is not self:
            return self._forward.kept(spec)
        return self._plan(spec.shape).kept

    def layout(self, spec: TensorSpec) -> Layout:
        values = self._values_layout(spec)
        if self.options.indices == "reuse":
            return values
        plan = self._plan(spec.shape)
        return plan.coder.layout(spec.numel, plan.kept) + values

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        if self.options.indices == "reuse":
            return self._encode_values(x, gather(x, self._reused(TensorSpec.of(x), ctx)), ctx, out)
        plan, place = self._plan(x.shape), out[-1] if out and self._raw else None
        ctx.selection = selection = self._select(x.contiguous(), plan, place)
        values = selection.take(x)
        indices: Parts = plan.coder.encode(selection, out and out[: plan.parts])
        if out and values is place:
            return out  # as it came: the channel has nothing left to copy
        return indices + self._encode_values(x, values, ctx, out and out[plan.parts :])

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if self.options.indices == "reuse":
            return self._scatter(parts, self._reused(spec, ctx), spec, ctx)
        plan = self._plan(spec.shape)
        ctx.selection = selection = plan.coder.decode(parts[: plan.parts], spec.numel, plan.kept)
        return self._scatter(parts[plan.parts :], selection, spec, ctx)

    def error_bound(self, spec: TensorSpec) -> float:
        if self.options.select == "sidco":  # of those above its threshold it keeps the first ones
            return max(1.0, self.values.error_bound(self._values_spec(spec)))
        return super().error_bound(spec)

    def stability(self, spec: TensorSpec) -> Stability:
        if self.options.indices == "reuse":  # of the entries that it sends, see `sent`
            return Stability(self.values.stability(self._values_spec(spec)).constant)
        if self.options.select == "sidco" and spec.numel:
            length = self._plan(spec.shape).length
            share = least_share(count_kept(length, self.options.density), length)
            return Stability(bounds.largest_part(share, self.values.error_bound(self._values_spec(spec))))
        return Stability(super().error_bound(spec))

    def sent(self, spec: TensorSpec, ctx: Context) -> Tensor | None:
        if self.options.indices != "reuse":
            return None
        kept = torch.ones(self.kept(spec), dtype=torch.float32, device=spec.device)
        return self._reused(spec, ctx).scatter(kept, spec.shape) > 0

    def _select(self, x: Tensor, plan: _TopKPlan, values: Tensor | None) -> Selection:
        k = count_kept(plan.length, self.options.density)
        if self.options.select == "sidco":
            selection = above_threshold(x.view(plan.rows, plan.length), k)
            selection.values = gather(x, selection)
            return selection
        return largest(x.view(plan.rows, plan.length), k, values)

    @functools.cached_property
    def _plan(self) -> Callable[[tuple[int, ...]], _TopKPlan]:
        """Return the plan of a shape, from a cache: each message needs it."""
        options = self.options

        @functools.lru_cache
        def plan(shape: tuple[int, ...]) -> _TopKPlan:
            rows, length = rows_of(shape, options.rows)
            kept = rows * count_kept(length, options.density)
            name, numel = options.indices, rows * length
            if name in ("auto", "reuse"):
                name = coding.smallest(("bitmask", "int16", "int32"), numel, kept)
            coder = coding.CODERS[name]
            return _TopKPlan(rows, length, kept, coder, len(coder.layout(numel, kept)))

        return plan

    def _reused(self, spec: TensorSpec, ctx: Context) -> Selection:
        place = f"topk.indices: 'reuse' at boundary {ctx.boundary}, {ctx.direction}"
        if ctx.selection is None:
            raise CompressionError(
                f"{place}: no selection is kept for this message; "
                "allowed backward only, after a forward message whose codec selects entries"
            )
        if ctx.selection.count != self.kept(spec):
            raise CompressionError(
                f"{place}: the forward message kept {ctx.selection.count} entries, expected "
                f"{self.kept(spec)} of shape {spec.shape}; use the same density and rows in both directions"
            )
        return ctx.selection
