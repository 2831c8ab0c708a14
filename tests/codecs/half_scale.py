"""A codec as a user writes one, in a file of their own."""

from typing import Literal

import torch

from ds_compress import Codec, CodecOptions, register

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@register("half_scale")
class HalfScale(Codec):
    """Eight bits for each value, in steps of a 127th of the largest."""

    class Options(CodecOptions):
        dtype: Literal["bf16", "fp32"] = "fp32"
        """Dtype in which the step is sent."""

    def layout(self, spec):
        return (spec.shape, torch.int8), ((), DTYPES[self.options.dtype])

    def encode(self, x, ctx):
        step = x.float().abs().max() / 127 if x.numel() else x.new_zeros((), dtype=torch.float32)
        codes = torch.where(step > 0, x.float() / step, 0.0).round().nan_to_num(0)
        return codes.to(torch.int8), step.to(DTYPES[self.options.dtype])

    def decode(self, parts, spec, ctx):
        codes, step = parts
        return (codes.float() * step).to(spec.dtype)

    def error_bound(self, spec):
        return min(1.0, spec.numel**0.5 / 254 + 2.0**-8)

    def gaussian_error_bound(self, spec):
        return 0.05
