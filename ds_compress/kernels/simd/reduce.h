// What is made of the lanes of a vector.

#pragma once

#include "vectors.h"

// What is left of a vector when each half is joined with the other, until one lane is left.
template <int DISTANCE = LANES / 2, class Vector, class F>
INLINED Vector folded(Vector x, F join) {
    if constexpr (DISTANCE == 0) return x;
    else return folded<DISTANCE / 2>(join(x, swapped<DISTANCE>(x)), join);
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

// Of each of LANES vectors what `folded` has, in their order; they are lost.
template <int DISTANCE = LANES / 2, class Vector, class F>
INLINED Vector folded_each(Vector* vectors, F join) {
    if constexpr (DISTANCE == 0) return *vectors;
    else {
        for (int i = 0; i < DISTANCE; ++i) vectors[i] = paired<DISTANCE>(vectors[i], vectors[i + DISTANCE], join);
        return folded_each<DISTANCE / 2>(vectors, join);
    }
}

// Whether a lane has a bit.
inline bool any(Ints x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    return folded(x, [](Ints x, Ints y) { return x | y; })[0];
#endif
}
