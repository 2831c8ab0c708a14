"""Values sorted into contexts by the size of the units that they come in, and the words that say which is
where: the format.

A unit is a run of values or a column. Units are ranked by their largest magnitude, of which the exponent and
7 digits count, the first one first among equals; inf and nan are of one size. The first quarter of them is
of class 0, and so on. Values are coded as `kernels.entropy` draws it in this order: units of class 0, then of
1, 2 and 3, those of a class in the order of the tensor; then what is behind the last whole unit. Contexts
begin where classes do, if there are words for so many. Behind the code are the classes of the units, 8 to a
word, the first one in the lowest bits.
"""

from dataclasses import dataclass

CLASSES, CLASS_BITS = 4, 2
PER_WORD = 16 // CLASS_BITS
"""Classes of units in a word."""

RUN = 64
"""Values of a unit that is a run."""


@dataclass(frozen=True)
class Units:
    """How a tensor is cut into units."""

    count: int
    """At least CLASSES."""

    size: int
    """Values of each; RUN where they are runs."""

    columns: bool
    """Whether the values of a unit lie `count` apart, and not one behind the other."""

    @property
    def words(self) -> int:
        """That the classes take."""
        return -(-self.count // PER_WORD)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The values that classes begin with, but for the first one; see `kernels.entropy.Frame`."""
        return tuple(-(-self.count * number // CLASSES) * self.size for number in range(1, CLASSES))
