"""Slices of gradients: which replica averages which part of a parameter, and the packet of each part.

A parameter of `numel` values is cut into one slice per replica; that replica owns the slice:

    | slice 0 | slice 1 | slice 2 ..|    equal sizes, multiples of ALIGNMENT; the last ones padded with zeros

Under ZeRO each partition of the optimizer states is a slice, whatever its size.

Optimizers divide a gradient by its own size, so noise in a row that had no gradient, as an unused embedding,
would be a full step. Groups of a codec cross rows: a packet also says, one bit a row, which rows are zero.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, MessageId, TensorSpec, check_accepted
from ds_compress.codecs.shapes import set_to_zero, zero_rows
from ds_compress.errors import errors_at
from ds_compress.feedback.state import residuals
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.memory import fill
from ds_compress.kernels.numerics import is_readable
from ds_compress.message.layout import explain
from ds_compress.message.packet import PacketLayout
from ds_compress.transport.packet_memory import Packet

ALIGNMENT = 256
"""Equal slices have a multiple of so many values: whole groups of codecs, so that few groups are padded."""

MIN_NUMEL = 16 * 1024
"""Parameters of fewer values stay exact: packets and calls would cost more than they save."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that are compressed."""

GRADIENT, AVERAGE = HALVES = "backward", "forward"
"""Direction names in packet headers and state keys: to the owner of a slice, and from the owner."""


def is_compressed(parameter: Tensor, min_numel: int = MIN_NUMEL) -> bool:
    """Return whether `parameter` has enough dimensions and values for compressed gradients."""
    return parameter.dim() > 1 and parameter.numel() >= min_numel


class Gradient(NamedTuple):
    """A contiguous part of a parameter's gradient, to be replaced by its average over the replicas."""

    parameter: int  # position among the parameters of the stage: the same on every replica
    values: Tensor  # 1-D
    owner: int | None = None  # the one replica that needs the average; None: every replica
    start: int = 0  # in the parameter


