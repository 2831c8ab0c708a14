"""Draws for stochastic rounding, as `kernels.dither` specifies them: none of them is in memory."""

import triton
import triton.language as tl


@triton.jit
def draws(row, column, first, second, SIZE: tl.constexpr):
    """int32, from 0 to 65535: of the values at `row` and `column` of groups of SIZE values."""
    number = row * ((SIZE + 63) // 64 * 32) + (column // 64 * 32 + column % 32)
    bits = number.to(tl.uint32) ^ first.to(tl.uint32)
    bits = (bits ^ (bits >> 17)) * 0xED5AD4BB ^ second.to(tl.uint32)
    bits = (bits ^ (bits >> 11)) * 0xAC4C1B51
    bits = (bits ^ (bits >> 15)) * 0x31848BAB
    bits ^= bits >> 14
    return tl.where(column // 32 % 2 == 1, bits >> 16, bits & 0xFFFF).to(tl.int32)
