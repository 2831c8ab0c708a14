"""Draws for stochastic rounding. Each follows from a key and from the place of its value, so that every
kernel makes those that it needs where it needs them, and all of them make the same ones.

A draw is one half of a 32-bit word. Of each 64 values of a group the first 32 take the lower halves of 32
words, the others the upper halves; every group begins with words of its own.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def draws(shape: tuple[int, int], key: int, device: torch.device) -> Tensor:
    """int32 of `shape`, [n, G], from 0 to 65535: of 64 bits `key`.

    By a hash of the number of each word, Wellons' triple32. Half of the key goes in before the first product,
    the other half behind it: keys that differ there do not draw the same in another order.
    """
    n, size = shape
    first, second = halves(key)
    words = words_of(size)
    bits = torch.arange(n * words, dtype=torch.int64, device=device).to(torch.int32) ^ first
    bits = _mixed(bits, 17, 0xED5AD4BB).bitwise_xor_(second)
    bits = _mixed(_mixed(bits, 11, 0xAC4C1B51), 15, 0x31848BAB)
    bits ^= _shifted(bits, 14)
    both = torch.stack([bits & 0xFFFF, _shifted(bits, 16)]).view(2, n, words // 32, 32)
    return both.permute(1, 2, 0, 3).reshape(n, 2 * words)[:, :size]


def words_of(size: int) -> int:
    """How many words the draws of a group of so many values take."""
    return -(-size // 64) * 32


def halves(key: int) -> tuple[int, int]:
    """Those of 64 bits, each as an int32 has them."""
    return _signed(key & WORD), _signed(key >> 32)


def _mixed(bits: Tensor, shift: int, factor: int) -> Tensor:
    return bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """int32 as if it had no sign."""
    return (bits >> shift).bitwise_and_((1 << 32 - shift) - 1)


def _signed(word: int) -> int:
    return (word + 2**31 & WORD) - 2**31
