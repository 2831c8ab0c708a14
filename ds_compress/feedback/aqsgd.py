"""AQ-SGD: messages are changes against the last message of the same sample.

    packet after the first epoch                  a second packet, only when the message has unseen samples
      payload of C(x - m), 0 where unseen           dense rows of the unseen samples, in the message's dtype
      uint8 [samples]: 1 where the sample was seen
      int64 [samples]: ids, see ds_compress.feedback.sample_ids

Sender and receiver hold m for every sample, so the bytes of a run are the static packet for every message and
one dense row for every first visit; a buffer takes samples x elements x 2 bytes (bf16) on each side of each
boundary.
"""

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, Stability, TensorSpec
from ds_compress.codecs.memory import Remembers, expect
from ds_compress.codecs.mixins import Observes, Offloads, SecondPacket
from ds_compress.errors import CompressionError
from ds_compress.feedback import sample_store
from ds_compress.feedback.base import FEEDBACKS, Feedback, FeedbackCodec, encode_and_decode
from ds_compress.feedback.sample_ids import SampleIds
from ds_compress.kernels.numerics import is_finite, narrow, wide
from ds_compress.registry import Options

log = logging.getLogger("ds_compress")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Column(Options):
    """An index that the data set returns."""

    column: int = Field(ge=1, le=1000)
    """Which of the things that the data loader returns, 0 being the inputs: an integer tensor [samples]."""


