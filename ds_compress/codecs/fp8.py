"""Eight-bit floats with a scale."""

import math
from typing import Literal

import torch
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs.groups import GroupSize, group_shape, join, split
from ds_compress.kernels import native
from ds_compress.kernels.native import float8

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

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        values = split(x, self.options.group_size)
        if values.dtype in float8.FLOATS and native.serves("float8", x.device, x.numel()):
            return float8.encode(values, self._dtype)
        values = values.float()
        largest = torch.finfo(self._dtype).max
        scale = values.abs().amax(1) / largest
        # e4m3 has no inf: a group that holds inf or nan shows it by its scale, which makes all of it nan
        scaled = values / torch.where(scale != 0, scale, 1)[:, None]
        return scaled.clamp_(-largest, largest).to(self._dtype).view(torch.uint8), scale

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        codes, scale = parts
        if native.serves("float8", spec.device, spec.numel):
            # what `join` does to fp16 is done in fp32
            wide = spec.dtype if spec.dtype == torch.bfloat16 else torch.float32
            values = float8.decode(codes, scale, self._dtype, wide)
        else:
            values = codes.view(self._dtype).float().mul_(scale[:, None])
        return join(values, spec, self.options.group_size)

    def error_bound(self, spec: TensorSpec) -> float:
        info = torch.finfo(self._dtype)
        lost = info.smallest_normal * info.eps / 2 / info.max  # of the largest value, where digits end
        return info.eps / 2 + math.sqrt(group_shape(spec, self.options.group_size)[1]) * lost

    @property
    def _dtype(self) -> torch.dtype:
        return _FORMATS[self.options.format]
