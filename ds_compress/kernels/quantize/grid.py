"""A grid per group: value = offset + step * code, with code in 0 .. top.

Scales are sent in bfloat16, and rounded to it before the codes are made, offsets down and steps up. So the
grid that the receiver rebuilds covers the group, and no value is more than half a step from that of its code.
Only values beyond `LARGEST_LIMIT` may be outside; they get the nearest code. A group that holds inf or nan
has an infinite or nan step and decodes to nan.

Stochastic rounding takes a draw of 16 bits for each value: the upper 8 are of the value, made from a key
and from the place of the value, so that every kernel makes them where it needs them; the lower 8 are of the
group. Every group begins with a row of its own, of 64 values. A row has 16 words, whose bytes are the upper 8
bits, lowest byte first. Word l of row r is w ^ w >> 16 with w = a[l] + b[l] * c[r], where a, b (odd) and c
are hashes: one product for four values. Without the shift the two lowest bytes of a word would depend on the
low bits of c alone, and those of two columns would go together in all rows. The lower 8 bits of a group are
the highest ones of the c of its first row.

Subtractive dither rounds by the same draws, v = (draw + 1/2) / 65536: code = floor(position + v). The
receiver draws them too and decodes to code - v + 1/2 steps. Then the error is uniform within half a step,
whatever the value. A position within 0 .. top has a code within 0 .. top, so nothing is cut off at the ends
of the grid; values may be decoded to half a step beyond them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ds_compress.kernels.numerics import as_divisor, saturate

SMALLEST_STEP = 2.0**-126
"""Above 0: the smallest normal number."""

LARGEST_LIMIT = 2.0**125
"""A grid goes no further: its steps, offsets and values, and the inverses of steps, are normal numbers."""

ROW = 64
"""Values of a row of draws. Hashes 0 .. 15 are its a, 16 .. 31 its b; those from 64 on are c."""

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)  # codecs keep their grids, and plans are looked up by them
class Grid:
    """What the grids of all groups of a tensor have in common."""

    bits: int
    """Bits of a code, 1 to 8."""

    hadamard: bool = False
    """Rotate each group first (see `hadamard`); its size is then a power of two."""

    key: int = 0
    """Key of the signs of the rotation."""

    @cached_property
    def top(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)


def minmax_scales(low: Tensor, high: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return step and offset, bf16 [n], of grids from `low` to `high`, fp32 [n]."""
    # + 0.0: which of two zeros a reduction meets first depends on the processor
    low, high = saturate(low + 0.0, LARGEST_LIMIT), saturate(high + 0.0, LARGEST_LIMIT)
    offset = -_at_least(-low)
    step = _at_least((high - offset.float()) / as_divisor(top, high))
    return torch.where(step > 0, step.clamp(min=SMALLEST_STEP), step), offset  # with a finite inverse


def to_codes(groups: Tensor, scales: Sequence[Tensor], top: int, dither: int | None) -> Tensor:
    """Return the codes, uint8 [n, G], of `groups`, fp32 [n, G].

    Args:
        scales: step and offset, [n] each.
        dither: None rounds to nearest. Otherwise the key of draws that round to one of the two neighbours,
            so that the expected value equals the input.
    """
    step, offset = (scale.float() for scale in scales)
    # all values of a group of step 0 equal its offset: code 0. One division per group, not one per value
    inverse = torch.where(step > 0, 1 / step, 1)
    position = (groups - offset[:, None]).mul_(inverse[:, None])
    if dither is None:
        return position.add_(0.5).clamp_(0, top).to(torch.uint8)  # the cast truncates
    position = torch.where(position > 0, position, 0).clamp_(max=top)
    n, size = groups.shape
    upper, lower = draws((n, size), dither, groups.device)
    # fixed point with 8 fractional bits: adding 8 bits carries as often as the fraction says
    fixed = position.mul_(256).add_((lower.float() + 0.5) / 256).to(torch.int32)
    # with 8 bits, the largest position and the largest draw, the sum is rounded up
    return (fixed + upper >> 8).clamp_(max=top).to(torch.uint8)


def from_codes(codes: Tensor, scales: Sequence[Tensor], dither: int | None = None) -> Tensor:
    """Return the values, fp32 [n, G], of `codes`, uint8 [n, G].

    Args:
        dither: the key of the draws, if they are subtracted.
    """
    step, offset = (scale.float() for scale in scales)
    if dither is None:
        return codes.float().mul_(step[:, None]).add_(offset[:, None])
    upper, lower = draws((codes.shape[0], codes.shape[1]), dither, codes.device)
    fixed = (codes.to(torch.int32) << 8) + (255 - upper)
    offset = offset + (-127 - (lower[:, 0].float() + 0.5) / 256) / 256 * step
    return fixed.float().mul_(1 / 256).mul_(step[:, None]).add_(offset[:, None])


def _at_least(x: Tensor) -> Tensor:
    """Return the smallest bfloat16 that is at least `x`, fp32; nan stays nan.

    A bfloat16 is the upper half of a float32: truncation rounds towards 0, which is up for negative numbers.
    Integers are used because a compiler may remove a conversion to bfloat16 and back.
    """
    bits = x.view(torch.int32)
    rounded = (torch.where(bits < 0, bits, bits + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(x == x, rounded, x).bfloat16()


def draws(shape: tuple[int, int], key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the upper 8 bits of the draws of groups, int32 of `shape`, [n, G], from `key`, 64 bits; and the
    lower 8 bits of each group, int32 [n, 1]."""
    n, size = shape
    rows = -(-size // ROW)
    hashes = _hashed(torch.arange(ROW + n * rows, dtype=torch.int64, device=device).to(torch.int32), key)
    words = (hashes[ROW:, None] * (hashes[16:32] | 1)).add_(hashes[:16])
    words.bitwise_xor_(_shifted(words, 16))
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=device)
    upper = (words[:, :, None] >> shifts).bitwise_and_(0xFF).view(n, rows * ROW)
    return upper[:, :size], _shifted(hashes[ROW::rows], 24)[:, None]


def draws_in_order(count: int, key: int, device: torch.device) -> Tensor:
    """Return draws, int32 [count] in 0 .. 65535, of one group."""
    upper, lower = draws((1, count), key, device)
    return ((upper << 8) + lower).view(count)


def _hashed(numbers: Tensor, key: int) -> Tensor:
    """Hash int32, by Wellons' triple32.

    Half of the key goes in before the first product, the other half after it: keys that differ there do not
    give the same hashes in another order.
    """
    first, second = key_halves(key)
    bits = _mixed(numbers ^ first, 17, 0xED5AD4BB).bitwise_xor_(second)
    bits = _mixed(_mixed(bits, 11, 0xAC4C1B51), 15, 0x31848BAB)
    return bits.bitwise_xor_(_shifted(bits, 14))


def key_halves(key: int) -> tuple[int, int]:
    """Return the lower and the upper half of 64 bits, each as an int32."""
    return _signed(key & _WORD), _signed(key >> 32)


def _mixed(bits: Tensor, shift: int, factor: int) -> Tensor:
    return bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Shift int32 right as if it were unsigned."""
    return (bits >> shift).bitwise_and_((1 << 32 - shift) - 1)


def _signed(word: int) -> int:
    return (word + 2**31 & _WORD) - 2**31
