// How far the values of a group reach. SIZE is that of the group, or 0 where it is known at run time only.

#pragma once

#include "floats.h"
#include "reduce.h"
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

// Limits of what is seen, vector by vector, unless a value is nan.
struct Limits {
    Floats low = Floats{} + as_float(INFINITE), high = -low, zeros = {};

    void see(Floats x) {
        low = smaller(x, low);  // passes over nan
        high = larger(x, high);
        zeros = signed_sum(x, Floats{}, zeros);  // where a product costs less than one more sum
    }

    float least() const { return folded(low, smaller<Floats>)[0] + 0.0f; }  // of zeros, +0
    float most() const { return folded(high, larger<Floats>)[0] + 0.0f; }

    // No bits, unless a value is infinite or nan.
    Ints doubts() const { return (Ints)(zeros - zeros); }
};

// The smallest and the largest of `values` [size]; nan, both, where one is.
template <int SIZE>
inline void limits(const float* values, int64_t size, float& least, float& most) {
    const int64_t count = SIZE ? SIZE : size;
    Limits seen;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) seen.see(load(values + i));
    if (i < count) {
        Floats x = Floats{} + values[i];
        for (int64_t j = 1; i + j < count; ++j) x[j] = values[i + j];
        seen.see(x);
    }
    const bool unordered = any(seen.doubts()) && holds_nan(values, count);
    least = unordered ? as_float(MAGNITUDE) : seen.least();
    most = unordered ? as_float(MAGNITUDE) : seen.most();
}
