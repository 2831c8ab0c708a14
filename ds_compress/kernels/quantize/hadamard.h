// The rotation of hadamard.py: signs, then butterflies, nearest values first.

#pragma once

#include "../simd/vectors.h"

// The butterflies between the first `count` of LANES values, from those DISTANCE apart on.
template <int DISTANCE = 1>
inline Floats join_lanes(Floats x, int64_t count) {
    if constexpr (DISTANCE < LANES) {
        if (DISTANCE >= count) return x;
        Floats signs;
        for (int j = 0; j < LANES; ++j) signs[j] = j & DISTANCE ? -1 : 1;
        return join_lanes<2 * DISTANCE>(multiply_add(x, signs, swapped<DISTANCE>(x)), count);
    }
    return x;
}

// All those between COUNT vectors in a row; the compiler keeps them in registers.
template <int COUNT>
inline void join_vectors(const float* from, float* values, const float* factors, int64_t near) {
    Floats x[COUNT];
    for (int i = 0; i < COUNT; ++i) {
        x[i] = load(from + i * LANES);
        if (factors) x[i] *= load(factors + i * LANES);
        x[i] = join_lanes(x[i], near);
    }
    for (int distance = 1; distance < COUNT; distance *= 2)
        for (int i = 0; i < COUNT; ++i)
            if (!(i & distance)) {
                const Floats first = x[i], second = x[i + distance];
                x[i] = first + second;
                x[i + distance] = first - second;
            }
    for (int i = 0; i < COUNT; ++i) store(x[i], values + i * LANES);
}

// The unscaled transform of `from` [size] in `values`, which may be the same, and behind which there is room for LANES
// more, first multiplied by `factors` [size], unless that is null; SIZE is the size, or 0 where it is known at run time
// only. All but the last butterflies, between values so far apart as is returned, unless that is the size.
template <int SIZE>
INLINED int64_t first_butterflies(const float* from, float* values, int64_t size, const float* factors) {
    constexpr int ROW = SIZE && SIZE < 8 * LANES ? (SIZE + LANES - 1) / LANES : 8;
    const int64_t count = SIZE ? SIZE : size, near = count < LANES ? count : LANES;
    int64_t distance = near;
    if (factors && near < LANES) {  // there are no more of them than values
        for (int64_t i = 0; i < count; ++i) values[i] = from[i] * factors[i];
        from = values, factors = nullptr;
    }
    if (count >= ROW * LANES) {
        distance = ROW * LANES;
        for (int64_t start = 0; start < count; start += distance)
            join_vectors<ROW>(from + start, values + start, factors ? factors + start : factors, LANES);
    } else {
        for (int64_t start = 0; start < count; start += near)
            join_vectors<1>(from + start, values + start, factors ? factors + start : factors, near);
    }
    for (; 2 * distance < count; distance *= 2)
        for (int64_t start = 0; start < count; start += 2 * distance)
            for (int64_t i = start; i < start + distance; i += LANES) {
                const Floats first = load(values + i), second = load(values + i + distance);
                store(first + second, values + i);
                store(first - second, values + i + distance);
            }
    return distance;
}

// See `largest_value` in hadamard.py.
inline float largest_value(int64_t size) {
    return as_float(static_cast<uint32_t>(127 + 122 - (3 * __builtin_ctzll(size) + 1) / 2) << 23);
}

// `diagonal` [size]: the signs, times the square root of 1 / size. Values up to `largest_value`.
template <int SIZE>
inline void rotate(const float* from, float* values, int64_t size, const float* diagonal) {
    const int64_t count = SIZE ? SIZE : size, distance = first_butterflies<SIZE>(from, values, size, diagonal);
    for (int64_t i = 0; distance < count && i < distance; i += LANES) {
        const Floats first = load(values + i), second = load(values + i + distance);
        store(first + second, values + i);
        store(first - second, values + i + distance);
    }
}

// Backwards, and work(i, how many lanes exist, the vector that begins at place i) has the result; `values` are lost.
template <int SIZE, class F>
INLINED void rotate_back(float* values, int64_t size, const float* diagonal, const F& work) {
    const int64_t count = SIZE ? SIZE : size, distance = first_butterflies<SIZE>(values, values, size, nullptr);
    if (distance == count) {
        in_vectors<SIZE>(size, [&](int64_t i, int64_t lanes) {
            work(i, lanes, load(values + i) * load_partial(diagonal + i, lanes));
        });
    } else {
        for (int64_t i = 0; i < distance; i += LANES) {
            const Floats first = load(values + i), second = load(values + i + distance);
            work(i, LANES, (first + second) * load(diagonal + i));
            work(i + distance, LANES, (first - second) * load(diagonal + i + distance));
        }
    }
}