class RowSpan(NamedTuple):
    """How a run of a parameter's values lies in its rows, which are the indices of its first dimension."""

    width: int  # values of a row
    before: int  # values of the first row that stand before the run
    touched: int  # rows with values of the run

    @classmethod
    def of(cls, width: int, start: int, numel: int) -> "RowSpan":
        """Return the span of `numel` values from `start` of a parameter whose rows have `width` values."""
        before = start % width
        return cls(width, before, -(-(before + numel) // width) if numel else 0)

    def are_zero(self, values: Tensor) -> Tensor:
        """Return bool [touched]: the rows of `values`, [numel], in which all are 0."""
        return torch.cat([zero_rows(rows) for rows in self._cut(values)])

    def set_to_zero(self, values: Tensor, zero: Tensor) -> None:
        """Set the rows of `values`, [numel], to 0 that `zero`, bool [touched], has."""
        cut = self._cut(values)
        for rows, own in zip(cut, zero.split([*map(len, cut)])):
            set_to_zero(rows, own)

    def _cut(self, values: Tensor) -> list[Tensor]:
        """Return views of `values` as [rows, width]; a row that began before, or ends later, by itself."""
        first = min(-self.before % self.width, values.numel())
        last = (values.numel() - first) % self.width
        parts = values.split([first, values.numel() - first - last, last])
        cut = [part.view(-1, min(len(part), self.width)) for part in parts if len(part)]
        return cut or [values.view(0, self.width)]


@dataclass(eq=False)
class Slice:
    """The part of a parameter that one replica averages, and the residuals of this rank for it."""

    number: int  # the same on every replica
    owner: int
    spec: TensorSpec
    rows: RowSpan | None = None  # None: not known
    memory: dict[str, Tensor] = field(default_factory=dict)

    def take(self, values: Tensor, start: int, scale: float) -> Tensor:
        """Return this slice, from `start` of `values`: in fp32, divided by `scale`, padded with zeros."""
        part = values[start : start + self.spec.numel]
        if part.numel() == self.spec.numel and part.dtype == self.spec.dtype and scale == 1.0:
            return part
        whole = torch.zeros(self.spec.shape, dtype=self.spec.dtype, device=self.spec.device)
        values = whole[: part.numel()].copy_(part)
        if scale != 1.0:  # in fp32: fp16 has no digits for the result
            values.div_(scale)
        return whole


def slice_numel(numel: int, replicas: int) -> int:
    """Return how many values a slice has if a parameter of `numel` values is cut for `replicas`."""
    return -(-numel // (replicas * ALIGNMENT)) * ALIGNMENT


def residual_norm(memories: Iterable[Mapping[str, Tensor]]) -> float:
    """Return the norm of all residuals in `memories` of slices, of both halves."""
    norms = [e.float().norm() for memory in memories for half in HALVES for e in residuals(memory, half)]
    return torch.stack(norms).norm().item() if norms else 0.0


class SliceCodec:
    """Encodes slices into packets and decodes them, with one codec for all slices."""

    def __init__(self, codec: Codec, seed: int, has_checksum: bool, stage: int, content: str = "gradients"):
        """Two codecs of one seed draw different random bits if `stage` differs.

        Args:
            content: of packets, for errors.
        """
        self._content = content
        self.codec = codec
        # tensors of messages between stages have positions from 0; times 2, as in earlier releases: else the
        # random bits were others
        self._position = -1 - 2 * stage
        self._seed = seed
        self._has_checksum = has_checksum
        self._layouts: dict[tuple[TensorSpec, RowSpan | None], PacketLayout] = {}

    def layout(self, own: Slice) -> PacketLayout:
        """Return the layout of the packet of the slice `own`: the codec's payload, then the bits of rows.

        Raises:
            CompressionError: the codec refuses such a slice.
        """
        spec, rows = own.spec, self._rows(own)
        if (spec, rows) not in self._layouts:
            check_accepted(self.codec, spec, f"{self._content}, slice {own.number}")
            bits: Layout = () if rows is None else (((-(-rows.touched // 8),), torch.uint8),)
            identity = (spec.shape, spec.dtype, self.codec.settings)
            layout = PacketLayout(self.codec.layout(spec) + bits, identity, self._has_checksum)
            self._layouts[spec, rows] = layout
        return self._layouts[spec, rows]

    def encode(self, own: Slice, x: Tensor, memory: Tensor, half: str, step: int, sender: int) -> None:
        """Encode `x`, values of the slice `own`, as a packet in `memory`; update the residual of `half`."""
        layout, message_id, rows = self.layout(own), self._message_id(own, half, step), self._rows(own)
        views = layout.views(packet := Packet(memory))
        payload = views if rows is None else views[:-1]
        zero = None if rows is None else self._zero_rows(own, rows, x, half)
        fill(payload, self.codec.encode_into(x, self._context(message_id, sender, own.memory), payload))
        if rows is not None and zero is not None:
            views[-1].copy_(kernels(x.device).pack_bits(zero))
            for residual in self._residuals(own, half):
                rows.set_to_zero(residual, zero)  # these rows lose nothing
        layout.write_header(packet, message_id)

    def decode(self, own: Slice, memory: Tensor, half: str, step: int, sender: int) -> Tensor:
        """Decode the packet in `memory`, which replica `sender` made of the slice `own`.

        Raises:
            CompressionError: it is found to be of another slice, step or half, or damaged.
        """
        layout, message_id, rows = self.layout(own), self._message_id(own, half, step), self._rows(own)
        packet = Packet(memory)
        if memory.is_cpu or self._has_checksum:  # else the host would wait for the device
            with errors_at(f"{self._content} from replica {sender}"):
                layout.check(packet, message_id, "slice")
        views = layout.views(packet)
        payload = views if rows is None else views[:-1]
        try:
            values = self.codec.decode(payload, own.spec, self._context(message_id, sender, {}))
        except Exception as error:
            place = f"{self._content} from replica {sender}, slice {own.number}, {half}"
            explain(error, self.codec, place, message_id)
            raise
        if rows is not None:
            rows.set_to_zero(values, kernels(memory.device).unpack_bits(views[-1], rows.touched))
        return values

    def _rows(self, own: Slice) -> RowSpan | None:
        """Return the rows of the slice `own` that its packet has bits of; None: it has none."""
        return None if self.codec.keeps_zeros else own.rows

    def _zero_rows(self, own: Slice, rows: RowSpan, x: Tensor, half: str) -> Tensor:
        """Return bool [rows]: those in which `x` is 0, and what is added to it, too."""
        zero = rows.are_zero(x)
        for residual in self._residuals(own, half):
            if not is_readable(zero) or zero.any():
                zero &= rows.are_zero(residual)
        return zero

    @staticmethod
    def _residuals(own: Slice, half: str) -> Iterator[Tensor]:
        """Yield what the feedback keeps of each value of the slice `own`."""
        for key, entry in own.memory.items():
            if key.startswith(f"{half}/") and entry.shape == own.spec.shape:
                yield entry

    def _message_id(self, own: Slice, half: str, step: int) -> MessageId:
        return MessageId(own.number % 2**16, half, step)

    def context(self, own: Slice, half: str, step: int) -> Context:
        """Return a context of the slice `own` that is the same on all replicas, but for its memory."""
        return self._context(self._message_id(own, half, step), 0, own.memory)

    def _context(self, message_id: MessageId, sender: int, memory: dict[str, Tensor]) -> Context:
        return Context(
            **vars(message_id), position=self._position, replica=sender, seed=self._seed, memory=memory
        )


class Slices:
    """The slices of all parameters of a stage, created at the first gradient of each parameter."""

    def __init__(self, replicas: int, widths: Mapping[int, int] | None = None):
        """
        Args:
            widths: values of a row of each parameter, by its number; of others nothing is said of rows.
        """
        self._replicas, self._widths = replicas, widths or {}
        self._of: dict[tuple[int, int | None, int, int], list[Slice]] = {}
        self._loaded: dict[int, dict[str, Tensor]] = {}  # from a checkpoint, of slices that do not exist yet

    def __iter__(self) -> Iterator[Slice]:
        for slices in self._of.values():
            yield from slices

    def of(self, gradient: Gradient) -> list[Slice]:
        """Return the slices of `gradient`, in the order of their owners."""
        parameter, values, owner, start = gradient
        key = parameter, owner, start, values.numel()
        if key not in self._of:
            owners = range(self._replicas) if owner is None else [owner]
            numel = values.numel() if owner is not None else slice_numel(values.numel(), self._replicas)
            spec = TensorSpec((numel,), torch.float32, values.device)
            starts = range(start, start + len(owners) * numel, numel)
            # parts of a matrix that every replica needs, as Muon does, have slices of the same owners
            first = parameter * self._replicas + (start << 32 if owner is None else 0)
            self._of[key] = [
                self._made(first + place, parameter, place, at, spec) for place, at in zip(owners, starts)
            ]
        return self._of[key]

    def _made(self, number: int, parameter: int, owner: int, start: int, spec: TensorSpec) -> Slice:
        width = self._widths.get(parameter, 0)
        rows = RowSpan.of(width, start, spec.numel) if width else None
        memory = {key: value.to(spec.device) for key, value in self._loaded.pop(number, {}).items()}
        return Slice(number, owner, spec, rows, memory)

    def saved(self) -> dict[int, dict[str, Tensor]]:
        """Return the current residuals, by number of the slice, those of a checkpoint included.

        Later updates replace tensors, so these do not change.
        """
        return {**self._loaded, **{each.number: dict(each.memory) for each in self}}

    def load(self, memories: dict[int, dict[str, Tensor]]) -> None:
        """Replace all residuals by those of a checkpoint, or of `saved()`."""
        self._of.clear()
        self._loaded = memories
