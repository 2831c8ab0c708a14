"""The codec of AQ-SGD: messages are changes to buffers that both sides hold for each sample.

    packet                                        an extra packet, only when the message has unseen samples
      payload of C(x - m)                           payload of F(unseen samples), rows [n, ...]
      uint8 [samples]: 1 where it is a change to m
      int64 [samples]: ids, see ds_compress.feedback.aqsgd.sample_ids

Sender and receiver hold m for every sample: samples x elements x 2 bytes (bf16) on each side of each
boundary.

C is the codec of the messages, which are changes; F that of first visits. If F loses no less than C, a first
visit needs nothing more: the message is C of a change to zeros. Otherwise C refines what F gave.
"""

import logging
import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_compress.codec import TYPICAL, Codec, Context, Layout, Parts, TensorSpec, build
from ds_compress.codecs.mixins import (
    FollowsForward,
    ManagesStorage,
    ObservesWarmup,
    Stateful,
    VariableSizePayload,
)
from ds_compress.errors import CompressionError
from ds_compress.feedback.aqsgd.sample_buffers import SampleBuffers
from ds_compress.feedback.aqsgd.sample_ids import SampleIds
from ds_compress.feedback.base import Feedback, FeedbackCodec, encode_and_decode
from ds_compress.kernels.numerics import can_keep, cast, narrow, wide

log = logging.getLogger("ds_compress")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NO_HITS = 1000
"""Messages without a known sample, from the first one on, after which a warning is logged."""
FIRST_VISIT = {"name": "quantize", "bits": 4, "group_size": 128, "hadamard": True}
"""The default of F."""


def first_codec(choice: object) -> Codec:
    """Build the codec F that a JSON value describes.

    Raises:
        CompressionError: it cannot be one: begins with "first_visit".
    """
    codec = build(choice, "first_visit")
    follows = isinstance(codec, FollowsForward) and codec.forward_partner() is not None
    if follows or isinstance(codec, (VariableSizePayload, Stateful)) or not codec.decodes_alike:
        raise CompressionError(
            f"first_visit: {codec.name!r} cannot send first visits: buffers start from what it decodes to "
            "alone, the same on both sides; use e.g. 'quantize', or 'none' for dense rows"
        )
    return codec