class Offload(Options):
    """Where buffers are kept."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """none: with the messages; cpu: in host memory, pinned where messages are on a GPU; nvme: in files."""

    # excluded from what both sides, and checkpoints, agree on
    nvme_path: str | None = Field(default=None, exclude=True)
    """Folder of the files of device "nvme"; null: the system's temporary folder."""

    @field_validator("nvme_path")
    @classmethod
    def _for_files(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("device") != "nvme":
            raise ValueError('is not used; set it together with "device": "nvme"')
        return value


@FEEDBACKS.register("aqsgd")
class AQSGD(Feedback):
    """Forward: m += C(x - m), with a buffer m for each sample on both sides; the first visit of a sample is
    dense.

    Wang et al., arXiv 2206.01299; `scope: "micro_batch"` as in the journal version of arXiv 2401.07788. Pays
    where the data set is visited several times and its samples come back unchanged. Gradients are compressed
    without it.
    """

    directions = ("forward",)
    mirrors = True

    class Options(Options):
        scope: Literal["sample", "micro_batch"] = "sample"
        """A buffer for each sample, or for each micro-batch, where epochs keep them together."""

        ids: Literal["hash"] | Column = "hash"
        """How a sample is known again: by a hash of its input, or by an index that the data set returns."""

        batch_dim: int = Field(0, ge=0, lt=64)
        """Dimension of the messages that counts the samples."""

        dtype: Literal["bf16", "fp32"] = "bf16"
        """How buffers are kept."""

        offload: Offload = Offload()
        """Where buffers are kept, in the words of DeepSpeed's own offloading."""

        on_new_shape: Literal["reset", "keep"] = "reset"
        """What a sample in another shape does: a first visit again, or a buffer for each shape."""

    @property
    def sample_ids(self) -> SampleIds:
        options = self.options
        column = None if options.ids == "hash" else options.ids.column
        return SampleIds(column, options.scope == "micro_batch", options.batch_dim)

    def growth(self, stability: Stability) -> float:
        # what a projection never sends stays as it is
        return stability.constant if stability.constant > 1 else 0.0

    def around(self, codec: Codec) -> Codec:
        return AQSGDCodec(self, codec)

    def prepare(self) -> None:
        offload = self.options.offload
        if offload.device == "nvme":
            with _named("offload.nvme_path"):
                sample_store.check(offload.nvme_path)


class AQSGDCodec(FeedbackCodec, Remembers, Observes, Offloads, SecondPacket):
    """Both sides hold the buffers and apply the same decoded changes to them."""

    feedback: AQSGD

    def __init__(self, feedback: AQSGD, codec: Codec):
        super().__init__(feedback, codec)
        options = feedback.options
        self._said = False
        self.rows = sample_store.Rows(
            options.offload.device, DTYPES[options.dtype], options.offload.nvme_path
        )

    def layout(self, spec: TensorSpec) -> Layout:
        samples = self.feedback.sample_ids.count([spec])
        return self.codec.layout(spec) + (((samples,), torch.uint8),)

    def rest(self, parts: tuple[Tensor, ...], spec: TensorSpec) -> Layout:
        unseen = parts[-1].tolist().count(0)
        return (((unseen, *self._row_shape(spec)), spec.dtype),) if unseen else ()

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        if ctx.training:
            return self.encode_training(x, ctx)
        samples = self.feedback.sample_ids.count([TensorSpec.of(x)])
        return self.codec.encode(x, ctx) + (x.new_ones(samples, dtype=torch.uint8),)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        if ctx.training:
            return self.decode_training(parts, spec, ctx)
        return self.codec.decode(parts[:-1], spec, ctx)

    def encode_training(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        spec = TensorSpec.of(x)
        keys = self._keys(spec, ctx)
        seen = [key in ctx.memory and ctx.memory[key].shape == self._row_shape(spec) for key in keys]
        if not self._said and any(key in ctx.memory and not known for key, known in zip(keys, seen)):
            self._said = True
            log.warning(
                "aqsgd: boundary %d: samples come in another shape, now %s; each starts from a dense "
                "message, here and later",
                ctx.boundary,
                list(self._row_shape(spec)),
            )
        by_sample = self._by_sample(x)
        unseen = [i for i, known in enumerate(seen) if not known]
        dense = by_sample[unseen]
        old = self._buffers(keys, seen, dense, spec, ctx)
        change = by_sample.to(old.dtype) - old
        parts, sent = encode_and_decode(self.codec, narrow(self._by_message(change), x), ctx)
        self._advance(old, sent, keys, seen, ctx)
        flags = torch.tensor(seen, dtype=torch.uint8, device=x.device)
        return parts + ((flags, dense) if unseen else (flags,))

    def decode_training(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        keys = self._keys(spec, ctx)
        split = len(self.layout(spec)) - 1
        seen = [flag == 1 for flag in parts[split].tolist()]
        missing = [key for key, known in zip(keys, seen) if known and key not in ctx.memory]
        if missing:
            raise CompressionError(
                f"aqsgd: boundary {ctx.boundary}: the sender has a buffer {missing[0]!r} and this "
                "side has none; load both from one checkpoint, or neither"
            )
        dense = parts[split + 1] if len(parts) > split + 1 else None
        old = self._buffers(keys, seen, dense, spec, ctx)
        change = self.codec.decode(parts[:split], spec, ctx)
        return self._by_message(self._advance(old, change, keys, seen, ctx)).to(spec.dtype)

    def observe(self, x: Tensor, ctx: Context) -> None:
        if is_finite(x):
            self._write(self._keys(TensorSpec.of(x), ctx), self._by_sample(x), ctx)

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        for key, value in memory.items():
            if key.startswith(self._prefix):
                expect(key, value, self.rows.dtype)

    def restored(self, memory: MutableMapping[str, Tensor]) -> None:
        with _named("aqsgd, loading a checkpoint"):
            self.rows.adopt(memory, [key for key in memory if key.startswith(self._prefix)])

    def prefetch(self, ids: Tensor, memory: MutableMapping[str, Tensor]) -> None:
        names = tuple(map(_name, ids.tolist()))
        self.rows.prefetch([memory[key] for key in (self._prefix + name for name in names) if key in memory])

    @property
    def _prefix(self) -> str:
        """ "host" tells checkpoints not to bring the rows to the device."""
        return f"forward/mirror/{'device' if self.rows.offload == 'none' else 'host'}/aqsgd/"

    def _keys(self, spec: TensorSpec, ctx: Context) -> list[str]:
        samples = self.feedback.sample_ids.count([spec])
        if ctx.sample_ids is None or ctx.sample_ids.numel() != samples:
            came = "none" if ctx.sample_ids is None else ctx.sample_ids.numel()
            raise CompressionError(
                f"aqsgd: boundary {ctx.boundary}: {came} sample ids came with a message of shape "
                f"{list(spec.shape)}, expected {samples}; see batch_dim, and switch off pipe_partitioned"
            )
        keep = self.feedback.options.on_new_shape == "keep"
        shape = "/" + "x".join(map(str, self._row_shape(spec))) if keep else ""
        return [f"{self._prefix}{_name(number)}{shape}" for number in ctx.sample_ids.tolist()]

    def _row_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        if self.feedback.options.scope == "micro_batch":
            return spec.shape
        dim = self.feedback.options.batch_dim
        return spec.shape[:dim] + spec.shape[dim + 1 :]

    def _by_sample(self, x: Tensor) -> Tensor:
        """`x` as [samples, ...]."""
        if self.feedback.options.scope == "micro_batch":
            return x[None]
        return x.movedim(self.feedback.options.batch_dim, 0)

    def _by_message(self, rows: Tensor) -> Tensor:
        """The inverse of `_by_sample`."""
        if self.feedback.options.scope == "micro_batch":
            return rows[0]
        return rows.movedim(0, self.feedback.options.batch_dim)

    def _buffers(
        self, keys: Sequence[str], seen: Sequence[bool], dense: Tensor | None, spec: TensorSpec, ctx: Context
    ) -> Tensor:
        """[samples, ...] what the message is a change to: buffers of the seen samples, `dense` rows of the
        others."""
        dtype = wide(spec.dtype)
        old = torch.empty(len(keys), *self._row_shape(spec), dtype=dtype, device=spec.device)
        known = [i for i, is_known in enumerate(seen) if is_known]
        if known:
            old[known] = self.rows.read([ctx.memory[keys[i]] for i in known], dtype, spec.device)
        if dense is not None and len(known) < len(keys):
            old[[i for i, is_known in enumerate(seen) if not is_known]] = dense.to(dtype)
        return old

    def _advance(
        self, old: Tensor, change: Tensor, keys: Sequence[str], seen: Sequence[bool], ctx: Context
    ) -> Tensor:
        """The new buffers, [samples, ...]; not finite, and not kept, where the message was not."""
        known = torch.tensor(seen, dtype=torch.bool, device=old.device).view(-1, *[1] * (old.dim() - 1))
        new = torch.where(known, old + self._by_sample(change).to(old.dtype), old)
        finite = is_finite(new)
        # A first visit must not be remembered at all: how many buffers there are is for the host to know, so
        # it waits for the device.
        if all(seen) or finite:
            self._write(keys, torch.where(finite, new, old), ctx)
        return new

    def _write(self, keys: Sequence[str], values: Tensor, ctx: Context) -> None:
        with _named(f"aqsgd: boundary {ctx.boundary}"):
            self.rows.write(ctx.memory, keys, values)


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Turn what the store cannot do at `place` into our error."""
    try:
        yield
    except OSError as error:
        raise CompressionError(
            f'{place}: {error}; make room there, or name another folder in "offload": {{"nvme_path": ...}}'
        ) from error


def _name(sample_id: int) -> str:
    return f"{sample_id & 2**64 - 1:016x}"
