"""The codec contract: what a compressor promises, and how one is found by name.

A codec turns one float tensor into a fixed number of payload tensors whose shapes and dtypes follow from the
input's shape and dtype alone (`layout`), so that the receiver can allocate them before anything arrives.
Adding one:

    @register("mine")
    class Mine(Codec):
        '''One sentence for `ds-compress list`.'''

        class Options(CodecOptions):
            bits: Literal[4, 8] = 4

        def layout(self, spec): ...
        def encode(self, x, ctx): ...
        def decode(self, parts, spec, ctx): ...
        def error_bound(self, spec): return 0.1

Training, `simulate`, `ds-compress list`, `check` and `bench` find it by name, and `check_codec("mine")` of
`ds_compress` holds it to what it promises and declares. What few codecs need beyond that is in
`ds_compress.codecs.mixins`.
"""

import functools
import hashlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ds_compress.errors import CompressionError
from ds_compress.registry import Named, Options, Registry

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor: all that a receiver knows before the packet arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, tensor: "Tensor | TensorSpec") -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        """As errors show it: bfloat16 [4, 1024, 768]."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @functools.cached_property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class MessageId:
    """Which message: what its header and the contexts of its tensors say alike."""

    boundary: int = 0
    direction: str = "forward"  # or "backward"
    step: int = 0  # optimizer steps done when the message was made
    micro_batch: int = 0  # position of the message inside its step
    training: bool = True


@dataclass
class Context(MessageId):
    """What a codec may need for one tensor of one message, and must not keep.

    Sender and receiver of a message hold equal contexts, except for `memory`, which each side fills itself;
    in evaluation it is a copy that is thrown away.
    """

    position: int = 0  # which float tensor of the message this is
    replica: int = 0  # data-parallel rank; tensor-parallel ranks share it and so send the same bytes
    seed: int = 0  # "seed" of the ds_compress block
    loss_scale: float = 1.0  # what fp16 training has multiplied the tensor by: 1 forward

    sample_ids: Tensor | None = None
    """int64, on the CPU: which samples a forward training message holds, where a feedback asks for it."""

    known: Sequence[bool] = ()
    """Set at the sender by a feedback that tells samples apart: which samples of the message that it just
    encoded it still has from an earlier one."""

    stash: MutableMapping[str, Any] = field(default_factory=dict)
    """What the forward message of a micro-batch leaves, on both sides, for the backward message of the same
    one. Dropped after that message; in evaluation dropped at once. Holds the selection and tensors that a
    codec adds."""

    memory: MutableMapping[str, Tensor] = field(default_factory=dict)
    """Tensors that outlive the message (a warm-started basis, learned weights), kept and checkpointed by the
    boundary, shared by its two directions. Replace entries, never modify them in place. Feedbacks do that to
    theirs where nobody else holds the tensor: who wants one to stay holds the tensor itself, or a clone, not
    its memory alone. Entries are contiguous: that is how a checkpoint brings them back, and a product's last
    bits depend on the memory layout."""

    @property
    def selection(self) -> Any:
        """The kept entries, a `kernels.selection.Selection`, or None. A sparsifying codec sets it in encode
        and in decode of the forward message; `indices: "reuse"` reads it in the backward message."""
        return self.stash.get("selection")

    @selection.setter
    def selection(self, selection: Any) -> None:
        self.stash["selection"] = selection

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator seeded from the fields above: equal on both sides, new for every message, nothing to
        save."""
        return torch.Generator(device).manual_seed(self.key() >> 1)

    def key(self, *uses: str) -> int:
        """64 bits from the fields above, others for other `uses`: what random bits are drawn from."""
        place = (
            self.seed,
            self.boundary,
            self.direction,
            self.step,
            self.micro_batch,
            self.position,
            self.replica,
            *uses,
        )
        return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Stability:
    """What a feedback can count on: how much of a message is lost at worst, or on average where it is random
    what is lost."""

    constant: float
    """The root of the expected ||x - C(x)||^2 / ||x||^2, of any x. Below 1 the codec is a contraction: what
    error feedback keeps stays below constant / (1 - constant) times the largest message."""

    unbiased: bool = False
    """Whether the mean of what many messages of one x decode to approaches x."""

    norm: Literal["l2", "max"] = "l2"
    """Of the constant; max: the largest magnitude, of the rotated values where the codec rotates."""

    @property
    def kind(self) -> str:
        """ "contraction", else "unbiased", else "neither"."""
        return "contraction" if self.constant < 1 else "unbiased" if self.unbiased else "neither"

    def __str__(self) -> str:
        norm = " of the largest magnitude" if self.norm == "max" else ""
        lost = "an unknown part" if math.isinf(self.constant) else f"{self.constant:.3g}{norm}"
        also = ", unbiased" if self.unbiased and self.kind != "unbiased" else ""
        return f"{self.kind}{also}: loses at most {lost}"


