// Stores that go past the caches, for values that are more than those hold.

#pragma once

#include "vectors.h"

constexpr int64_t STREAMED = 8 << 20;  // bytes beyond which values go past the caches

// Whether y [n] does: it begins with a line of the caches, and is more than they hold.
template <class Out>
inline bool to_be_streamed(const Out* y, int64_t n) {
    return reinterpret_cast<uintptr_t>(y) % 64 == 0 && n * static_cast<int64_t>(sizeof(Out)) > STREAMED;
}

// `y` begins at a multiple of a vector.
inline void stream(Floats x, float* y) {
#if defined(__AVX512F__)
    _mm512_stream_ps(y, (__m512)x);
#elif defined(__AVX2__)
    _mm256_stream_ps(y, (__m256)x);
#elif defined(__x86_64__)
    _mm_stream_ps(y, (__m128)x);
#else
    keep(x, y);
#endif
}

// As bf16; `y` begins at a multiple of half a vector.
inline void stream(Floats x, uint16_t* y) {
#if defined(__AVX512F__)
    alignas(32) uint16_t halves[LANES];
    keep(x, halves);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(y), _mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
#elif defined(__AVX2__)
    alignas(16) uint16_t halves[LANES];
    keep(x, halves);
    _mm_stream_si128(reinterpret_cast<__m128i*>(y), _mm_load_si128(reinterpret_cast<const __m128i*>(halves)));
#else
    keep(x, y);
#endif
}

// After the last of them.
inline void streamed() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

template <bool STREAMS, class Out>
inline void place(Floats x, Out* y) {
    if constexpr (STREAMS) stream(x, y);
    else keep(x, y);
}

// The first `count` values of x; what goes past the caches is a multiple of a vector.
template <bool STREAMS, class Out>
inline void place_some(Floats x, Out* y, int64_t count) {
    if (STREAMS || count == LANES) place<STREAMS>(x, y);
    else keep_some(x, y, count);
}
