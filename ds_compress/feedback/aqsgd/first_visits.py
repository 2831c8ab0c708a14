"""First visits: how samples without a buffer are sent, and what their buffers start from.

C is the codec of the messages, which are changes; F that of first visits. S and F(n) are the bytes of their
payloads, of a message and of n samples.

    F loses no less than C    nothing more: the message is C of a change to zeros
    F "none"                  payload of C, then an extra packet: dense rows of the unseen samples
    F, some are unseen        payload of C, then an extra packet: F(n) bytes; C refines what F gave
    F, all are unseen         F(all) bytes instead of C's payload, and what it does not hold in a second
                              packet; the same of all samples where F(all) is less than S + F(unseen)

So a message of first visits takes max(S, F(all)) bytes instead of S + F(all), and none takes more: with C of
2 bits and F of 4, six visits of a sample take 2.48 bits for each value instead of 2.84. Where a gradient
follows the selection of C (topk, randomk, column), C has to be sent, and the last line does not apply.
"""

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from ds_compress.codec import TYPICAL, Codec, Context, Layout, TensorSpec, build
from ds_compress.codecs.mixins import (
    HardwareDependentDecode,
    ReusesForwardIndices,
    Selects,
    Stateful,
    VariableSizePayload,
)
from ds_compress.errors import CompressionError
from ds_compress.feedback.base import encode_and_decode

FIRST_VISIT = {"name": "quantize", "bits": 4, "group_size": 128, "hadamard": True}
"""The default of F."""


def first_codec(choice: object) -> Codec:
    """Build the codec F that a JSON value describes.

    Raises:
        CompressionError: it cannot be one: begins with "first_visit".
    """
    codec = build(choice, "first_visit")
    follows = isinstance(codec, ReusesForwardIndices) and codec.forward_partner() is not None
    kinds = (VariableSizePayload, HardwareDependentDecode, Stateful)
    if follows or isinstance(codec, kinds):
        raise CompressionError(
            f"first_visit: {codec.name!r} cannot send first visits: buffers start from what it decodes to "
            "alone, the same on both sides; use e.g. 'quantize', or 'none' for dense rows"
        )
    return codec


class FirstVisits:
    """Makes the payloads of unseen samples, rows [n, ...], and places their bytes."""

    def __init__(self, codec: Codec, first: Codec):
        """
        Args:
            codec: C.
            first: F.
        """
        self._codec = codec
        self._first = first
        lost, first_lost = _lost(codec), _lost(first)
        self.are_changes = math.isfinite(lost) and lost <= first_lost
        """Whether C does what F would."""
        self.dense = first.name == "none"

    def all_at_once(self, spec: TensorSpec, rows: TensorSpec, unseen: int) -> bool:
        """Return whether all samples of a message are sent by F alone.

        Args:
            spec: of the message.
            unseen: how many of its samples have no buffer.
            rows: the same as rows of all its samples.
        """
        layout = self._codec.layout(spec)
        if self.are_changes or self.dense or isinstance(self._codec, Selects):
            return False
        if any(dtype == torch.bool for _, dtype in layout):  # which is not for any byte
            return False
        changes = nbytes_of(layout)
        return max(changes, self._nbytes(rows)) < changes + self._nbytes(_with_rows(rows, unseen))

    def extra_payload(self, spec: TensorSpec, rows: TensorSpec, unseen: int) -> Layout:
        """Return the layout of the extra packet that goes with `unseen` first visits."""
        if not unseen or self.are_changes:
            return ()
        if self.dense:
            return ((_with_rows(rows, unseen).shape, spec.dtype),)
        if unseen == rows.shape[0] and self.all_at_once(spec, rows, unseen):
            left = self._nbytes(rows) - nbytes_of(self._codec.layout(spec))
            return (((left,), torch.uint8),) if left > 0 else ()
        return (((self._nbytes(_with_rows(rows, unseen)),), torch.uint8),)

    def refuses(self, rows: TensorSpec) -> str:
        """Return why F refuses rows like these, "" if it does not."""
        return "" if self.are_changes else self._first.refuses(rows)

    def encode(self, rows: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return the bytes of F(rows), uint8 [n], and what they decode to."""
        parts, decoded = encode_and_decode(self._first, rows, _apart(ctx))
        return to_bytes(parts, rows.device), decoded

    def decode(self, payload: Tensor, rows: TensorSpec, ctx: Context) -> Tensor:
        """Decode bytes, uint8 [n], to rows; bytes after the payload are padding."""
        parts = from_bytes(payload, self._first.layout(rows))
        return self._first.decode(parts, rows, _apart(ctx))

    def split_bytes(self, payload: Tensor, spec: TensorSpec) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Split F's bytes of all samples into the place of C's payload and an extra packet."""
        layout = self._codec.layout(spec)
        nbytes = nbytes_of(layout)
        filled = torch.nn.functional.pad(payload, (0, max(0, nbytes - payload.numel())))
        return from_bytes(filled, layout), (payload[nbytes:],) if payload.numel() > nbytes else ()

    def _nbytes(self, rows: TensorSpec) -> int:
        return nbytes_of(self._first.layout(rows))


def _lost(codec: Codec) -> float:
    """Return the largest error of normal values, for one typical message, so that all ranks agree."""
    return math.inf if codec.refuses(TYPICAL) else codec.gaussian_error_bound(TYPICAL)


def _with_rows(rows: TensorSpec, count: int) -> TensorSpec:
    return TensorSpec((count, *rows.shape[1:]), rows.dtype, rows.device)


def _apart(ctx: Context) -> Context:
    """Return a context for F: what F leaves in it is not for the codec of the other direction."""
    return replace(ctx, stash={}, memory={})


def nbytes_of(layout: Layout) -> int:
    """Return the bytes of all tensors of `layout`."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)


def to_bytes(parts: tuple[Tensor, ...], device: torch.device) -> Tensor:
    """Return the bytes of tensors, uint8 [n], without padding between them."""
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)


def from_bytes(payload: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """Return the tensors whose bytes are at the beginning of `payload`, uint8 [n]."""
    sizes = [nbytes_of((part,)) for part in layout]
    ends = itertools.accumulate(sizes)
    # copies: a view of another dtype may begin at some places only
    return tuple(
        payload[end - size : end].clone().view(dtype).view(shape)
        for (shape, dtype), size, end in zip(layout, sizes, ends)
    )
