"""First visits: how samples without a buffer are sent, and what their buffers start from.

C is the codec of the messages, which are changes; F that of first visits.

    F loses no less than C    nothing more: the message is C of a change to zeros
    otherwise                 an extra packet: the payload of F for the unseen samples; C refines what F gave
"""

import math
from dataclasses import replace

from torch import Tensor

from ds_compress.codec import TYPICAL, Codec, Context, Layout, Parts, TensorSpec, build
from ds_compress.codecs.mixins import FollowsForward, Stateful, VariableSizePayload
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
    follows = isinstance(codec, FollowsForward) and codec.forward_partner() is not None
    if follows or isinstance(codec, (VariableSizePayload, Stateful)) or not codec.decodes_alike:
        raise CompressionError(
            f"first_visit: {codec.name!r} cannot send first visits: buffers start from what it decodes to "
            "alone, the same on both sides; use e.g. 'quantize', or 'none' for dense rows"
        )
    return codec


class FirstVisits:
    """Makes the payloads of unseen samples, rows [n, ...]."""

    def __init__(self, codec: Codec, first: Codec):
        """
        Args:
            codec: C.
            first: F.
        """
        self._first = first
        lost = _lost(codec)
        self.are_changes = math.isfinite(lost) and lost <= _lost(first)
        """Whether C does what F would."""
        self.are_exact = first.name == "none" and not self.are_changes
        """Whether buffers start from what was sent, so that there is nothing to refine."""

    def extra_payload(self, rows: TensorSpec) -> Layout:
        """Return the layout of the extra packet that goes with the first visits of `rows`."""
        return () if self.are_changes or not rows.shape[0] else self._first.layout(rows)

    def refuses(self, rows: TensorSpec) -> str:
        """Return why F refuses rows like these, "" if it does not."""
        return "" if self.are_changes else self._first.refuses(rows)

    def encode(self, rows: Tensor, ctx: Context) -> tuple[Parts, Tensor]:
        """Return the payload of F(rows), and what it decodes to."""
        return encode_and_decode(self._first, rows, _apart(ctx))

    def decode(self, parts: Parts, rows: TensorSpec, ctx: Context) -> Tensor:
        return self._first.decode(parts, rows, _apart(ctx))


def _lost(codec: Codec) -> float:
    """Return the largest error of normal values, for one typical message, so that all ranks agree."""
    return math.inf if codec.refuses(TYPICAL) else codec.gaussian_error_bound(TYPICAL)


def _apart(ctx: Context) -> Context:
    """Return a context for F: what F leaves in it is not for the codec of the other direction."""
    return replace(ctx, stash={}, memory={})
