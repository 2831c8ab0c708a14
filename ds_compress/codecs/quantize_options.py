"""The options of codec quantize, and which go together."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ds_compress.codec import CodecOptions
from ds_compress.codecs.mixed import Mixed
from ds_compress.codecs.shapes import GroupSize
from ds_compress.errors import CompressionError, shown
from ds_compress.kernels.quantize import gaussian

_WITH_A_BASIS = {
    "hadamard": (False, "the basis is a rotation"),
    "grid": (None, "each number of bits has its own"),
    "scheme": ("symmetric", "coefficients lie around 0"),
    "rounding": (
        "nearest",
        "coefficients of 0 bits are lost, so no rounding is unbiased; codec 'entropy' with "
        '"rotate": "learned" has "rounding": "dither"',
    ),
    "mixed": (None, "the variance says which group has how many bits"),
}
"""What goes with "rotate": "learned", and why nothing else does."""


class QuantizeOptions(CodecOptions):
    bits: int = Field(4, ge=1, le=8)
    """Bits of one code."""

    group_size: GroupSize = 128
    """Values that share a scale: so many in a row, or all of the tensor."""

    grid: Literal["uniform", "gaussian"] | None = None
    """uniform: equal steps. gaussian, up to 4 bits: the Lloyd-Max levels of normally distributed values, as
    rotated groups have; each group has one 16-bit scale with the least squared error. null: gaussian for
    rotated groups of 1 to 3 bits if neither scheme nor rounding is given, else uniform."""

    scheme: Literal["asymmetric", "symmetric"] = "asymmetric"
    """Of a uniform grid. asymmetric: from the smallest to the largest value; symmetric: around 0, which
    costs half the scale bits and keeps 0 exact."""

    scale_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype in which scales are sent. bf16 rounds an offset by up to 1/128. If the values of a group are
    much closer to each other than to 0, use fp32: bf16 loses their differences."""

    rounding: Literal["nearest", "stochastic", "dither"] = "nearest"
    """On a uniform grid. With stochastic and dither, the expected output equals the input. dither adds a
    random part of a step before rounding, which the receiver subtracts; both sides draw it. Its error is
    smaller than that of stochastic and does not depend on the values."""

    hadamard: bool = False
    """Rotate each group first, with signs drawn from the seed. This spreads outliers: at 4 bits, the error
    on a transformer's activations is 2 to 3 times smaller. Do not use it after a ReLU: a rotation turns its
    many zeros into other values."""

    mixed: Mixed | None = None
    """Keep `bits` for the share of groups with the highest entropy, and give the others `low_bits`
    (TAH-Quant, arXiv 2506.01352, whose groups are 32 or 64 values)."""

    rotate: Literal["none", "learned"] = "none"
    """learned: send the coefficients of each row in the eigenbasis of the warm-up's rows. Each
    coefficient has 0 to 8 bits, more if its variance is larger, and `bits` on average. Meant for the
    activations of a transformer, with more rows than values in a row. Both sides multiply each row of h
    values by an h x h matrix."""

    @field_validator("grid")
    @classmethod
    def _normal_values(cls, grid: str | None, info: ValidationInfo) -> str | None:
        bits, size = info.data.get("bits", 1), info.data.get("group_size", 8)
        if grid == "gaussian" and bits > gaussian.LARGEST_BITS:
            raise ValueError(f"needs 1 to {gaussian.LARGEST_BITS} bits, not {bits}")
        if grid == "gaussian" and (isinstance(size, str) or size & (size - 1)):
            raise ValueError(f"needs a group_size that is a power of two, not {size!r}")
        return grid

    @field_validator("scheme", "rounding")
    @classmethod
    def _of_a_uniform_grid(cls, value: str, info: ValidationInfo) -> str:
        if value in ("asymmetric", "stochastic", "dither") and info.data.get("grid") == "gaussian":
            raise ValueError("goes with grid 'uniform', not with 'gaussian'")
        return value

    @field_validator("hadamard", mode="before")
    @classmethod
    def _auto_is_removed(cls, hadamard: object) -> object:
        if hadamard == "auto":
            raise ValueError(
                "was removed; allowed: true, false, or codec 'entropy', which loses less in as many bits"
            )
        return hadamard

    @field_validator("hadamard")
    @classmethod
    def _power_of_two(cls, hadamard: bool, info: ValidationInfo) -> bool:
        size = info.data.get("group_size", 8)
        if hadamard and (isinstance(size, str) or size & (size - 1)):
            raise ValueError(f"needs a group_size that is a power of two, not {size!r}")
        return hadamard

    @field_validator("mixed")
    @classmethod
    def _fewer_bits(cls, value: Mixed | None, info: ValidationInfo) -> Mixed | None:
        if value and value.low_bits >= info.data.get("bits", 8):
            raise ValueError(f"needs low_bits below bits, which is {info.data['bits']}")
        if value and isinstance(info.data.get("group_size"), str):
            raise ValueError(f"needs a group_size in values, not {info.data['group_size']!r}")
        return value

    @model_validator(mode="after")
    def _two_levels(self) -> "QuantizeOptions":
        fewest = self.mixed.low_bits if self.mixed else self.bits
        uniform = self.grid != "gaussian" and self.rotate == "none"
        if fewest == 1 and self.scheme == "symmetric" and self.rounding == "nearest" and uniform:
            raise CompressionError(
                'scheme: \'symmetric\' of 1 bit was removed; use "grid": "gaussian", whose two levels have '
                "the least squared error too"
            )
        return self

    @model_validator(mode="after")
    def _with_a_basis(self) -> "QuantizeOptions":
        if self.rotate == "none":
            return self
        given = self.model_dump(include=self.model_fields_set)
        for option, (only, reason) in _WITH_A_BASIS.items():
            if given.get(option, only) != only:
                value = shown(given[option])
                raise CompressionError(f'{option}: {value} goes with "rotate": "none" alone: {reason}')
        size = self.group_size
        if isinstance(size, str) or size & (size - 1):
            raise CompressionError(f"group_size: {size!r} is no power of two, which a learned basis needs")
        return self
