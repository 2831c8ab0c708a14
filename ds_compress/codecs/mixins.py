"""Optional abilities of codecs, as base classes beside `Codec`.

    Stateful                  keeps entries in the memory that checkpoints carry    lowrank, feedbacks
    ObservesWarmup            reads the messages of the warm-up                     feedbacks ef21, aqsgd
    ManagesStorage            stores entries of the memory off the device           feedback aqsgd
    Selects                   keeps some entries, which the gradient can reuse      topk, randomk
    FollowsForward            depends on the forward message                        topk, entropy
    VariableSizePayload       sends a payload whose size depends on the data        lossless

Callers ask with `isinstance`, or with `layers` where a feedback may wrap the codec.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TypeVar, cast

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, TensorSpec
from ds_compress.errors import CompressionError

Kind = TypeVar("Kind")


class CodecWrapper:
    """A codec that wraps another one, as a feedback does."""

    codec: Codec


def layers(codec: Codec, kind: Callable[..., Kind]) -> Iterator[Kind]:
    """Yield `codec` and the codecs that it wraps, outermost first, if they are a `kind` (a class above)."""
    layer: Codec | None = codec
    while layer is not None:
        if isinstance(layer, cast(type, kind)):  # annotated type[Kind], mypy would take no abstract class
            yield cast(Kind, layer)
        layer = layer.codec if isinstance(layer, CodecWrapper) else None


class Stateful(ABC):
    """Keeps entries in `ctx.memory`, which checkpoints save and load."""

    @abstractmethod
    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        """Check `memory`, just read from a checkpoint.

        Raises:
            CompressionError: an entry under a key of this codec has a shape or dtype that it never writes.
        """


def check_entry(key: str, value: Tensor, *dtypes: torch.dtype, shape: tuple[int, ...] | None = None) -> None:
    """Check that the entry `value` has one of `dtypes`, and `shape` if that is given.

    Raises:
        CompressionError: names the entry, what came and what was expected.
    """
    if value.dtype not in dtypes or (shape is not None and tuple(value.shape) != shape):
        allowed = " or ".join(map(str, dtypes)) + (f" {list(shape)}" if shape is not None else "")
        raise CompressionError(f"entry {key!r} is {value.dtype} {list(value.shape)}, expected {allowed}")


def parse_size(digits: str) -> int:
    """Return the size that a part of a key holds, or -1, which no size is, if it is not a number."""
    return int(digits) if digits.isdecimal() else -1


class ObservesWarmup(ABC):
    """Reads the messages that cross uncompressed during the warm-up."""

    @abstractmethod
    def observe(self, x: Tensor, ctx: Context) -> None:
        """Read the message `x`; both sides call it with the same `x`."""


class ManagesStorage(ABC):
    """Decides where its entries of the memory are stored: on the device, in host memory."""

    @abstractmethod
    def restored(self, memory: MutableMapping[str, Tensor]) -> None:
        """Move entries of `memory`, just read from a checkpoint, to where they are stored.

        Entries with "/host/" in their key arrive on the CPU, all others on the device.
        """


class Selects(ABC):
    """Sets `ctx.selection`, which `indices: "reuse"` reads in the backward message."""

    @abstractmethod
    def kept(self, spec: TensorSpec) -> int:
        """Return how many entries of a tensor of `spec` are kept, over all rows."""


class FollowsForward(ABC):
    """A backward codec that may depend on the forward codec of its boundary, and on activations."""

    note: str = ""
    """What became of this setting, if the user should know; logged once at start-up."""

    @abstractmethod
    def paired_with(self, forward: Codec) -> Codec:
        """Return the codec to use backward at a boundary whose forward codec is `forward`.

        Raises:
            CompressionError: the two cannot work together.
        """

    def sent(self, spec: TensorSpec, ctx: Context) -> Tensor | None:
        """Return which entries the message just encoded can hold: bool of `spec`'s shape, None for all.

        Error feedback does not count the other entries as lost: it would keep them for ever.
        """
        return None

    def wants_activation(self, spec: TensorSpec) -> bool:
        """Return whether it reads `ctx.activation` for a gradient of `spec`."""
        return False

    def forward_partner(self) -> Codec | None:
        """Return the forward codec whose message must come first; None if this codec works alone."""
        return None


class VariableSizePayload(ABC):
    """May send an extra payload in an extra packet, whose size is in the first packet.

    `encode` returns its parts after those of `layout`, and `decode` receives them there. To read the size
    the host waits for the device, and the extra packet cannot be received ahead.
    """

    @abstractmethod
    def extra_payload(self, parts: tuple[Tensor, ...], spec: TensorSpec) -> Layout:
        """Return the layout of the extra packet, () for none; `parts` are those that `layout` describes."""

    def planned_extra_payload(self, spec: TensorSpec) -> Layout:
        """Return the largest usual `extra_payload`: without first visits and the like."""
        return ()

    def largest_extra_payload(self, spec: TensorSpec) -> Layout:
        """Return the largest `extra_payload` of any message, first visits and the like included."""
        return self.planned_extra_payload(spec)
