"""The state of a feedback: one entry of `ctx.memory` for each boundary, direction and tensor position.

    key                                        entry
    forward/sender/ef                          residual of all micro-batches
    backward/mirror/ef21/micro_batch3          scope "micro_batch": of micro-batch 3 of every step
    backward/sender/loco/4x128x64.codes        on_new_shape "keep": of messages of this shape; int8 values
    backward/sender/loco/4x128x64.scales       and their scales

Only the sender has "sender" entries. Both sides have "mirror" entries, bit-identical.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from ds_compress.codec import Context, TensorSpec
from ds_compress.codecs.mixins import Stateful, check_entry
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.feedback.reference import GROUP, decode_int8, encode_int8
from ds_compress.kernels.numerics import wide
from ds_compress.registry import Options

Role = Literal["sender", "mirror"]
log = logging.getLogger("ds_compress")


class StateOptions(Options):
    scope: Literal["boundary", "micro_batch"] = "boundary"
    """boundary: one buffer for all messages; micro_batch: one for each position of a micro-batch in its
    step."""
    on_new_shape: Literal["reset", "keep"] = "reset"
    """What a message of another shape does: start again from zero, or use a buffer of its own."""


class State:
    """Reads and replaces one buffer.

    Its values are fp32, or float64 for float64 messages, whatever dtype it is stored in.
    """

    def __init__(self, name: str, role: Role, options: StateOptions, dtype: Literal["fp32", "bf16", "int8"]):
        """
        Args:
            name: of the feedback.
            dtype: in which the buffer is stored; fp32 means float64 for float64 messages.
        """
        self.name = name
        self.role = role
        self.options = options
        self.dtype = dtype
        self._warned = False

    def load(self, ctx: Context, spec: TensorSpec) -> Tensor:
        """Return the buffer for messages of `spec`: zeros until something was saved."""
        return self.values(self.stored(ctx, spec), spec)

    def save(self, ctx: Context, spec: TensorSpec, value: Tensor, keep: Tensor) -> None:
        """Store `value` if `keep` (bool, one element on the device) is true, else keep the old buffer."""
        new, old, choose = self.to_stored(value, spec), self.stored(ctx, spec), kernels(keep.device).choose
        self.put(ctx, spec, tuple(choose(keep, *both) for both in zip(new, old)))

    def put(self, ctx: Context, spec: TensorSpec, new: tuple[Tensor, ...]) -> None:
        """Store `new`, which `to_stored` returned."""
        for key, entry in zip(self._keys(ctx, spec), new):
            ctx.memory[key] = entry.contiguous()  # of a transposed message it is not

    def values(self, stored: tuple[Tensor, ...], spec: TensorSpec) -> Tensor:
        """Return the values of `stored`."""
        value = decode_int8(*stored) if len(stored) == 2 else stored[0]
        return value.to(wide(spec.dtype))

    def to_stored(self, value: Tensor, spec: TensorSpec) -> tuple[Tensor, ...]:
        """Return `value` as it is stored."""
        if self.dtype == "int8":
            return encode_int8(value)
        return (value.to(torch.bfloat16 if self.dtype == "bf16" else wide(spec.dtype)),)

    def check(self, memory: Mapping[str, Tensor]) -> None:
        """Check the entries of one direction, just read from a checkpoint; see `Stateful.check_memory`."""
        for key, value in memory.items():
            stem = key.partition(".")[0]
            if stem.split("/")[1:3] != [self.role, self.name]:
                continue
            if self.dtype == "int8":
                codes, scales = memory.get(f"{stem}.codes", value), memory.get(f"{stem}.scales", value)
                check_entry(key, codes, torch.int8)
                check_entry(key, scales, torch.float32, shape=(-(-codes.numel() // GROUP),))
            elif self.dtype == "bf16":
                check_entry(key, value, torch.bfloat16)
            else:
                check_entry(key, value, torch.float32, torch.float64)

    def _keys(self, ctx: Context, spec: TensorSpec) -> list[str]:
        key = f"{ctx.direction}/{self.role}/{self.name}"
        if self.options.scope == "micro_batch":
            key += f"/micro_batch{ctx.micro_batch}"
        if self.options.on_new_shape == "keep":
            key += "/" + "x".join(map(str, spec.shape))
        return [f"{key}.codes", f"{key}.scales"] if self.dtype == "int8" else [key]

    def stored(self, ctx: Context, spec: TensorSpec) -> tuple[Tensor, ...]:
        """Return the buffer as it is stored: one tensor, or int8 codes and their scales."""
        keys = self._keys(ctx, spec)
        found = [ctx.memory[key] for key in keys if key in ctx.memory]
        if found and found[0].shape == spec.shape:
            return tuple(entry.to(spec.device) for entry in found)
        if found and not self._warned:
            self._warned = True
            log.warning(
                f"{self.name}: boundary {ctx.boundary}, {ctx.direction}, tensor {ctx.position}: messages of "
                f"shape {list(spec.shape)} instead of {list(found[0].shape)}; its state starts from zero, "
                "here and at every later change"
            )
        return self.zeros(spec)

    def stored_for_writing(self, ctx: Context, spec: TensorSpec) -> tuple[Tensor, ...]:
        """Return the stored buffer to overwrite: a copy if a copy of the memory refers to its tensors too."""
        keys = [key for key in self._keys(ctx, spec) if key in ctx.memory]
        shared = any(_references(ctx.memory, key) > _ONE_REFERENCE for key in keys)
        stored = self.stored(ctx, spec)
        return tuple(map(torch.clone, stored)) if shared else stored

    def zeros(self, spec: TensorSpec) -> tuple[Tensor, ...]:
        """Return the buffer before anything was saved."""
        return self.to_stored(torch.zeros(spec.shape, dtype=wide(spec.dtype), device=spec.device), spec)


def _references(memory: Mapping[str, object], key: str) -> int:
    """Count references to the entry: `_ONE_REFERENCE` if only `memory` has one."""
    return sys.getrefcount(memory[key])


_ONE_REFERENCE = _references({"": object()}, "")


class StatefulFeedback(Stateful):
    """A feedback whose entries in the memory are those of one `State`."""

    state: State

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        self.state.check(memory)


def residuals(memory: Mapping[str, Tensor], direction: str) -> Iterator[Tensor]:
    """Yield the residuals of `direction`: the values of every buffer that only the sender has."""
    for key, entry in memory.items():
        if key.startswith(f"{direction}/sender/") and not key.endswith(".scales"):
            buffer = key.removesuffix(".codes")
            if key != buffer:
                entry = decode_int8(entry, memory[f"{buffer}.scales"])
            yield entry
