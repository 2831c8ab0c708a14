"""A buffer of a feedback: one entry of `ctx.memory` for each boundary, direction and tensor position.

    key                                        entry
    forward/sender/ef                          residual of all micro-batches
    backward/mirror/ef21/micro_batch3          scope "micro_batch": of micro-batch 3 of every step
    backward/sender/loco/4x128x64.codes        on_new_shape "keep": of messages of this shape; int8 values
    backward/sender/loco/4x128x64.scales       and their scales

"sender" is known to the sender alone; "mirror" is kept by both sides and equal on both, bit by bit.
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
from ds_compress.kernels.feedback.reference import GROUP
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
    """Reads and replaces one buffer. Values are fp32, or float64 for float64 messages, whatever the store
    holds."""

    def __init__(self, name: str, role: Role, options: StateOptions, dtype: Literal["fp32", "bf16", "int8"]):
        """`dtype`: of the store; fp32 means float64 for float64 messages."""
        self.name = name
        self.role = role
        self.options = options
        self.dtype = dtype
        self._said = False

    def load(self, ctx: Context, spec: TensorSpec) -> Tensor:
        """The buffer for messages of `spec`: zeros until something was saved."""
        return self.values(self.stored(ctx, spec), spec)

    def save(self, ctx: Context, spec: TensorSpec, value: Tensor, finite: Tensor) -> None:
        """Make `value` the buffer where `finite` (bool, one element on the device) is true, else leave the
        old one."""
        self.replace(ctx, spec, self.kept(value, spec), finite)

    def replace(self, ctx: Context, spec: TensorSpec, kept: tuple[Tensor, ...], finite: Tensor) -> None:
        """The same of what `kept` made of a value, which bf16 may not hold."""
        if self.dtype == "bf16":
            finite = finite & kernels(finite.device).is_finite(kept[0])
        choose = kernels(finite.device).choose
        self.put(ctx, spec, tuple(choose(finite, *both) for both in zip(kept, self.stored(ctx, spec))))

    def put(self, ctx: Context, spec: TensorSpec, kept: tuple[Tensor, ...]) -> None:
        """Make `kept` the buffer as it is stored."""
        for key, entry in zip(self._keys(ctx, spec), kept):
            ctx.memory[key] = entry

    def values(self, stored: tuple[Tensor, ...], spec: TensorSpec) -> Tensor:
        """What `stored` holds."""
        return (int8_decode(*stored) if len(stored) == 2 else stored[0]).to(wide(spec.dtype))

    def kept(self, value: Tensor, spec: TensorSpec) -> tuple[Tensor, ...]:
        """`value` as it is stored."""
        if self.dtype == "int8":
            return int8_encode(value)
        return (value.to(torch.bfloat16 if self.dtype == "bf16" else wide(spec.dtype)),)

    def check(self, memory: Mapping[str, Tensor]) -> None:
        """Look at the entries of one direction, just read from a checkpoint; see `Stateful.check_memory`."""
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
        """The buffer as it is kept: one tensor, or int8 codes and their scales."""
        keys = self._keys(ctx, spec)
        found = [ctx.memory[key] for key in keys if key in ctx.memory]
        if found and found[0].shape == spec.shape:
            return tuple(entry.to(spec.device) for entry in found)
        if found and not self._said:
            self._said = True
            log.warning(
                "%s: boundary %d, %s, tensor %d: messages of shape %s instead of %s; its state "
                "starts from zero, here and at every later change",
                self.name,
                ctx.boundary,
                ctx.direction,
                ctx.position,
                list(spec.shape),
                list(found[0].shape),
            )
        return self.zeros(spec)

    def own(self, ctx: Context, spec: TensorSpec) -> tuple[Tensor, ...]:
        """The same to be written to: a copy where somebody else holds one of its tensors, too, as a copy of
        the memory does."""
        memory = ctx.memory
        shared = any(_holders(memory, key) > _ALONE for key in self._keys(ctx, spec) if key in memory)
        stored = self.stored(ctx, spec)
        return tuple(map(torch.clone, stored)) if shared else stored

    def zeros(self, spec: TensorSpec) -> tuple[Tensor, ...]:
        """What is kept before anything was saved."""
        if self.dtype == "int8":
            groups = -(-spec.numel // GROUP)
            return (
                torch.zeros(spec.shape, dtype=torch.int8, device=spec.device),
                torch.zeros(groups, dtype=torch.float32, device=spec.device),
            )
        dtype = torch.bfloat16 if self.dtype == "bf16" else wide(spec.dtype)
        return (torch.zeros(spec.shape, dtype=dtype, device=spec.device),)


def _holders(memory: Mapping[str, object], key: str) -> int:
    """How many hold the entry: `_ALONE` if it is but `memory`."""
    return sys.getrefcount(memory[key])


_ALONE = _holders({"": object()}, "")


class KeepsState(Stateful):
    """A feedback whose entries in the memory are those of one state."""

    state: State

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        self.state.check(memory)


def residuals(memory: Mapping[str, Tensor], direction: str) -> Iterator[Tensor]:
    """What the sender holds back in `direction`: the values of every buffer that it alone knows."""
    for key, entry in memory.items():
        if key.startswith(f"{direction}/sender/") and not key.endswith(".scales"):
            buffer = key.removesuffix(".codes")
            yield entry if key == buffer else int8_decode(entry, memory[f"{buffer}.scales"])


def int8_encode(value: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes of value's shape, and one fp32 scale for each group of values in their order."""
    return kernels(value.device).encode_int8(value)


def int8_decode(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 values of what `int8_encode` gave."""
    return kernels(codes.device).decode_int8(codes, scales)
