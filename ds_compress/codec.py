"""The codec contract: what a codec promises, and how it is registered and built by name.

A codec turns one float tensor into a fixed number of payload tensors. Their shapes and dtypes follow from the
input's shape and dtype alone (`layout`), so the receiver allocates them before anything arrives. To add one:

    @register("mine")
    class Mine(Codec):
        '''One sentence for `ds-compress list`.'''

        class Options(CodecOptions):
            bits: Literal[4, 8] = 4

        def layout(self, spec): ...
        def encode(self, x, ctx): ...
        def decode(self, parts, spec, ctx): ...
        def error_bound(self, spec): return 0.1

Training, `simulate`, `ds-compress list`, `check` and `bench` find it by name. `check_codec("mine")` of
`ds_compress` tests its promises. Optional abilities of codecs are base classes in `codecs.mixins`.
"""

import functools
import hashlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_compress.errors import CompressionError
from ds_compress.kernels.memory import Parts as Parts
from ds_compress.registry import Named, Options, Registry
from ds_compress.stability import Stability

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor: what a receiver knows before the packet arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, tensor: "Tensor | TensorSpec") -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        """Format it for errors: bfloat16 [4, 1024, 768]."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @functools.cached_property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class MessageId:
    """Identifies a message in its header and in the contexts of its tensors."""

    boundary: int = 0
    direction: str = "forward"  # or "backward"
    step: int = 0  # optimizer steps done when the message was made
    micro_batch: int = 0  # position of the message inside its step
    training: bool = True


@dataclass
class Context(MessageId):
    """What a codec may need for one tensor of one message; it keeps no reference to it.

    Sender and receiver of a message have equal contexts, except for `memory`, which each side fills itself.
    In evaluation what is put into `memory` is discarded.
    """

    position: int = 0  # which float tensor of the message this is
    replica: int = 0  # data-parallel rank; tensor-parallel ranks share it and so send the same bytes
    seed: int = 0  # "seed" of the ds_compress block
    loss_scale: float = 1.0  # what fp16 training has multiplied the tensor by: 1 forward

    sample_ids: Tensor | None = None
    """int64, on the CPU: the samples of a forward training message, if a feedback needs them."""
    known: Sequence[bool] = ()
    """Set at the sender by feedback aqsgd: which samples of the message just encoded have a buffer."""
    stash: MutableMapping[str, Any] = field(default_factory=dict)
    """Entries that the forward message of a micro-batch leaves, on both sides, for its backward message:
    the selection, the activation, and tensors of the codec. Discarded after that message, in evaluation at
    once."""
    memory: MutableMapping[str, Tensor] = field(default_factory=dict)
    """Tensors that outlive the message (a warm-started basis, learned weights). The boundary keeps and
    checkpoints them; its two directions share them. Replace entries, never delete them or modify them in
    place: only feedbacks overwrite theirs, if there is no other reference to the tensor. Entries are
    contiguous, as checkpoints restore them so and the last bits of a product depend on the memory layout."""

    @property
    def selection(self) -> Any:
        """Return the kept entries, a `kernels.topk.selection.Selection`, or None.

        A sparsifying codec sets it in encode and decode of the forward message; `indices: "reuse"` reads it
        in the backward message.
        """
        return self.stash.get("selection")

    @selection.setter
    def selection(self, selection: Any) -> None:
        self.stash["selection"] = selection

    @property
    def activation(self) -> Tensor | None:
        """Return the tensor of the forward message, for a backward codec that asks for it
        (`mixins.FollowsForward`); None if this side kept none. The receiver of gradients has the original,
        their sender what was decoded."""
        return self.stash.get("activation")

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a generator seeded from the fields above: equal on both sides, new for every message."""
        return torch.Generator(device).manual_seed(self.key() >> 1)

    def key(self, *uses: str) -> int:
        """Return 64 bits from the fields above, other bits for other `uses`, to draw random bits from."""
        message = self.boundary, self.direction, self.step, self.micro_batch
        place = self.seed, *message, self.position, self.replica, *uses
        return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "little")


TYPICAL = TensorSpec((8, 64, 768), torch.float32)
"""A message to judge a codec by, if no other is known."""


CodecOptions = Options


