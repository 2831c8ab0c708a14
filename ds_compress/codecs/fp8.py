"""Eight-bit floats with a scale."""

import functools
import math
from typing import Literal

import torch
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, Parts, TensorSpec, register
from ds_compress.codecs.shapes import GroupSize, group_shape, join, split
from ds_compress.kernels.backends import kernels

_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@register("fp8")
class Float8(Codec):
    """Eight-bit floats, scaled so that the largest magnitude of the tensor or group is the largest of the
    format."""

    examples = ({}, {"format": "e5m2"}, {"group_size": 128})

    class Options(CodecOptions):
        format: Literal["e4m3", "e5m2"] = "e4m3"
        """e4m3 has 4 bits of precision down to 2^-15 of the largest magnitude, e5m2 3 bits down to 2^-30."""

        group_size: GroupSize = "tensor"
        """Values that share the fp32 scale: all of the tensor, each index of its last dimension (channel), or
        so many in a row."""

    def layout(self, spec: TensorSpec) -> Layout:
        groups, size = group_shape(spec, self.options.group_size)
        return ((groups, size), torch.uint8), ((groups,), torch.float32)

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        return kernels(x.device).encode_fp8(split(x, self.options.group_size), self._dtype, out)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        codes, scales = parts
        # what `join` does to fp16 is done in fp32
        wide = spec.dtype if spec.dtype == torch.bfloat16 else torch.float32
        values = kernels(codes.device).decode_fp8(codes, scales, self._dtype, wide)
        return join(values, spec, self.options.group_size)

    def error_bound(self, spec: TensorSpec) -> float:
        info = torch.finfo(self._dtype)
        lost = info.smallest_normal * info.eps / 2 / info.max  # of the largest value, where digits end
        return info.eps / 2 + math.sqrt(group_shape(spec, self.options.group_size)[1]) * lost

    @functools.cached_property
    def _dtype(self) -> torch.dtype:
        return _FORMATS[self.options.format]
