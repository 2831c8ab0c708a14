// Vectors of floats, as wide as a register of the target: the compiler cuts wider ones up, value by value.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

inline Floats load(const float* values) {
    Floats x;
    std::memcpy(&x, values, sizeof x);
    return x;
}

inline void keep(Floats x, float* values) { std::memcpy(values, &x, sizeof x); }

inline void keep(Ints x, int32_t* values) { std::memcpy(values, &x, sizeof x); }

// Every lane's neighbour, so many lanes away.
template <int DISTANCE>
inline Floats swapped(Floats x) {
    Floats other;
#ifdef __clang__
    for (int j = 0; j < LANES; ++j) other[j] = x[j ^ DISTANCE];
#else
    Ints lanes;
    for (int j = 0; j < LANES; ++j) lanes[j] = j ^ DISTANCE;
    other = __builtin_shuffle(x, lanes);
#endif
    return other;
}

// x * signs + other, where signs are 1 and -1: rounded once, as the sum is.
inline Floats signed_sum(Floats x, Floats signs, Floats other) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)signs, (__m512)other);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)signs, (__m256)other);
#else
    return x * signs + other;
#endif
}

// What is left of a vector when each half is joined with the other, until one lane is left.
template <int DISTANCE = LANES / 2, class F>
inline Floats folded(Floats x, F join) {
    if constexpr (DISTANCE == 0) return x;
    else return folded<DISTANCE / 2>(join(x, swapped<DISTANCE>(x)), join);
}

inline Floats smaller(Floats x, Floats y) { return x < y ? x : y; }
inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

// Past the caches; `values` begins at a multiple of a vector.
inline void stream(Floats x, float* values) {
#if defined(__AVX512F__)
    _mm512_stream_ps(values, (__m512)x);
#elif defined(__AVX2__)
    _mm256_stream_ps(values, (__m256)x);
#elif defined(__x86_64__)
    _mm_stream_ps(values, (__m128)x);
#else
    keep(x, values);
#endif
}

inline void streamed() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
