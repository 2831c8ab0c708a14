"""Codec entropy: a uniform quantizer whose codes are entropy coded, at a constant size."""

from typing import Any, Literal

from pydantic import Field, model_validator

from ds_compress.codec import CodecOptions, register
from ds_compress.codecs.entropy_contexts import InContexts
from ds_compress.codecs.entropy_plain import Plain
from ds_compress.codecs.entropy_rotated import Rotated
from ds_compress.errors import CompressionError
from ds_compress.registry.options import Steps


@register("entropy")
class Entropy(Plain):
    """One uniform step for the whole tensor, entropy coded: the finest one that fits in `bits` per value.

    The size is constant, the error is what varies. `ds_compress.kernels.entropy` draws the packet.
    """

    examples = (
        *({"bits": bits} for bits in (4, 3.3, 2.5, 1)),
        {"bits": 2, "rotate": "learned"},
        {"bits": 2, "contexts": "rows"},
        {"bits": 2, "contexts": "columns"},
    )

    class Options(CodecOptions):
        bits: float = Field(2.5, ge=0.1, le=6)
        """Size of the packet in bits per value, all included. Tensors of a few dozen values take 2 bytes each
        and 32 for all."""

        rotate: Literal["none", "learned"] = "none"
        """learned: send of each row the coefficients in the eigenbasis of the rows of the warm-up, with
        tables by their rank: the bits go where the variance is. Meant for the activations of a transformer.
        Costs h multiplications for each value of a row of h, on both sides."""

        refresh_steps: Steps = 0
        """With "rotate": every so many steps turn the basis to the eigenvectors of what arrived in them, of
        16 messages. 0: it stays that of the warm-up."""

        contexts: Literal["none", "rows", "columns"] = "none"
        """Four tables, by the largest magnitude of each run of 64 values (rows: for gradients), or of each
        column, which is what the last dimension counts or, of maps, all but the first (columns: for
        activations). Which has which is sent along, in the same packet. Tensors of few values have one."""

        @model_validator(mode="after")
        def _refreshes_a_basis(self) -> "Entropy.Options":
            if self.contexts != "none" and self.rotate != "none":
                raise CompressionError(
                    f"contexts: {self.contexts!r} is not allowed where a basis gives them; allowed: 'none', "
                    'or "rotate": "none"'
                )
            if self.refresh_steps and self.rotate == "none":
                raise CompressionError(
                    f"refresh_steps: {self.refresh_steps} is not allowed without a basis; allowed: 0, or "
                    '"rotate": "learned"'
                )
            return self

    @classmethod
    def of(cls, options: Any) -> Plain:
        kind = InContexts if options.contexts != "none" else Rotated if options.rotate != "none" else cls
        return kind(options)
