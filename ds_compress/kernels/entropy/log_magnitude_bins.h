// Keys of values, as kernels/entropy.py defines them, and how many there are of each.

#pragma once

#include "entropy.h"
#include "../simd/floats.h"

constexpr int COPIES = 4;  // of the histogram: equal keys in a row do not wait for each other

// Keys of x [n], those of negative values KEYS later. SIZE is n, or 0 where it is known at run time only.
template <int64_t SIZE = 0, class In>
inline void make_keys(const In* x, int64_t n, uint32_t exponent, uint16_t* keys) {
    const float scale = as_float((255 - exponent) << 23);
    const int64_t count = SIZE ? SIZE : n;
    for (int64_t i = 0; i < count; ++i) {
        const float value = to_float(x[i]);
        const int32_t scaled = static_cast<int32_t>(as_bits(value * scale) & MAGNITUDE);
        const int32_t key = (scaled >> KEY_SHIFT) - static_cast<int32_t>((LOWEST + 1) * PER_OCTAVE);
        const int32_t inside = key > 0 ? key : 0, side = as_bits(value) >> 31 ? KEYS : 0;
        keys[i] = static_cast<uint16_t>(inside + side);
    }
}

// Adds to `copies` [COPIES, 2 * KEYS].
inline void count_keys(const uint16_t* keys, int64_t n, uint32_t* copies) {
    int64_t i = 0;
    for (; i + COPIES <= n; i += COPIES)
        for (int copy = 0; copy < COPIES; ++copy) ++copies[2 * KEYS * copy + keys[i + copy]];
    for (; i < n; ++i) ++copies[keys[i]];
}

// Of each key, how many `copies` tell; and of that or higher ones.
inline void add_up(const uint32_t* copies, Histogram& histogram, Counts& counts) {
    for (int64_t side = 0; side < 2; ++side) {
        counts[side][KEYS] = 0;
        for (int64_t key = KEYS - 1; key >= 0; --key) {
            uint32_t total = 0;
            for (int64_t copy = 0; copy < COPIES; ++copy) total += copies[2 * KEYS * copy + side * KEYS + key];
            histogram[side][key] = total;
            counts[side][key] = counts[side][key + 1] + total;
        }
    }
}

// The bits of the largest magnitude; of nan, if there is one. SIZE: as above.
template <int64_t SIZE = 0, class In>
inline uint32_t largest_bits(const In* x, int64_t n) {
    const int64_t count = SIZE ? SIZE : n;
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = as_bits(to_float(x[i])) & MAGNITUDE;
        most = bits > most ? bits : most;
    }
    return most;
}

inline uint32_t exponent_of(uint32_t largest) { return largest >> 23 ? largest >> 23 : 1; }

// The values of a tensor as they lie: what the functions of an encoder take keys from, and a decoder puts values to.
template <class In>
struct InOrder {
    const In* x;
    int64_t numel;

    uint32_t exponent() const { return exponent_of(largest_bits(x, numel)); }

    // The keys of the values that are coded as number begin .. end - 1, a part of a context; parts come in their order.
    void make(int64_t begin, int64_t end, uint32_t exponent, uint16_t* keys) const {
        make_keys(x + begin, end - begin, exponent, keys + begin);
    }
};
