// Draws for stochastic rounding, as kernels/dither.py specifies them.

#pragma once

#include "../simd/vectors.h"

struct Dither {
    bool on;
    uint32_t first, second;  // the halves of the key

    // Words `number`, `number` + 1, ...: the lower half of each is one draw, the upper half another one.
    Words words(uint32_t number) const {
        Words bits;
        for (int j = 0; j < LANES; ++j) bits[j] = j;
        bits = (bits + number) ^ first;
        bits = ((bits ^ bits >> 17) * 0xED5AD4BB) ^ second;
        bits = (bits ^ bits >> 11) * 0xAC4C1B51;
        bits = (bits ^ bits >> 15) * 0x31848BAB;
        return bits ^ bits >> 14;
    }

    static int64_t words_of(int64_t size) { return (size + 63) / 64 * 32; }
};
