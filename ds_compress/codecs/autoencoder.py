"""A codec with weights that are trained along with the model."""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import Codec, CodecOptions, Context, Layout, TensorSpec, register
from ds_compress.codecs import bounds
from ds_compress.codecs.mixins import (
    BothDirections,
    HardwareDependentDecode,
    Learns,
    ReceiverOnlyDecode,
    Stateful,
    check_entry,
    parse_size,
)
from ds_compress.codecs.shapes import (
    LARGEST_FACTOR,
    WIRE_DTYPES,
    arithmetic_dtype,
    as_message,
    boundary_noise,
    matrix_shape,
)
from ds_compress.errors import CompressionError
from ds_compress.kernels.numerics import saturate
from ds_compress.registry import Width

BETAS = 0.9, 0.999


@register("autoencoder")
class Autoencoder(Codec, Stateful, Learns, BothDirections, ReceiverOnlyDecode, HardwareDependentDecode):
    """A linear encoder before and a linear decoder behind the boundary, both trained by the model's own loss.

    The "AE" of Bian et al. (arXiv 2301.02654), the h -> c -> h bottleneck as two layers of the model:

        forward    M (n x h) -> M E (n x c) ==> code -> code D (n x h)
        backward   G_code E^T (n x h) <== G_code = G D^T (n x c) <- G (n x h)
        weights    dE = M^T G_code                      dD = code^T G

    The sender of the forward message holds E, its receiver D. Each accumulates the gradient of its own weight
    over the micro-batches of a step and makes one Adam step at the end (no weight decay, no epsilon: the step
    does not depend on the loss scale). Start: E orthonormal, D = E^T.
    """

    class Options(CodecOptions):
        width: Width | None = None
        """Numbers that stand for a row, c above; null: an eighth of the row."""
        lr: float = Field(1e-3, gt=0, le=1)
        """Learning rate of Adam for encoder and decoder."""
        dtype: Literal["bf16", "fp32"] = "bf16"
        """How the code travels."""

    def _width(self, h: int) -> int:
        return min(self.options.width or max(h // 8, 1), h)

    def layout(self, spec: TensorSpec) -> Layout:
        n, h = matrix_shape(spec.shape)
        return (((n, self._width(h)), WIRE_DTYPES[self.options.dtype]),)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        n, h = matrix_shape(x.shape)
        wire = WIRE_DTYPES[self.options.dtype]
        dtype = arithmetic_dtype(x.dtype, wire)
        m = saturate(x.detach().reshape(n, h).to(dtype), LARGEST_FACTOR)
        if ctx.direction == "forward":
            ctx.stash["autoencoder.input"] = x.detach()
            return ((m @ self._weight("encoder", h, ctx, x.device).to(dtype)).to(wire),)
        self._accumulate("decoder", self._left_by_forward("code", ctx).to(dtype).T @ m, h, ctx)
        return ((m @ self._weight("decoder", h, ctx, x.device).to(dtype).T).to(wire),)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        n, h = matrix_shape(spec.shape)
        dtype = arithmetic_dtype(spec.dtype, WIRE_DTYPES[self.options.dtype])
        code = parts[0].to(dtype)
        if ctx.direction == "forward":
            ctx.stash["autoencoder.code"] = parts[0].clone()  # the buffer it arrived in is used again
            m = code @ self._weight("decoder", h, ctx, spec.device).to(dtype)
        else:
            sent = self._left_by_forward("input", ctx).reshape(n, h).to(dtype)
            self._accumulate("encoder", sent.T @ code, h, ctx)
            m = code @ self._weight("encoder", h, ctx, spec.device).to(dtype).T
        return as_message(m, spec)

    def error_bound(self, spec: TensorSpec) -> float:
        _, h = matrix_shape(spec.shape)
        return self._rounding + (0 if self._width(h) == h else 1)

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        _, h = matrix_shape(spec.shape)
        return bounds.random_part(self._width(h) / max(h, 1), self._rounding)

    @property
    def _rounding(self) -> float:
        """Return the largest error of rounding the code, and the weights in a message of 16 bits."""
        return 4 * torch.finfo(WIRE_DTYPES[self.options.dtype]).eps

    def end_step(self, memory: MutableMapping[str, Tensor], average: Callable[[Tensor], Tensor]) -> None:
        for key in sorted(memory):
            if key.startswith("autoencoder.") and key.endswith(".gradient"):
                self._adam(key.removesuffix(".gradient"), average(memory.pop(key)), memory)

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        for key, value in memory.items():
            if key.startswith("autoencoder."):
                _, _, h, weight, part = f"{key}...".split(".")[:5]
                shape = parse_size(h), self._width(parse_size(h))
                shape = shape if weight == "encoder" else shape[::-1]
                check_entry(key, value, torch.float32, shape=() if part == "step" else shape)

    def _adam(self, name: str, gradient: Tensor, memory: MutableMapping[str, Tensor]) -> None:
        """Make one step of Adam (arXiv 1412.6980), or none if the gradient overflowed."""
        step = memory.get(f"{name}.step", gradient.new_zeros(())) + 1
        first = torch.lerp(gradient, memory.get(f"{name}.first", torch.zeros_like(gradient)), BETAS[0])
        second = torch.lerp(gradient**2, memory.get(f"{name}.second", torch.zeros_like(gradient)), BETAS[1])
        mean, variance = first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step)
        update = torch.where(variance > 0, mean * variance.rsqrt(), 0.0)
        after = {
            "": memory[name] - self.options.lr * update,
            ".step": step,
            ".first": first,
            ".second": second,
        }
        finite = second.isfinite().all()
        for part, new in after.items():
            old = memory.get(name + part, torch.zeros_like(new))
            memory[name + part] = torch.where(finite, new, old)

    def _name(self, weight: str, h: int, ctx: Context) -> str:
        return f"autoencoder.{ctx.position}.{h}.{weight}"

    def _weight(self, weight: str, h: int, ctx: Context, device: torch.device) -> Tensor:
        """Return the fp32 encoder (h x c) or decoder (c x h); it starts equal on all ranks."""
        name = self._name(weight, h, ctx)
        if name not in ctx.memory:
            e = torch.linalg.qr(boundary_noise((h, self._width(h)), ctx)).Q
            ctx.memory[name] = (e if weight == "encoder" else e.T).contiguous().to(device)
        return ctx.memory[name]

    def _accumulate(self, weight: str, gradient: Tensor, h: int, ctx: Context) -> None:
        key = f"{self._name(weight, h, ctx)}.gradient"
        ctx.memory[key] = ctx.memory[key] + gradient if key in ctx.memory else gradient.float()

    def _left_by_forward(self, name: str, ctx: Context) -> Tensor:
        if f"autoencoder.{name}" not in ctx.stash:
            raise CompressionError(
                f"codec 'autoencoder' at boundary {ctx.boundary}: backward message of step {ctx.step}, "
                f"micro-batch {ctx.micro_batch}, without its forward message; both must be compressed by it"
            )
        return ctx.stash[f"autoencoder.{name}"]
