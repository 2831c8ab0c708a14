"""Keys, as `kernels.keys` has them, made where they are needed: a tensor of keys would be written and read
again."""

import triton
import triton.language as tl


@triton.jit
def key_of(bits, INFINITY: tl.constexpr):
    """int32: the keys of floats, given as the integers, of 16 or 32 bits, that their bits are."""
    if bits.dtype.primitive_bitwidth == 16:
        key = bits.to(tl.int32) & 0x7FFF
    else:
        key = bits & 0x7FFFFFFF
    return tl.minimum(key, INFINITY)
