"""AQ-SGD: messages are changes against the last message of the same sample."""

from typing import Any, Literal

from pydantic import Field, field_validator

from ds_compress import registry
from ds_compress.codec import Codec
from ds_compress.feedback.aqsgd.sample_codec import FIRST_VISIT, SampleCodec, first_codec
from ds_compress.feedback.aqsgd.sample_ids import SampleIds
from ds_compress.feedback.base import FEEDBACKS, Feedback
from ds_compress.stability import Stability


class IdColumn(registry.Options):
    """An index that the data set returns."""

    column: int = Field(ge=1, le=1000)
    """Which of the things that the data loader returns, 0 being the inputs: an integer tensor [samples]."""


class Offload(registry.Options):
    """Where buffers are kept."""

    device: Literal["none", "cpu"] = "none"
    """none: with the messages; cpu: in host memory, pinned where messages are on a GPU."""


@FEEDBACKS.register("aqsgd")
class AQSGD(Feedback):
    """Forward: m += C(x - m), with a buffer m for each sample on both sides; its first visit makes it.

    Wang et al., arXiv 2206.01299, where first visits are dense (`first_visit: "none"`);
    `scope: "micro_batch"` as in the journal version of arXiv 2401.07788. Pays if training visits the data set
    several times and recognises its samples: docs/aqsgd.md. Gradients are compressed without it.
    """

    directions = ("forward",)
    has_mirrored_state = True

    class Options(registry.Options):
        scope: Literal["sample", "micro_batch"] = "sample"
        """A buffer for each sample, or for each micro-batch, where epochs keep them together."""
        ids: Literal["hash"] | IdColumn = "hash"
        """How a sample is known again: by a hash of its input, which finds none that is augmented, or by an
        index that the data set returns."""
        first_visit: Any = Field(FIRST_VISIT, json_schema_extra={"registry": "codec"})
        """Codec of first visits, from whose output buffers start; "none" sends them dense, as the paper does.
        Not needed, and not used, where the codec of the messages loses no more by itself."""
        batch_dim: int = Field(0, ge=0, lt=64)
        """Dimension of the messages that counts the samples."""
        dtype: Literal["bf16", "fp32"] = "bf16"
        """How buffers are kept."""
        max_gb: float | None = Field(default=None, gt=0, le=1e6)
        """GB (10^9 bytes) that the buffers of a boundary may take on each side, for each tensor of its
        messages. A sample that needs more ends the run with one line. null: no limit."""
        offload: Offload = Offload()
        """Where buffers are kept, in the words of DeepSpeed's own offloading."""
        on_new_shape: Literal["reset", "keep"] = "reset"
        """What a sample in another shape does: a first visit again, or a buffer for each shape."""

        @field_validator("first_visit")
        @classmethod
        def _sends_first_visits(cls, choice: object) -> object:
            first_codec(choice)
            return choice

    @property
    def sample_ids(self) -> SampleIds:
        options = self.options
        column = None if options.ids == "hash" else options.ids.column
        return SampleIds(column, options.scope == "micro_batch", options.batch_dim)

    def growth(self, stability: Stability) -> float:
        # what a projection never sends stays as it is
        return stability.constant if stability.constant > 1 else 0.0

    def wrap(self, codec: Codec) -> Codec:
        return SampleCodec(self, codec, self.sample_ids)
