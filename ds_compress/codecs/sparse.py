"""Codecs that keep some of the entries and send zero for the others.

The packet holds the indices of the kept entries (ds_compress.kernels.indices), then their values through a second
codec. The kept entries are known from their indices alone: a kept zero is still kept.
"""

import logging
from abc import abstractmethod
from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from ds_compress import select
from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, build, register
from ds_compress.errors import CompressionError
from ds_compress.kernels import indices as coding

log = logging.getLogger("ds_compress")


def _values_codec(choice: object) -> Codec:
    return build("none" if choice == "raw" else choice, "values")


class SparseOptions(CodecOptions):
    density: float = Field(0.1, gt=0, le=1)
    """Fraction of the entries that is kept."""

    values: str | dict[str, Any] = "raw"
    """How the kept values travel: as they are, or through the codec of that name or description."""

    @field_validator("values")
    @classmethod
    def _values_are_a_codec(cls, choice: object) -> object:
        if _values_codec(choice).selects:
            raise CompressionError("the kept values cannot be selected from a second time; use e.g. 'bf16'")
        return choice


class Sparse(Codec):
    """What sparsifying codecs share: the values of a selection, gathered, sent through a second codec, scattered."""

    selects = True

    def __init__(self, options: CodecOptions | None = None):
        super().__init__(options)
        self.values = _values_codec(self.options.values)

    @abstractmethod
    def kept(self, spec: TensorSpec) -> int:
        """How many entries of a tensor of `spec` are kept, over all rows."""

    def _values_spec(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec((self.kept(spec),), spec.dtype, spec.device)

    def _gather(self, x: Tensor, selection: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        return self.values.encode(x.flatten()[selection], ctx)

    def _scatter(self, parts: tuple[Tensor, ...], selection: Tensor, spec: TensorSpec, ctx: Context) -> Tensor:
        values = self.values.decode(parts, self._values_spec(spec), ctx)
        flat = torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device)
        return flat.scatter_(0, selection, values.flatten()).view(spec.shape)


@register("topk")
class TopK(Sparse):
    """Keeps the entries of largest magnitude, exactly k = max(1, ceil(density * d)) of each row's d.

    With `indices: "reuse"`, backward sends the gradient at the entries that forward kept, and no indices: the exact
    gradient of the sparsified forward map (Rudakov et al., arXiv 2401.07788).
    """

    class Options(SparseOptions):
        indices: Literal["auto", "bitmask", "int32", "reuse"] = "auto"
        """How the indices travel; auto takes the smaller of bitmask and int32, reuse (backward) sends none."""

        scope: Literal["sample", "tensor"] = "sample"
        """What counts as a row: each index of dim 0, or the tensor as a whole."""

    def __init__(self, options: CodecOptions | None = None):
        super().__init__(options)
        self._forward: Codec = self

    def paired(self, forward: Codec) -> Codec:
        if self.options.indices != "reuse":
            return self
        if not forward.selects:
            log.warning("topk: indices 'reuse' has nothing to reuse, forward codec %r selects no entries; "
                        "using 'auto'", forward.name)
            return TopK(self.options.model_copy(update={"indices": "auto"}))
        mine, theirs = self.options.density, forward.options.density
        if "density" in self.options.model_fields_set and mine != theirs:
            raise CompressionError(
                f"topk.density: {mine} backward with indices 'reuse', but forward {forward.name!r} keeps {theirs}; "
                "leave it out backward, or do not reuse"
            )
        shared = [key for key in ("density", "scope") if hasattr(forward.options, key)]
        followed = {key: getattr(forward.options, key) for key in shared}
        copy = TopK(self.options.model_copy(update=followed))
        copy._forward = forward
        return copy

    def forward_partner(self) -> Codec | None:
        if self.options.indices != "reuse":
            return None
        return TopK(self.options.model_copy(update={"indices": "auto"}))

    def kept(self, spec: TensorSpec) -> int:
        if self._forward is not self:
            return self._forward.kept(spec)
        rows, length = select.rows_of(spec.shape, self.options.scope)
        return rows * select.kept_of(length, self.options.density)

    def layout(self, spec: TensorSpec) -> Layout:
        coder = self._coder(spec)
        indices = coder.layout(spec.numel, self.kept(spec)) if coder else ()
        return indices + self.values.layout(self._values_spec(spec))

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        spec = TensorSpec.of(x)
        coder = self._coder(spec)
        if coder is None:
            return self._encode_reusing(x, spec, ctx)
        rows, length = select.rows_of(spec.shape, self.options.scope)
        ctx.selection = select.exact(x.reshape(rows, length), select.kept_of(length, self.options.density))
        return coder.encode(ctx.selection, spec.numel) + self._gather(x, ctx.selection, ctx)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        coder = self._coder(spec)
        if coder is None:
            return self._scatter(parts, self._reused(spec, ctx), spec, ctx)
        split = len(coder.layout(spec.numel, self.kept(spec)))
        ctx.selection = coder.decode(parts[:split], spec.numel, self.kept(spec))
        return self._scatter(parts[split:], ctx.selection, spec, ctx)

    def _coder(self, spec: TensorSpec):
        name = self.options.indices
        if name == "reuse":
            return None
        if name == "auto":
            name = coding.smallest(("bitmask", "int32"), spec.numel, self.kept(spec))
        return coding.CODERS[name]

    def _reused(self, spec: TensorSpec, ctx: Context) -> Tensor:
        if ctx.selection is None:
            raise CompressionError(
                f"topk.indices: 'reuse' at boundary {ctx.boundary}, {ctx.direction}: no selection is kept for this "
                "message; allowed backward only, after a forward message whose codec selects entries"
            )
        if ctx.selection.numel() != self.kept(spec):
            raise CompressionError(
                f"topk.indices: 'reuse' at boundary {ctx.boundary}, {ctx.direction}: the forward message kept "
                f"{ctx.selection.numel()} entries, expected {self.kept(spec)} of shape {spec.shape}; use the same "
                "density and scope in both directions"
            )
        return ctx.selection

    def _encode_reusing(self, x: Tensor, spec: TensorSpec, ctx: Context) -> tuple[Tensor, ...]:
        kept = x.flatten()[self._reused(spec, ctx)]
        # an overflow outside the selection must reach the receiver too
        return self.values.encode(torch.where(x.isfinite().all(), kept, torch.nan), ctx)
