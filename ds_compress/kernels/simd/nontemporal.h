// Stores that go past the caches, for tensors that are larger than the caches. Between them no load may depend on another
// store: it would wait for all of these.

#pragma once

#include <type_traits>

#include "vectors.h"

// Bytes beyond which stores go past the caches. Smaller tensors are still cached when they are read next, which takes half as
// long.
constexpr int64_t STREAMED = 8 << 20;

// Whether y [n] goes past the caches: it begins at a cache line, and is larger than the caches.
inline bool to_be_streamed(const float* y, int64_t n) {
    return reinterpret_cast<uintptr_t>(y) % 64 == 0 && n * static_cast<int64_t>(sizeof(float)) > STREAMED;
}

// A vector of bf16 fills only a part of a cache line: past the caches that takes longer.
inline bool to_be_streamed(const uint16_t*, int64_t) { return false; }

// `y` begins at a multiple of a vector.
inline void stream(Floats x, float* y) {
#if defined(X86)
    X86(stream_ps)(y, x);
#else
    store(x, y);
#endif
}

// After the last of them.
inline void store_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

template <bool STREAMS, class Out>
inline void store_streamed(Floats x, Out* y) {
    if constexpr (STREAMS && std::is_same_v<Out, float>) stream(x, y);
    else store(x, y);
}

// x [n], a multiple of LANES, in `y`, which begins at one of a vector.
template <class Out>
inline void stream_all(const Out* x, int64_t n, Out* y) {
    for (int64_t i = 0; i < n; i += LANES) store_streamed<true>(load(x + i), y + i);
}

// The first `count` values of x; what goes past the caches is a multiple of a vector.
template <bool STREAMS, class Out>
inline void store_partial(Floats x, Out* y, int64_t count) {
    if (STREAMS || count == LANES) store_streamed<STREAMS>(x, y);
    else store_partial(x, y, count);
}

// Puts vectors to their places from `y` on: one, of which so many lanes exist, or four in which no value is nan.
template <bool STREAMS, class Out>
struct Delivery {
    Out* y;

    INLINED void operator()(int64_t place, int64_t lanes, Floats x) const { store_partial<STREAMS>(x, y + place, lanes); }

    INLINED void operator()(int64_t place, const Floats (&x)[4]) const {
        if constexpr (!STREAMS) return store_numbers(x, y + place);
        for (int k = 0; k < 4; ++k) store_streamed<STREAMS>(x[k], y + place + k * LANES);
    }
};

// Have x [n] brought into the caches, as far as it exists.
template <class In>
inline void fetch(const In* x, int64_t n) {
    for (int64_t i = 0; i < n * static_cast<int64_t>(sizeof(In)); i += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(x) + i);
}
