// How far the values of a group reach. SIZE is that of the group, or 0 where it is known at run time only.

#pragma once

#include "floats.h"
#include "vectors.h"

// The bits of the largest magnitude of `values` [size]: of nan, if there is one.
template <int SIZE>
inline uint32_t largest_magnitude(const float* values, int64_t size) {
    const int64_t count = SIZE ? SIZE : size;
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t bits = as_bits(values[i]) & MAGNITUDE;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

inline bool holds_nan(const float* values, int64_t size) {
    bool found = false;
    for (int64_t i = 0; i < size; ++i) found |= values[i] != values[i];
    return found;
}

// The smallest and the largest of `values` [size]; nan, both, where one is.
template <int SIZE>
inline void limits(const float* values, int64_t size, float& least, float& most) {
    const int64_t count = SIZE ? SIZE : size;
    Floats low = Floats{} + as_float(INFINITE), high = -low, sum = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats x = load(values + i);
        low = smaller(x, low);  // passes over nan
        high = larger(x, high);
        sum += x;
    }
    if (i < count) {
        Floats x = Floats{} + values[i];
        for (int64_t j = 1; i + j < count; ++j) x[j] = values[i + j];
        low = smaller(x, low);
        high = larger(x, high);
        sum += x;
    }
    const float total = folded(sum, [](Floats x, Floats y) { return x + y; })[0];
    // Infinities, and sums beyond what a float holds, look like nan at first
    const bool unordered = total - total != 0 && holds_nan(values, count);
    least = unordered ? as_float(MAGNITUDE) : folded(low, smaller<Floats>)[0] + 0.0f;  // of zeros, +0
    most = unordered ? as_float(MAGNITUDE) : folded(high, larger<Floats>)[0] + 0.0f;
}
