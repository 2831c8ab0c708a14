"""One step for a whole tensor and an entropy coder: the format, all of whose numbers are integers.

Quantization. A message is scaled by the power of two that brings its largest magnitude into [1, 2). A
magnitude is then known by its key: its octave and the 8 leading binary digits behind the point. There are 24
octaves of 256 keys; key 0 stands for all smaller magnitudes. Step j is 4 * 2^(-j / 64), and a key becomes q
if (q - 7/16) * step <= magnitude < (q + 9/16) * step, a dead zone slightly wider than a step. A
histogram of keys gives the exact count of each q, for every step, without a second pass.

Symbols. q = -below .. above, and one that means "beyond". Such a value travels as its key and sign.

Coding. rANS (Duda, arXiv 1311.2540; interleaved as by Giesen, arXiv 1402.3392): states of 32 bits, 16 bits at
a time, frequencies that add up to 4096. Values are cut into blocks, and those of a block are dealt to its
lanes in turn, one state each. The lanes of a block move in step and share one run of words: they are a vector
register on a CPU and a warp on a GPU. The decoder ends with each lane at state 2^16.

Size. The search takes a step whose code fits, see `reference`. The coarsest makes all values 0 and costs
nothing, so something always fits and the size is constant. It is one row of 16-bit words:

    states    2 words per lane of each block: where the decoder starts
    sizes     2 words per block: its words below
    head      exponent (biased as in a float; 255: not finite, nothing follows), j
    reach     per table: below | above << 8, shift
    tables    of each: frequencies of -below .. -1, 1 .. above and "beyond"; 0 has what is missing to 4096
    words     block after block, as the decoder reads them
    ...       zeros
    beyond    key | sign << 15 of each value that is beyond, the first one last

q is decoded to a magnitude of (|q| - shift / 1024) * step: the mean of the values that became this q.

There is one table, and four in a dithered message if there are enough words.

Subtractive dither. Both sides draw for each value v = d / 65536, of 16 bits,
as `quantize.grid` draws for one group. A value x becomes q = floor(x / step + v), computed with 16 binary
digits behind the point, and q is decoded to (q - v + 1/2 - 1/131072) * step. So the error of a value is
independent of it: uniform within half a step. The scale of a message is 16 times larger than above, so
that steps can be larger than all values, and j is one of `DITHERED_STEPS`; with j = 0 all values are
sent, and decoded, as 0. Its four tables are those of the two highest bits of d: the class of a value. The
shift is 0. What is beyond travels as q, an int16. A first step is a bit
coarser than the finest one that is expected to fit, by the histogram of the keys, or of a sample of them.
If the code by what each value became does not fit, the step is made coarser, see `dithered`.

Rows. A message of rows is shifted to a common magnitude before all this, see `rows`. The octave of each row
travels behind the words, as an int8; that of a row of zeros is -128, and it is decoded as zeros.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

OCTAVES, PER_OCTAVE = 24, 256
KEYS = OCTAVES * PER_OCTAVE
LOWEST = 127 - OCTAVES + 1
"""The biased exponent of key 0, in a float as it is decoded."""

FINER = 64  # steps per octave
STEPS = OCTAVES * FINER + 1
_DEAD = 7  # sixteenths of a step: so much less than q steps becomes q
LEVELS = (0, 1, 3, 7, 15, 31, 63, 127)
"""What `below` and `above` may be."""
SYMBOLS = 2 * LEVELS[-1] + 2
"""At most."""

LARGEST_NUMEL = 1 << 30
"""Values whose counts and places, those of a sample and of whole blocks, too, fit in 32 bits."""

EXACT_BITS = 28
"""Sums of up to 2^EXACT_BITS values, in units of 2^-32 of the largest exponent, fit in 64 bits; those of more
values have units that are a power of two coarser."""

SCALE_BITS = 12
TOTAL = 1 << SCALE_BITS
START = 1 << 16
COST_BITS = 16  # behind the point of what a symbol costs
ROUNDING_COST = math.ceil(math.log2(17 / 16) * 2**COST_BITS)
"""What rounding in a state, which is at least 16 times the frequency, can add to the cost of a symbol."""

KEY_SHIFT = 15
"""The digits of a float that its key leaves out."""

SHIFT_BITS, SHIFTS = 10, (-576, 448)  # 9/16 and 7/16 of a step
HIGHEST = 255 / 128
"""No magnitude is decoded to more, in units of the largest exponent: the end of the range of bfloat16, and
within that of other formats."""

COARSER = 4
"""A dithered message is scaled by so many octaves more, as far as exponents go."""

DITHERED_STEPS = range(FINER // 4, 19 * FINER)
"""With the coarsest one no value is decoded to more than HIGHEST, unless exponents ended; with the finest one
no q needs more than 15 bits."""

LARGEST_Q = 1 << 14

SAMPLED, SAMPLED_RUN = 8, 64
"""About one of so many runs of values, as they lie in the tensor, belongs to the sample that a first step
comes from: those whose number times SAMPLING, modulo 2^32, has three leading zeros. They are spread
evenly, but in no period."""

SAMPLING = 0x9E3779B1
SAMPLED_NUMEL = 1 << 18
"""Values from which a sample is enough."""

NOT_FINITE = 255
HEAD, REACHES = 2, 2
"""Words of the head, and of what each table has behind it."""

CLASSES, CLASS_BITS = 4, 2
"""Number of classes of the dither; bits of a class."""

_LANES, _LONGEST = 32, 1 << 16
_SHARE = 128  # words for each lane, of which its state takes two
_BLOCK = 8192  # words of a block
_TABLE = 256  # words for each table, of which it takes some itself
_TINY = 64


@dataclass(frozen=True)
class CodeLayout:
    """Positions of the parts of an encoded tensor; they follow from its values and words."""

    numel: int
    words: int
    dithered: bool = False

    @cached_property
    def lanes(self) -> int:
        """Lanes of a block, a power of two."""
        return min(_LANES, 1 << max(1, self.words // _SHARE).bit_length() - 1)

    @cached_property
    def length(self) -> int:
        """Values of a block, a multiple of `lanes`; the last block may have fewer."""
        wanted = max(1, self.words // _BLOCK, -(-self.numel // _LONGEST))
        return -(-self.numel // (wanted * self.lanes)) * self.lanes

    @cached_property
    def blocks(self) -> int:
        return -(-self.numel // self.length)

    @property
    def steps(self) -> int:
        """Values of a lane."""
        return self.length // self.lanes

    @property
    def classes(self) -> int:
        """Classes of the dither, each of which has a table; 1 without them."""
        return CLASSES if self.dithered and self.words >= CLASSES * _TABLE else 1

    @property
    def unit_shift(self) -> int:
        """By how many bits the units of sums are coarser than 2^-32."""
        return max(0, (self.numel - 1).bit_length() - EXACT_BITS)

    @property
    def is_sampled(self) -> bool:
        return self.dithered and self.numel >= SAMPLED_NUMEL

    @property
    def head(self) -> int:
        """Where the head begins."""
        return 2 * self.blocks * (self.lanes + 1)

    @property
    def tables(self) -> int:
        """Where the tables begin."""
        return self.head + HEAD + REACHES * self.classes

    @property
    def capacity(self) -> int:
        """Words from the tables on."""
        return self.words - self.tables


def least_words(numel: int) -> int:
    """Return the words that a code of `numel` values has at least."""
    return min(numel, _TINY) + 16


@lru_cache(maxsize=1024)
def frame_of(numel: int, bits: float, dithered: bool = False) -> CodeLayout:
    """Return the frame of a tensor; few values have 2 bytes each and 32 for all.

    Args:
        numel: above 0.
        bits: of each value, at least 0.1.
    """
    return CodeLayout(numel, max(least_words(numel), int(numel * bits / 16)), dithered)


@dataclass(frozen=True)
class FormatTables:
    """What follows from the format alone, on one device."""

    first: Tensor
    """int32 [FINER, 128]: the first key that becomes q = 1 .. 128 with step j < FINER; it is PER_OCTAVE less
    for each FINER more."""

    step: Tensor
    """fp32 [STEPS]: step j."""

    units: Tensor
    """int64 [STEPS]: the same in the units of sums, rounded down."""

    cost: Tensor
    """int32 [TOTAL + 1]: what a symbol of each frequency costs, in 2^-COST_BITS bits, rounded up."""

    weight: Tensor
    """int64 [KEYS]: the middle of each key, in the units of sums."""

    levels: Tensor
    """int64: LEVELS."""

    quarter: Tensor
    """int32 [FINER, 513]: the first key of 0, 1, ... 512 quarters of step j < FINER or more; as `first`."""

    inverse: Tensor
    """fp32 [STEPS]: 2^15 / step j; 0 for j = 0."""


@lru_cache
def tables(device: torch.device, unit_shift: int = 0) -> FormatTables:
    """Make them from integers alone: libraries of different machines round differently.

    Args:
        unit_shift: see `CodeLayout.unit_shift`.
    """
    ratios = [_root_of_two(FINER - b) for b in range(FINER)]  # 2^(1 - b / FINER) * 2^64, [b]
    first = [[_key((q << 4) - _DEAD, ratio) for q in range(1, 129)] for ratio in ratios]
    quarter = [[0, *(_key(m << 2, ratio) for m in range(1, 513))] for ratio in ratios]
    near = torch.tensor(
        [(ratio >> 40) + (ratio >> 39 & 1) for ratio in ratios], dtype=torch.float32, device="cpu"
    )
    octaves = torch.arange(STEPS, dtype=torch.int64, device="cpu")
    power = ((127 + 1 - 24 - octaves // FINER) << 23).to(torch.int32).view(torch.float32)
    keys = torch.arange(KEYS, dtype=torch.int64, device="cpu")
    step = near[octaves % FINER] * power
    constants = (
        torch.tensor(first, dtype=torch.int32, device="cpu"),
        step,
        (step.double() * 2.0**32).long() >> unit_shift,
        torch.tensor([_cost(f) for f in range(TOTAL + 1)], dtype=torch.int32, device="cpu"),
        (2 * PER_OCTAVE + 1 + 2 * (keys % PER_OCTAVE)) << (keys // PER_OCTAVE) >> unit_shift,
        torch.tensor(LEVELS, dtype=torch.int64, device="cpu"),
        torch.tensor(quarter, dtype=torch.int32, device="cpu"),
        (2.0**15 / step.double()).float().index_fill_(0, octaves[:1], 0.0),
    )
    return FormatTables(*(table.to(device) for table in constants))


def _root_of_two(sixty_fourths: int) -> int:
    """Return floor(2^(sixty_fourths / 64) * 2^64) by six square roots, each rounded down."""
    number = 1 << (sixty_fourths + 64 * 64)
    for _ in range(6):
        number = math.isqrt(number)
    return number


def _key(sixteenths: int, ratio: int) -> int:
    """Return the first key that is at least sixteenths / 16 * 2 * ratio / 2^64."""
    value = sixteenths * ratio  # in units of 2^-67
    octave = value.bit_length() - 1
    leading = -(-value * PER_OCTAVE >> octave)
    return (octave - 67 + OCTAVES - 1) * PER_OCTAVE + leading - PER_OCTAVE


def _cost(frequency: int) -> int:
    """Return log2(TOTAL / frequency), digit by digit, by squaring the remainder of the frequency; 0 for 0."""
    if not frequency:
        return 0
    whole = frequency.bit_length() - 1
    rest, digits = frequency << (64 - whole), whole
    for _ in range(COST_BITS):
        rest = rest * rest >> 64
        digits = 2 * digits + (rest >> 65)
        rest >>= rest >> 65
    return (SCALE_BITS << COST_BITS) - digits
