"""What many messages of a codec lose: whether the residual of error feedback stays bounded."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Stability:
    """How much of a message a codec loses at worst, or on average if the loss is random."""

    constant: float
    """The root of the expected ||x - C(x)||^2 / ||x||^2, of any x. Below 1 the codec is a contraction: the
    residual of error feedback stays below constant / (1 - constant) times the largest message."""
    unbiased: bool = False
    """Whether the mean of many decoded messages of one x approaches x."""
    norm: Literal["l2", "max"] = "l2"
    """Norm of the constant; max: the largest magnitude, of rotated values if the codec rotates."""

    @property
    def kind(self) -> str:
        """Return one of "contraction", "unbiased" and "neither"."""
        return "contraction" if self.constant < 1 else "unbiased" if self.unbiased else "neither"

    def __str__(self) -> str:
        norm = " of the largest magnitude" if self.norm == "max" else ""
        lost = "an unknown part" if math.isinf(self.constant) else f"{self.constant:.3g}{norm}"
        also = ", unbiased" if self.unbiased and self.kind != "unbiased" else ""
        return f"{self.kind}{also}: loses at most {lost}"
