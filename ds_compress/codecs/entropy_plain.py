"""Entropy coding of the values as they lie: what the ways to spend bits where the size is have in common."""

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, TensorSpec
from ds_compress.errors import CompressionError
from ds_compress.kernels.dispatch import kernels
from ds_compress.kernels.entropy import LARGEST_NUMEL, Frame, frame_of


class Plain(Codec):
    """One step and one table for the whole tensor. `options` are those of codec entropy."""

    name = "entropy"

    def layout(self, spec: TensorSpec) -> Layout:
        words = frame_of(spec.numel, self.options.bits).words if spec.numel else 0
        return (((words,), torch.int16),)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        if not x.numel():
            return (torch.empty(0, dtype=torch.int16, device=x.device),)
        frame = frame_of(x.numel(), self.options.bits)
        return (kernels(x.device).encode_entropy(x.detach().reshape(-1), frame),)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if not spec.numel:
            return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        frame = frame_of(spec.numel, self.options.bits)
        return self._decoded(parts[0], frame, spec.dtype).view(spec.shape)

    def _decoded(self, words: Tensor, frame: Frame, dtype: torch.dtype) -> Tensor:
        """The values, flat."""
        return self._checked(*kernels(words.device).decode_entropy(words, frame, dtype))

    def _checked(self, values: Tensor, valid: Tensor) -> Tensor:
        """
        Raises:
            CompressionError: they are not `valid`.
        """
        if valid.device.type == "cpu" and not valid:  # a GPU's values are nan then: the host does not wait
            raise CompressionError("entropy: a damaged code came, no message is coded like that")
        return values

    def error_bound(self, spec: TensorSpec) -> float:
        return 1.0  # of values that no coder can tell in so few bits: zeros

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        # at high rates an ideal coder has 1.2 * 2^-rate; tables cost most in small messages
        frame = frame_of(max(spec.numel, 1), self.options.bits)
        rate = 16 * frame.room / (frame.numel + 256)
        return min(0.99, 1.3 * 2**-rate)

    def refuses(self, spec: TensorSpec) -> str:
        if spec.numel > LARGEST_NUMEL:
            return f"it has {spec.numel:,} values, allowed: {LARGEST_NUMEL:,}"
        return ""
