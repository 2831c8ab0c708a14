// The rotation of kernels/hadamard.py: signs, and butterflies, nearest values first.

#pragma once

#include <cstdint>
#include <cstring>

// Floats that a vector register of the target holds: the compiler cuts wider vectors up, value by value.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

// The butterflies between the first `count` of LANES values, from those DISTANCE apart on. No vector enters or leaves a
// function: how one does depends on the target.
template <int DISTANCE = 1>
inline void join_lanes(float* values, int64_t count) {
    if constexpr (DISTANCE < LANES) {
        if (DISTANCE >= count) return;
        Floats x, other;
        Ints sign;
        std::memcpy(&x, values, sizeof x);
        for (int j = 0; j < LANES; ++j) sign[j] = j & DISTANCE ? INT32_MIN : 0;
#ifdef __clang__
        for (int j = 0; j < LANES; ++j) other[j] = x[j ^ DISTANCE];
#else
        Ints lanes;
        for (int j = 0; j < LANES; ++j) lanes[j] = j ^ DISTANCE;
        other = __builtin_shuffle(x, lanes);
#endif
        x = other + (Floats)((Ints)x ^ sign);
        std::memcpy(values, &x, sizeof x);
        join_lanes<2 * DISTANCE>(values, count);
    }
}

// The unscaled transform of `values` [size], behind which there is room for LANES more; SIZE is the size, or 0 where it
// is known at run time only.
template <int SIZE>
inline void butterflies(float* values, int64_t size) {
    const int64_t count = SIZE ? SIZE : size, near = count < LANES ? count : LANES;
    for (int64_t start = 0; start < count; start += near) join_lanes(values + start, near);
    for (int64_t distance = near; distance < count; distance *= 2)
        for (int64_t start = 0; start < count; start += 2 * distance)
            for (int64_t i = start; i < start + distance; ++i) {
                const float first = values[i], second = values[i + distance];
                values[i] = first + second;
                values[i + distance] = first - second;
            }
}

// `diagonal` [size]: the signs, times the square root of 1 / size.
template <int SIZE>
inline void rotate(float* values, int64_t size, const float* diagonal) {
    const int64_t count = SIZE ? SIZE : size;
    for (int64_t i = 0; i < count; ++i) values[i] *= diagonal[i];
    butterflies<SIZE>(values, size);
}

template <int SIZE>
inline void rotate_back(float* values, int64_t size, const float* diagonal) {
    const int64_t count = SIZE ? SIZE : size;
    butterflies<SIZE>(values, size);
    for (int64_t i = 0; i < count; ++i) values[i] *= diagonal[i];
}
