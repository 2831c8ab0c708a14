"""What few codecs need beyond `layout`, `encode` and `decode`: base classes to add beside `Codec`.

    Remembers             leaves entries in the memory (codecs/memory.py)               lowrank, feedbacks
    Observes              looks at the messages of the warm-up                          pca, learned bases
    Learns                trains weights of its own, once per step                      autoencoder
    Offloads              keeps entries of the memory elsewhere than on the device      feedback aqsgd
    Selects               keeps some entries, which the gradient can follow             topk, randomk, column
    Follows               takes over backward what the forward codec began              topk, indices "reuse"
    SecondPacket          has a payload whose size follows from the data                lossless
    BothDirections        must be the codec of both directions                          pca, autoencoder
    OnlyReceiverDecodes   decodes by state that the sender does not have                autoencoder
    DecodesByProduct      decodes to other last bits on other processors                lowrank, pca
    FusesFeedback         has passes over the memory that do a feedback's steps too     quantize

Whoever needs one of them asks with `isinstance`, or with `layers` where a feedback may be wrapped round the
codec.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import ClassVar, TypeVar, cast

from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, Parts, TensorSpec

Kind = TypeVar("Kind")


class Wraps:
    """A codec round another one, as a feedback is."""

    codec: Codec


def layers(codec: Codec, kind: Callable[..., Kind]) -> Iterator[Kind]:
    """`codec`, what it wraps, and so on inwards: those of them that are a `kind`, one of the classes here."""
    layer: Codec | None = codec
    while layer is not None:
        if isinstance(layer, cast(type, kind)):  # annotated type[Kind], mypy would take no abstract class
            yield cast(Kind, layer)
        layer = layer.codec if isinstance(layer, Wraps) else None


class Observes(ABC):
    """Sees what crosses uncompressed during warm-up."""

    needs_warmup: ClassVar[bool] = False  # True: works only after at least one warm-up step

    @abstractmethod
    def observe(self, x: Tensor, ctx: Context) -> None:
        """Look at the message `x`; called on both sides with the same `x`."""


class Learns(ABC):
    """Changes entries of the memory once per training step."""

    @abstractmethod
    def end_step(self, memory: MutableMapping[str, Tensor], average: Callable[[Tensor], Tensor]) -> None:
        """Replace learned entries of `memory`; `average` takes the mean over the replicas."""


class Offloads(ABC):
    """Keeps entries of the memory where it wants them: in host memory, in files."""

    def saved(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint has to hold beside the entries of `memory`; `restored` takes it away again."""
        return {}

    @abstractmethod
    def restored(self, memory: MutableMapping[str, Tensor]) -> None:
        """Put entries of `memory`, just read from a checkpoint, where they belong; those with "/host/" in
        their key are on the CPU, all others on the device."""

    @abstractmethod
    def prefetch(self, ids: Tensor, memory: MutableMapping[str, Tensor]) -> None:
        """A message of the samples `ids` (int64, on the CPU) will be encoded soon."""


class Selects(ABC):
    """Sets `ctx.selection`, which `indices: "reuse"` reads in the backward message."""

    @abstractmethod
    def kept(self, spec: TensorSpec) -> int:
        """How many entries of a tensor of `spec` are kept, over all rows."""

    @abstractmethod
    def gain(self, spec: TensorSpec) -> Tensor | None:
        """What the receiver multiplies the kept values by, fp32 [kept] in selection order; None for 1."""


class Follows(ABC):
    """A codec for backward that may depend on the forward codec of its boundary."""

    note: str = ""  # what became of this setting, where a user should know; said once at start-up

    @abstractmethod
    def paired(self, forward: Codec) -> Codec:
        """The codec to use backward, where `self` was asked for, at a boundary whose forward codec is
        `forward`.

        Raises:
            CompressionError: the two cannot work together.
        """

    def sent(self, spec: TensorSpec, ctx: Context) -> Tensor | None:
        """Bool, of `spec`'s shape: the entries that the message just encoded can carry; None for all.

        What a message cannot carry is no loss of it: error feedback would keep it for ever.
        """
        return None

    @abstractmethod
    def forward_partner(self) -> Codec | None:
        """A forward codec whose message must come first where this one cannot stand alone; None where it
        can."""


class SecondPacket(ABC):
    """Messages may come with a second packet, whose size the first one tells.

    `encode` returns its parts behind those of `layout`, and `decode` gets them there. Reading the first
    packet makes the host wait for the device, and the second one cannot be received ahead.
    """

    @abstractmethod
    def rest(self, parts: tuple[Tensor, ...], spec: TensorSpec) -> Layout:
        """What follows in a second packet, as those `parts` say that `layout` describes; () for nothing."""

    def planned_rest(self, spec: TensorSpec) -> Layout:
        """`rest` to plan with: the largest of a message, once first visits and the like are over."""
        return ()

    def largest_rest(self, spec: TensorSpec) -> Layout:
        """The largest `rest` of a message, first visits and the like included."""
        return self.planned_rest(spec)


class BothDirections:
    """Forward and backward of a boundary must both be this codec."""


class OnlyReceiverDecodes:
    """What a message decodes to depends on state of the receiver alone, so no feedback can follow."""


class DecodesByProduct:
    """Decodes with a matrix product: its last bits depend on processor, libraries and number of threads.

    A codec that is not one decodes a packet to the same bits everywhere.
    """


class FusesFeedback(ABC):
    """Has passes over the memory that do what a feedback takes several for, with the same result, but for
    what is not finite: a group of values of which something is keeps its state, whatever becomes of others.

    `out`: see `Codec.takes_memory`.

    `state`: of x's shape, as it is kept: one tensor, or int8 codes and their scales; finite. It may be
    written to, and be what is returned. All return None, and leave it, where there is no such pass for this
    message: it depends on options, shape and dtypes alone. Loss scales are those of `ctx`.
    """

    @abstractmethod
    def encode_with_residual(
        self, x: Tensor, state: Parts, share: float, rest: float, ctx: Context, out: Parts | None = None
    ) -> tuple[Parts, Parts] | None:
        """`encode` of x + scale * state, or of x alone where that is not finite; and the next state, share *
        state + rest * lost / scale, where `lost` is what of the sum the receiver will not get."""

    @abstractmethod
    def encode_change(
        self, x: Tensor, state: Tensor, ctx: Context, out: Parts | None = None
    ) -> tuple[Parts, Tensor] | None:
        """`encode` of x - scale * state; and the next state, state + sent / scale, where `sent` is what the
        receiver will get."""

    @abstractmethod
    def decode_change(
        self, parts: tuple[Tensor, ...], state: Tensor, spec: TensorSpec, ctx: Context
    ) -> tuple[Tensor, Tensor] | None:
        """Scale * next state as `spec` has it, what `encode_change` gave `parts` for; and that state."""
