// The grids of groups, as grid.py specifies them; grids for normal values, as gaussian.py does.

#pragma once

#include "../simd/reduce.h"
#include "../simd/vectors.h"

// Where a grid ends; see grid.py.
constexpr float LARGEST_LIMIT = 0x1p125f;

// Steps and offsets up to this need no care: no value was cut off for them, and sums of their values are finite.
constexpr float ORDINARY = 0x1p64f;

struct Grid {
    float step, offset, inverse, top;

    // Whether no value is beyond the grid. That of encoding: its step is not negative.
    bool is_ordinary() const { return step + (offset < 0 ? -offset : offset) <= ORDINARY; }

    // Whether it is, and neither step nor offset is larger than `magnitude`.
    bool within(float magnitude) const {  // a damaged step may be negative
        return step <= magnitude && step >= -magnitude && offset <= magnitude && offset >= -magnitude;
    }
};

// The smallest floats of the scale's format that are not below x; nan stays nan.
inline Floats at_least(Floats x, bool wide) {
    if (wide) return x;
    const Words bits = (Words)x, up = (Ints)x < 0 ? bits : bits + 0xFFFF;
    return x != x ? x : (Floats)(up & 0xFFFF0000);
}

// As many as there are lanes, or COUNT, which is a multiple of that.
template <int COUNT>
struct Grids {
    alignas(64) float steps[COUNT], offsets[COUNT], inverses[COUNT];
    float top;  // the largest code

    Grid operator[](int i) const { return {steps[i], offsets[i], inverses[i], top}; }

    // Whether they are finite, and neither steps nor offsets larger than `magnitude`.
    bool within(float magnitude) const {
        Ints beyond = {};
        for (int i = 0; i < COUNT; i += LANES) {
            const Floats step = load(steps + i), offset = load(offsets + i);
            beyond |= ~((step <= magnitude) & (offset <= magnitude) & (offset >= -magnitude));
        }
        return !any(beyond);
    }

    // From `least` to `most` [COUNT].
    void between(const float* least, const float* most, bool wide) {
        for (int i = 0; i < COUNT; i += LANES) {
            const Floats offset = -at_least(-saturated(load(least + i), LARGEST_LIMIT), wide);
            make(at_least((saturated(load(most + i), LARGEST_LIMIT) - offset) / top, wide), i);
            store(offset, offsets + i);
        }
    }

    // From -reach to reach.
    void around_zero(const float* reach, bool wide) {
        for (int i = 0; i < COUNT; i += LANES) {
            make(at_least(2 * saturated(load(reach + i), LARGEST_LIMIT) / top, wide), i);
            store(load(steps + i) * (-top / 2), offsets + i);
        }
    }

    // The first `count`, from place `first` on; no offsets where those are null.
    void store_scales(int count, bool wide, int64_t first, void* to_steps, void* to_offsets) const {
        store_each(steps, count, wide, to_steps, first);
        if (to_offsets) store_each(offsets, count, wide, to_offsets, first);
    }

private:
    // A step's inverse is finite, and of no step 1: see `_step` in grid.py.
    void make(Floats step, int i) {
        constexpr float smallest = 0x1p-126f;
        step = step > 0.0f ? larger(step, Floats{} + smallest) : step;
        store(step, steps + i);
        store(step > 0.0f ? 1.0f / step : Floats{} + 1.0f, inverses + i);
    }

    static void store_each(const float* scales, int count, bool wide, void* to, int64_t first) {
        for (int i = 0; i < count; i += LANES) {
            const Floats some = load(scales + i);
            const int64_t lanes = count - i < LANES ? count - i : LANES;
            if (wide) store_partial(some, static_cast<float*>(to) + first + i, lanes);
            else store_partial(some, static_cast<uint16_t*>(to) + first + i, lanes);
        }
    }
};

// Grids for normal values. SIZE is that of the group, or 0 where it is known at run time only; HALF is the number of levels
// above 0. Memory of [size] is followed by a whole vector that may be overwritten.

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
    store(sum, lanes);
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
        store((place ^ (Ints)(x < 0.0f)) + HALF, codes + i * LANES);
        const Floats nearest = level.at(place);
        store((Floats)((Ints)x & INT32_MAX) * nearest, products + i * LANES);
        return nearest * nearest;
    }, size);
    const float fitted = tree_sum<SIZE>([=](int i) { return load(products + i * LANES); }, size) / energy_sum;
    const float scale = fitted * up, largest = 0x1p124f;
    return (scale > largest ? largest : scale) + (fitted - fitted);
}

// The values of `codes` [size].
template <int SIZE, int HALF>
inline void gaussian_values(const int32_t* codes, int64_t size, const Levels& levels, float scale, float* values) {
    const Table<HALF> value(levels.level, scale);
    for (int64_t i = 0; i < (SIZE ? SIZE : size); i += LANES) {
        const Ints code = load(codes + i), below = code < HALF;
        const Ints found = (Ints)value.at((code ^ below) & (HALF - 1));
        store((Floats)(found ^ (below & INT32_MIN)), values + i);
    }
}
