"""Eight-bit floats with a scale."""

from typing import Literal

import torch
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs.groups import GroupSize, group_shape, join, split

_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@register("fp8")
class Float8(Codec):
    """Eight-bit floats, scaled so that the largest magnitude of the tensor or group is the largest of the format.

    format: "e4m3" has 4 bits of precision down to 2^-15 of the largest magnitude, "e5m2" 3 bits down to 2^-30.
    group_size: values that share the fp32 scale: "tensor", "channel" or a multiple of 8.
    """

    examples = ({}, {"format": "e5m2"}, {"group_size": 128})

    class Options(CodecOptions):
        format: Literal["e4m3", "e5m2"] = "e4m3"
        group_size: GroupSize = "tensor"

    def layout(self, spec: TensorSpec) -> Layout:
        groups, size = group_shape(spec, self.options.group_size)
        return ((groups, size), torch.uint8), ((groups,), torch.float32)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        values = split(x, self.options.group_size).float()
        largest = torch.finfo(self._dtype).max
        scale = values.abs().amax(1) / largest
        # e4m3 has no inf: a group that holds inf or nan shows it by its scale, which makes all of it nan
        scaled = values / torch.where(scale != 0, scale, 1)[:, None]
        return scaled.clamp_(-largest, largest).to(self._dtype).view(torch.uint8), scale

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        codes, scale = parts
        return join(codes.view(self._dtype).float().mul_(scale[:, None]), spec, self.options.group_size)

    @property
    def _dtype(self) -> torch.dtype:
        return _FORMATS[self.options.format]