TYPICAL = TensorSpec((8, 64, 768), torch.float32)
"""A message, where no other is at hand."""


CodecOptions = Options


class Codec(Named, ABC):
    """A stateless compressor of one tensor.

    Promises, each held by `check_codec` for every registered codec: deterministic for a given context;
    inf or nan in the input shows as a non-finite value in the output; C(s*x) = s*C(x) up to rounding; any
    float dtype and any shape but those that it `refuses` is sent, with no more error than its `error_bound`.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Option sets that the tests and `ds-compress bench` walk."""

    supports_out: ClassVar[bool] = False
    """Whether `encode` has a third argument, `out: Parts | None = None`: contiguous memory as `layout`
    describes it, for the payload. It saves an allocation and a copy; a part that is made elsewhere all the
    same is copied by the channel."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.supports_out = "out" in inspect.signature(cls.encode).parameters
        encode_into: Any = cls.encode if cls.supports_out else Codec.encode_into
        cls.encode_into = encode_into  # type: ignore[method-assign]

    @abstractmethod
    def layout(self, spec: TensorSpec) -> Layout:
        """(shape, dtype) of each payload tensor for an input of `spec`, without seeing data."""

    @abstractmethod
    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        """Compress `x` (any float dtype, possibly non-contiguous, never modified) to tensors that match
        `layout`."""

    def encode_into(self, x: Tensor, ctx: Context, out: Parts | None) -> Parts:
        """Call `encode` with `out` if it supports that: then this is `encode` itself."""
        return self.encode(x, ctx)

    @abstractmethod
    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        """The tensor of `spec`'s shape, dtype and device that `parts` stand for.

        `parts` are views of a packet whose memory is used again: what must stay (in `ctx.stash`) is copied.
        What is returned may be one of them; any other memory it has is the caller's from then on.
        """

    def error_bound(self, spec: TensorSpec) -> float:
        """The largest ||x - C(x)|| / ||x|| of any finite `x` of `spec`, before rounding to its dtype.

        Below 1 the codec is a contraction. Of one that learns: before it has learned.
        """
        return math.inf  # nothing is declared: the contract asks for a number

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        """The same for `x` of independent normal values, for codecs that a few outliers can make useless."""
        return self.error_bound(spec)

    def stability(self, spec: TensorSpec) -> Stability:
        """What a feedback can count on for tensors of `spec`; overridden where more is known than the
        `error_bound` of one message, of which one of 1 or more says nothing of many."""
        error = self.error_bound(spec)
        return Stability(error if error < 1 else math.inf, self.unbiased)

    @property
    def unbiased(self) -> bool:
        """Whether the mean of what many messages of one `x` decode to approaches `x`, up to rounding. Where
        not, the error of normal values must be below 1, that of sending zeros."""
        return False

    def refuses(self, spec: TensorSpec) -> str:
        """Why a tensor of `spec` cannot be compressed, "" where it can; the boundary says so and stops."""
        return ""


CODECS: Registry[Codec] = Registry("codec", Codec)
register = CODECS.register
names = CODECS.names


def build(choice: object, path: str = "codec") -> Codec:
    """The codec that a JSON value (a name, or an object of `"name"` and options) describes; see
    `Registry.build`."""
    return CODECS.build(choice, path)


def fill(places: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy payload tensors to `places`, unless they are there already.

    Raises:
        CompressionError: the number of parts, or the shape or dtype of one, is not that of the layout.
    """
    if len(parts) != len(places):
        raise CompressionError(f"packet: {len(parts)} payload tensors came, the layout has {len(places)}")
    for place, part in zip(places, parts):
        if part is place:
            continue
        if part.shape != place.shape or part.dtype != place.dtype:
            raise CompressionError(
                f"packet: payload of {tuple(part.shape)} {part.dtype} came, "
                f"the layout says {tuple(place.shape)} {place.dtype}"
            )
        place.copy_(part)


def check_accepted(codec: Codec, spec: TensorSpec, place: str) -> None:
    """
    Raises:
        CompressionError: `codec` refuses tensors of `spec`; begins with `place`.
    """
    reason = codec.refuses(spec)
    if reason:
        raise CompressionError(f"{place}: codec {codec} refuses {spec}: {reason}")