class SampleCodec(FeedbackCodec, Stateful, ObservesWarmup, ManagesStorage, VariableSizePayload):
    """Applies the same decoded changes to the buffers on both sides."""

    def __init__(self, feedback: Feedback, codec: Codec, sample_ids: SampleIds):
        super().__init__(feedback, codec)
        options = feedback.options
        self.sample_ids = sample_ids
        self._first = first_codec(options.first_visit)
        lost = _lost(codec)
        self._are_changes = math.isfinite(lost) and lost <= _lost(self._first)  # C does what F would
        # buffers start from what was sent, so that there is nothing to refine
        self._are_exact = self._first.name == "none" and not self._are_changes
        self._warned = False
        self._no_hits: dict[tuple[int, int], int] = {}  # messages without a known sample
        self.buffers = SampleBuffers(options.offload.device, DTYPES[options.dtype], options.max_gb)

    def layout(self, spec: TensorSpec) -> Layout:
        samples = self.sample_ids.count([spec])
        return self.codec.layout(spec) + (((samples,), torch.uint8),)

    def extra_payload(self, parts: tuple[Tensor, ...], spec: TensorSpec) -> Layout:
        return self._first_layout(self._rows_spec(spec, parts[-1].tolist().count(0)))

    def largest_extra_payload(self, spec: TensorSpec) -> Layout:
        return self._first_layout(self._rows_spec(spec))

    def _first_layout(self, rows: TensorSpec) -> Layout:
        """Return the layout of the extra packet that goes with the first visits of `rows`."""
        return () if self._are_changes or not rows.shape[0] else self._first.layout(rows)

    def refuses(self, spec: TensorSpec) -> str:
        refused = self.codec.refuses(spec)
        if refused or self._are_changes:
            return refused
        return self._first.refuses(self._rows_spec(spec))

    def encode(self, x: Tensor, ctx: Context, out: Parts | None = None) -> Parts:
        if ctx.training:
            return self.encode_training(x, ctx, out)
        samples = self.sample_ids.count([TensorSpec.of(x)])
        flags = x.new_ones(samples, dtype=torch.uint8)
        return (*self.codec.encode_into(x, ctx, out and out[:-1]), flags)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if ctx.training:
            return self.decode_training(parts, spec, ctx)
        return self.codec.decode(parts[:-1], spec, ctx)

    def encode_training(self, x: Tensor, ctx: Context, out: Parts | None) -> Parts:
        spec = TensorSpec.of(x)
        keys = self._keys(spec, ctx)
        seen = [key in ctx.memory and ctx.memory[key].shape == self._row_shape(spec) for key in keys]
        self._note_hits(keys, seen, spec, ctx)
        by_sample = self._by_sample(x)
        unseen = [i for i, known in enumerate(seen) if not known]
        extra: Parts = ()
        start = None
        if unseen and not self._are_changes:
            extra, start = encode_and_decode(self._first, by_sample[unseen], _apart(ctx))
        old = self._buffers(keys, seen, start, spec, ctx)
        change = by_sample.to(old.dtype) - old
        change = narrow(self._by_message(change), x)
        parts, sent = encode_and_decode(self.codec, change, ctx, out and out[:-1])
        self._advance(old, sent, keys, seen, ctx)
        return (*parts, torch.tensor(seen, dtype=torch.uint8, device=x.device), *extra)

    def decode_training(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        keys = self._keys(spec, ctx)
        split = len(self.layout(spec)) - 1
        parts, flags, extra = parts[:split], parts[split], parts[split + 1 :]
        seen = [flag == 1 for flag in flags.tolist()]
        missing = [key for key, known in zip(keys, seen) if known and key not in ctx.memory]
        if missing:
            raise CompressionError(
                f"aqsgd: boundary {ctx.boundary}: the sender has buffer {missing[0]!r}, the receiver does "
                "not; load both sides from one checkpoint, or neither"
            )
        unseen = self._rows_spec(spec, seen.count(False))
        start = self._first.decode(extra, unseen, _apart(ctx)) if extra else None
        old = self._buffers(keys, seen, start, spec, ctx)
        change = self.codec.decode(parts, spec, ctx)
        return cast(self._by_message(self._advance(old, change, keys, seen, ctx)), spec.dtype)

    def observe(self, x: Tensor, ctx: Context) -> None:
        if can_keep(x.to(wide(x.dtype))):
            self.buffers.write(ctx.memory, self._keys(TensorSpec.of(x), ctx), self._by_sample(x))

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        self.buffers.check(memory)

    def restored(self, memory: MutableMapping[str, Tensor]) -> None:
        self.buffers.adopt(memory)

    def _note_hits(self, keys: Sequence[str], seen: Sequence[bool], spec: TensorSpec, ctx: Context) -> None:
        """Note which samples have a buffer, and log what the user should change."""
        ctx.known = seen
        if not self._warned and any(key in ctx.memory and not known for key, known in zip(keys, seen)):
            self._warned = True
            log.warning(
                f"aqsgd: boundary {ctx.boundary}: samples come in another shape, now "
                f"{list(self._row_shape(spec))}; each starts from a first visit, here and later"
            )
        key = ctx.boundary, ctx.position
        count = self._no_hits.get(key, 0)
        if any(seen) or count >= NO_HITS:
            self._no_hits[key] = NO_HITS
            return
        self._no_hits[key] = count + 1
        if count + 1 == NO_HITS and ctx.replica == 0:
            log.warning(no_hit_warning(self.feedback.options, ctx.boundary))

    def _keys(self, spec: TensorSpec, ctx: Context) -> list[str]:
        self.sample_ids.check(ctx.sample_ids, [spec], ctx.boundary)
        assert ctx.sample_ids is not None
        keep = self.feedback.options.on_new_shape == "keep"
        shape = "/" + "x".join(map(str, self._row_shape(spec))) if keep else ""
        return [f"{self.buffers.prefix}{_name(number)}{shape}" for number in ctx.sample_ids.tolist()]

    def _row_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        if self.feedback.options.scope == "micro_batch":
            return spec.shape
        dim = self.feedback.options.batch_dim
        return spec.shape[:dim] + spec.shape[dim + 1 :]

    def _by_sample(self, x: Tensor) -> Tensor:
        """Return `x` as [samples, ...]."""
        if self.feedback.options.scope == "micro_batch":
            return x[None]
        return x.movedim(self.feedback.options.batch_dim, 0)

    def _by_message(self, rows: Tensor) -> Tensor:
        """Invert `_by_sample`."""
        if self.feedback.options.scope == "micro_batch":
            return rows[0]
        return rows.movedim(0, self.feedback.options.batch_dim)

    def _rows_spec(self, spec: TensorSpec, samples: int | None = None) -> TensorSpec:
        """Return the spec of rows [samples, ...] of a message of `spec`, by default of all its samples."""
        count = self.sample_ids.count([spec]) if samples is None else samples
        return TensorSpec((count, *self._row_shape(spec)), spec.dtype, spec.device)

    def _buffers(
        self, keys: Sequence[str], seen: Sequence[bool], start: Tensor | None, spec: TensorSpec, ctx: Context
    ) -> Tensor:
        """Return what the message is a change to, [samples, ...].

        These are the buffers of the seen samples, and rows of `start`, or zeros, of the others.
        """
        dtype = wide(spec.dtype)
        known = [i for i, is_known in enumerate(seen) if is_known]
        make = torch.zeros if start is None and len(known) < len(keys) else torch.empty
        old = make(self._rows_spec(spec).shape, dtype=dtype, device=spec.device)
        if known:
            old[known] = self.buffers.read([ctx.memory[keys[i]] for i in known], dtype, spec.device)
        if start is not None and len(known) < len(keys):
            old[[i for i, is_known in enumerate(seen) if not is_known]] = start.to(dtype)
        return old

    def _advance(
        self, old: Tensor, change: Tensor, keys: Sequence[str], seen: Sequence[bool], ctx: Context
    ) -> Tensor:
        """Return the new buffers, [samples, ...], and store them if they are finite."""
        new = old + self._by_sample(change).to(old.dtype)
        if self._are_exact:  # what C makes of no change may be one
            known = torch.tensor(seen, dtype=torch.bool, device=old.device)
            new = torch.where(known.view(-1, *[1] * (old.dim() - 1)), new, old)
        finite = can_keep(new)
        # A first visit must not be remembered at all: how many buffers there are is for the host to know, so
        # it waits for the device.
        if all(seen) or finite:
            self.buffers.write(ctx.memory, keys, torch.where(finite, new, old))
        return new


def no_hit_warning(options: Any, boundary: int) -> str:
    """Return the warning that no sample has come twice."""
    advice = "an epoch may be longer than that, else look at `ids`"
    if options.ids == "hash":
        advice = (
            'an epoch may be longer; else inputs are augmented, and "ids": {"column": 2} finds them again'
        )
    return (
        f"aqsgd: boundary {boundary}: in {NO_HITS} messages no sample came a second time, so buffers are of "
        f"no use: {advice} (docs/aqsgd.md)"
    )


def _lost(codec: Codec) -> float:
    """Return the largest error of normal values, for one typical message, so that all ranks agree."""
    return math.inf if codec.refuses(TYPICAL) else codec.gaussian_error_bound(TYPICAL)


def _apart(ctx: Context) -> Context:
    """Return a context for F: what F leaves in it is not for the codec of the other direction."""
    return replace(ctx, stash={}, memory={})


def _name(sample_id: int) -> str:
    return f"{sample_id & 2**64 - 1:016x}"
