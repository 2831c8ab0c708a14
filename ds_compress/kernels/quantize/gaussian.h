// Codes on the grid for normal values of kernels/gaussian.py. SIZE is that of the group, or 0 where it is known at run
// time only; HALF is the number of levels above 0. Behind all that is [size] there is room for a whole vector.

#pragma once

#include "../simd/floats.h"
#include "../simd/minmax.h"
#include "../simd/vectors.h"

// Levels above 0, again and again until a vector is full; and boundaries between them: fewer, and what lacks is not read.
struct Levels {
    float level[16];
    float squared_boundary[16];
};

// The sum of `count` vectors, in the same order.
template <class F>
inline Floats tree(const F& vector, int count, int first = 0, int stride = 1) {
    if (stride >= count) return vector(first);
    return tree(vector, count, first, 2 * stride) + tree(vector, count, first + stride, 2 * stride);
}

template <int COUNT, int FIRST = 0, int STRIDE = 1, class F>
INLINED Floats tree(const F& vector) {
    if constexpr (STRIDE >= COUNT) return vector(FIRST);
    else return tree<COUNT, FIRST, 2 * STRIDE>(vector) + tree<COUNT, FIRST + STRIDE, 2 * STRIDE>(vector);
}

// The sum of `size` values, the i-th vector of which is vector(i): every half is added to the other until one is left.
// Of fewer values than LANES those behind may be anything.
template <int SIZE, class F>
inline float tree_sum(const F& vector, int64_t size) {
    Floats sum;
    if constexpr (SIZE != 0) sum = tree<SIZE / LANES>(vector);
    else sum = tree(vector, size < LANES ? 1 : size / LANES);
    float lanes[LANES];
    keep(sum, lanes);
    int64_t half = (SIZE ? SIZE : size) / 2;
    for (half = half < LANES / 2 ? half : LANES / 2; half; half /= 2)
        for (int i = 0; i < LANES / 2; ++i) lanes[i] = i < half ? lanes[i] + lanes[i + half] : lanes[i];
    return lanes[0];
}

// Numbers that places below HALF are looked up in; `numbers` repeat themselves after HALF.
template <int HALF>
struct Table {
#if defined(__AVX2__) && !defined(__clang__)
    Floats row;

    Table(const float* numbers, float factor) : row(load(numbers) * factor) {}

    Floats at(Ints place) const { return __builtin_shuffle(row, place); }
#else
    Floats each[HALF];

    Table(const float* numbers, float factor) {
        for (int j = 0; j < HALF; ++j) each[j] = Floats{} + numbers[j] * factor;
    }

    Floats at(Ints place) const {
        Floats found = each[0];
        for (int j = 1; j < HALF; ++j) found = place >= j ? each[j] : found;
        return found;
    }
#endif
};

// The codes of `values` [size], and the scale before it is rounded; `products` [size] is work space.
template <int SIZE, int HALF>
inline float gaussian_codes(const float* values, int64_t size, const Levels& levels, int32_t* codes, float* products) {
    const int64_t count = SIZE ? SIZE : size;
    int32_t exponent = static_cast<int32_t>(largest_magnitude<SIZE>(values, size) >> 23) - 127;
    exponent = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
    const float down = as_float((127 - exponent) << 23), up = as_float((127 + exponent) << 23);
    const float mean = tree_sum<SIZE>([=](int i) {
        const Floats x = load(values + i * LANES) * down;
        return x * x;
    }, size) * (1.0f / count);
    Floats boundary[HALF];
    for (int j = 0; j < HALF; ++j) boundary[j] = Floats{} + mean * levels.squared_boundary[j];
    const Table<HALF> level(levels.level, 1);
    const float energy_sum = tree_sum<SIZE>([&](int i) {
        const Floats x = load(values + i * LANES) * down;
        const Floats square = x * x;
        Ints place = {};
        for (int j = 0; j + 1 < HALF; ++j) place -= (Ints)(square > boundary[j]);
        keep((place ^ (Ints)(x < 0.0f)) + HALF, codes + i * LANES);
        const Floats nearest = level.at(place);
        keep((Floats)((Ints)x & INT32_MAX) * nearest, products + i * LANES);
        return nearest * nearest;
    }, size);
    const float scale = tree_sum<SIZE>([=](int i) { return load(products + i * LANES); }, size) / energy_sum * up;
    return scale + (scale - scale);
}

// The values of `codes` [size].
template <int SIZE, int HALF>
inline void gaussian_values(const int32_t* codes, int64_t size, const Levels& levels, float scale, float* values) {
    const Table<HALF> value(levels.level, scale);
    for (int64_t i = 0; i < (SIZE ? SIZE : size); i += LANES) {
        const Ints code = load(codes + i), below = code < HALF;
        const Ints found = (Ints)value.at((code ^ below) & (HALF - 1));
        keep((Floats)(found ^ (below & INT32_MIN)), values + i);
    }
}