class Codec(Named, ABC):
    """A stateless compressor of one tensor.

    Promises, which `check_codec` tests for every registered codec: it is deterministic for a given context;
    inf or nan in the input gives a non-finite value in the output; C(s*x) = s*C(x) up to rounding; it sends
    any float dtype and shape that it does not `refuse`, with no more error than its `error_bound`.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Option sets for the tests and `ds-compress bench`."""
    supports_out: ClassVar[bool] = False
    """Whether `encode` has a third argument, `out: Parts | None = None`: contiguous memory as `layout`
    describes it, for the payload. It saves an allocation and a copy; a part that is made elsewhere all the
    same is copied by the channel."""
    keeps_zeros: bool = False
    """Whether each 0 decodes to 0, whatever stands beside it. Otherwise only a row of zeros does: where
    groups cross rows the payload has one bit a row, and between replicas the packet of a slice has.
    `entropy`, `topk` and `randomk` have no such bits for images and for rows of a few values."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.supports_out = "out" in inspect.signature(cls.encode).parameters
        encode_into: Any = cls.encode if cls.supports_out else Codec.encode_into
        cls.encode_into = encode_into  # type: ignore[method-assign]

    @abstractmethod
    def layout(self, spec: TensorSpec) -> Layout:
        """Return (shape, dtype) of each payload tensor for an input of `spec`."""

    @abstractmethod
    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        """Compress `x` to tensors that match `layout`.

        Args:
            x: any float dtype, possibly non-contiguous; not modified.
        """

    def encode_into(self, x: Tensor, ctx: Context, out: Parts | None) -> Parts:
        """Call `encode` with `out` if it supports that: then this is `encode` itself."""
        return self.encode(x, ctx)

    @abstractmethod
    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        """Decode `parts` to a tensor of `spec`'s shape, dtype and device.

        `parts` are views of a packet whose memory is used again: clone what stays (in `ctx.stash`). The
        result may be one of them; other memory of it belongs to the caller from then on.
        """

    def error_bound(self, spec: TensorSpec) -> float:
        """Return the largest ||x - C(x)|| / ||x|| of any finite `x` of `spec`, before rounding to its dtype.

        It is that of the tensor as a whole; activations are judged by the errors of their rows
        (`codecs.message_error`), for which no bound is declared.
        Below 1 the codec is a contraction. For a codec with state: of its first message.
        """
        return math.inf  # not declared; `check_codec` asks for a number

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        """Return the same for `x` of independent normal values; smaller if outliers are the worst case."""
        return self.error_bound(spec)

    def stability(self, spec: TensorSpec) -> Stability:
        """Return the `Stability` for tensors of `spec`.

        Override it if more is known than `error_bound`: a bound of 1 or more says nothing of many messages.
        """
        error = self.error_bound(spec)
        return Stability(error if error < 1 else math.inf, self.unbiased)

    @property
    def unbiased(self) -> bool:
        """Return whether the mean of many decoded messages of one `x` approaches `x`, up to rounding.

        If not, the error of normal values must be below 1, that of sending zeros.
        """
        return False

    @property
    def decodes_alike(self) -> bool:
        """Return whether all processors decode a packet to the same bits: not by products of matrices.

        If not, no state that both sides keep, nor a checkpoint, is made from it.
        """
        return True

    def keeps_rows(self, spec: TensorSpec) -> bool:
        """Return whether no row that is not zero decodes to zeros, down to the smallest normal number.

        Behind an RMSNorm the gradient of a row of zeros is larger by many powers of ten.
        """
        return False

    def refuses(self, spec: TensorSpec) -> str:
        """Return why a tensor of `spec` cannot be compressed, "" if it can; the boundary raises it."""
        return ""


CODECS: Registry[Codec] = Registry("codec", Codec)
register = CODECS.register
names = CODECS.names


def build(choice: object, path: str = "codec") -> Codec:
    """Build the codec that a JSON value (a name, or an object of `"name"` and options) describes.

    See `Registry.build`.
    """
    return CODECS.build(choice, path)


def bytes_of(layout: Layout) -> int:
    """Return the bytes of all parts of `layout`, without a header."""
    return sum(TensorSpec(*part).nbytes for part in layout)


def check_accepted(codec: Codec, spec: TensorSpec, place: str) -> None:
    """Check that `codec` accepts tensors of `spec`.

    Raises:
        CompressionError: it refuses them; begins with `place`.
    """
    reason = codec.refuses(spec)
    if reason:
        raise CompressionError(f"{place}: codec {codec} refuses {spec}: {reason}")
