// Reductions of the lanes of vectors, and of the values of a group.

#pragma once

#include "vectors.h"

// Reduce a vector to one lane: join its halves until one lane is left.
template <int DISTANCE = LANES / 2, class Vector, class F>
INLINED Vector reduce(Vector x, F join) {
    if constexpr (DISTANCE == 0) return x;
    else return reduce<DISTANCE / 2>(join(x, swapped<DISTANCE>(x)), join);
}

// Two vectors as one: lanes of x, and of y where their number has the bit DISTANCE, each joined with its neighbour so many
// lanes away.
template <int DISTANCE, class Vector, class F>
INLINED Vector paired(Vector x, Vector y, F join) {
    Vector first, second;
#ifdef __clang__
    for (int j = 0; j < LANES; ++j) {
        first[j] = j & DISTANCE ? y[j ^ DISTANCE] : x[j];
        second[j] = j & DISTANCE ? y[j] : x[j ^ DISTANCE];
    }
#else
    Ints firsts, seconds;
    for (int j = 0; j < LANES; ++j) {
        firsts[j] = j & DISTANCE ? LANES + (j ^ DISTANCE) : j;
        seconds[j] = j & DISTANCE ? LANES + j : j ^ DISTANCE;
    }
    first = __builtin_shuffle(x, y, firsts);
    second = __builtin_shuffle(x, y, seconds);
#endif
    return join(first, second);
}

// Of each of LANES vectors what `reduce` has, in their order; they are lost.
template <int DISTANCE = LANES / 2, class Vector, class F>
INLINED Vector reduce_each(Vector* vectors, F join) {
    if constexpr (DISTANCE == 0) return *vectors;
    else {
        for (int i = 0; i < DISTANCE; ++i) vectors[i] = paired<DISTANCE>(vectors[i], vectors[i + DISTANCE], join);
        return reduce_each<DISTANCE / 2>(vectors, join);
    }
}

// Whether a lane has a bit.
inline bool any(Ints x) {
#if defined(__AVX512BW__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    return reduce(x, [](Ints x, Ints y) { return x | y; })[0];
#endif
}

inline bool holds_nan(const float* values, int64_t size) {
    bool found = false;
    for (int64_t i = 0; i < size; ++i) found |= values[i] != values[i];
    return found;
}

// MinMax of what is seen, vector by vector, unless a value is nan.
struct MinMax {
    Floats low = Floats{} + as_float(INFINITE), high = -low, zeros = {};

    void update(Floats x) {
        low = smaller(x, low);  // passes over nan
        high = larger(x, high);
        zeros = multiply_add(x, Floats{}, zeros);  // where a product costs less than one more sum
    }

    float least() const { return reduce(low, smaller<Floats>)[0] + 0.0f; }  // of zeros, +0
    float most() const { return reduce(high, larger<Floats>)[0] + 0.0f; }

    // No bits, unless a value is infinite or nan.
    Ints nonfinite_mask() const { return (Ints)(zeros - zeros); }
};

// The smallest and the largest of `values` [size]; nan, both, where one is.
template <int SIZE>
inline void minmax(const float* values, int64_t size, float& least, float& most) {
    const int64_t count = SIZE ? SIZE : size;
    MinMax seen;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) seen.update(load(values + i));
    if (i < count) {
        Floats x = Floats{} + values[i];
        for (int64_t j = 1; i + j < count; ++j) x[j] = values[i + j];
        seen.update(x);
    }
    const bool unordered = any(seen.nonfinite_mask()) && holds_nan(values, count);
    least = unordered ? as_float(MAGNITUDE) : seen.least();
    most = unordered ? as_float(MAGNITUDE) : seen.most();
}
