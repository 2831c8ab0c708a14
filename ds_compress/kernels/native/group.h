// A group of values and its grid, as kernels/reference/groups.py specifies them: equal to the bit.
//
// A group is read once, and everything else happens in the first-level cache.

#pragma once

#include "bits.h"
#include "dither.h"
#include "floats.h"
#include "gaussian.h"
#include "hadamard.h"
#include "limits.h"

constexpr int MAX_GROUP = 4096;

struct Format {
    int64_t bits, symmetric, wide_scale;  // wide_scale: fp32 rather than bf16
    const float* diagonal;                // of the rotation, or null
    const Levels* levels;                 // of the grid for normal values, or null where it is uniform

    int top() const { return (1 << bits) - (symmetric && bits > 1 ? 2 : 1); }
};

inline Format format(int64_t bits, int64_t symmetric, int64_t wide_scale, int64_t unrotated, const float* diagonal,
              int64_t uniform, const float* levels) {
    return {bits, symmetric, wide_scale, unrotated ? nullptr : diagonal,
            uniform ? nullptr : reinterpret_cast<const Levels*>(levels)};
}

struct Grid {
    float step, offset, inverse;
};

// The smallest float of the scale's format that is not below x; nan stays nan.
inline float at_least(float x, bool wide) {
    if (wide || x != x) return x;
    const uint32_t bits = as_bits(x);
    return as_float((bits >> 31 ? bits : bits + 0xFFFF) & 0xFFFF0000);
}

// SIZE is that of the group, or 0 where it is known at run time only.
template <int SIZE>
struct Group {
    int64_t size;
    alignas(64) float values[SIZE ? SIZE : MAX_GROUP + LANES];
    alignas(64) float products[SIZE ? SIZE : MAX_GROUP + LANES];
    alignas(64) int32_t codes[SIZE ? SIZE : MAX_GROUP + LANES];  // to be packed
    alignas(64) uint8_t bytes[SIZE ? SIZE : MAX_GROUP + LANES];  // unpacked codes

    int64_t count() const { return SIZE ? SIZE : size; }

    // In whole vectors, as they are read again: a vector that was written in pieces takes long to come back.
    template <class In>
    void load(const In* x) {
        in_vectors<SIZE>(size, [&](int64_t i, int64_t lanes) { keep(some(x + i, lanes), values + i); });
    }

    template <class Out>
    void store_to(Out* y) const {
        for (int64_t i = 0; i < count(); ++i) store(values[i], y[i]);
    }

    // The values are not wanted in the caches, which cannot hold them all; whole vectors.
    template <class Out>
    void stream_to(Out* y) const {
        alignas(64) Out rounded[SIZE ? SIZE : MAX_GROUP];
        store_to(rounded);
        constexpr int each = sizeof(float) / sizeof(Out) * LANES;
        for (int64_t i = 0; i < count(); i += each)
            stream(::load(reinterpret_cast<const float*>(rounded + i)), reinterpret_cast<float*>(y + i));
    }

    // For normal values: their codes, too.
    Grid gaussian(const Format& format) {
        const Levels& levels = *format.levels;
        float scale;
        switch (format.bits) {
            case 1: scale = gaussian_codes<SIZE, 1>(values, size, levels, codes, products); break;
            case 2: scale = gaussian_codes<SIZE, 2>(values, size, levels, codes, products); break;
            case 3: scale = gaussian_codes<SIZE, 4>(values, size, levels, codes, products); break;
            default: scale = gaussian_codes<SIZE, 8>(values, size, levels, codes, products);
        }
        if (!format.wide_scale) {
            uint16_t rounded;
            store(scale, rounded);
            scale = to_float(rounded);
        }
        return {scale, 0, 0};
    }

    Grid grid(const Format& format) {
        if (format.levels) return gaussian(format);
        if (format.symmetric) {
            const float reach = as_float(largest_magnitude<SIZE>(values, size));
            return inverted(at_least(2 * reach / format.top(), format.wide_scale), -format.top() / 2.0f);
        }
        float least, most;
        limits<SIZE>(values, size, least, most);
        const float offset = -at_least(-least, format.wide_scale);
        Grid grid = inverted(at_least((most - offset) / format.top(), format.wide_scale), 0);
        grid.offset = offset;
        return grid;
    }

    // A step's inverse is finite, and of no step 1: see `_step` in kernels/affine.py.
    static Grid inverted(float step, float offsets) {
        step = step > 0 && step < 0x1p-126f ? 0x1p-126f : step;
        return {step, step * offsets, step > 0 ? 1 / step : 1};
    }

    // Of the values from place i on, within the grid; nan is 0. Behind the last value there is room.
    Floats positions(int64_t i, Grid grid, int top, float more = 0) const {
        const Floats position = (::load(values + i) - grid.offset) * grid.inverse + more;
        const Floats most = Floats{} + static_cast<float>(top);
        const Floats positive = position > 0.0f ? position : Floats{};
        return positive < most ? positive : most;
    }

    void to_codes(Grid grid, int top) {
        for (int64_t i = 0; i < count(); i += LANES)
            keep(__builtin_convertvector(positions(i, grid, top, 0.5f), Ints), codes + i);
    }

    // Rounds up or down as a fraction of 16 bits and its draw have a carry, or not.
    void dither_codes(Grid grid, int top, Dither dither, uint32_t number) {
        const auto round = [&](int64_t i, Words draws) {
            const Ints fixed = __builtin_convertvector(positions(i, grid, top) * 65536.0f + 0.5f, Ints);
            keep((fixed + (Ints)draws) >> 16, codes + i);
        };
        for (int64_t i = 0; i < count(); i += 64)
            for (int64_t j = i; j < i + 32 && j < count(); j += LANES) {
                const Words words = dither.words(number + i / 2 + j % 32);
                round(j, words & 0xFFFF);
                if (j + 32 < count()) round(j + 32, words >> 16);
            }
    }

    void from_bytes(const Format& format, Grid grid) {
        in_vectors<SIZE>(size, [&](int64_t i, int64_t) { keep(::load(bytes + i), codes + i); });
        from_codes(format, grid);
    }

    void from_codes(const Format& format, Grid grid) {
        if (format.levels) {
            switch (format.bits) {
                case 1: return gaussian_values<SIZE, 1>(codes, size, *format.levels, grid.step, values);
                case 2: return gaussian_values<SIZE, 2>(codes, size, *format.levels, grid.step, values);
                case 3: return gaussian_values<SIZE, 4>(codes, size, *format.levels, grid.step, values);
                default: return gaussian_values<SIZE, 8>(codes, size, *format.levels, grid.step, values);
            }
        }
        in_vectors<SIZE>(size, [&](int64_t i, int64_t) { keep(uniform(i, grid), values + i); });
    }

    // The values of codes from place i on, of a uniform grid.
    Floats uniform(int64_t i, Grid grid) const {
        Ints code;
        std::memcpy(&code, codes + i, sizeof code);
        return __builtin_convertvector(code, Floats) * grid.step + grid.offset;
    }

    // The same of codes that are bytes, to where they are wanted.
    template <class Out>
    void uniform_to(Grid grid, Out* y) const {
        in_vectors<SIZE>(size, [&](int64_t i, int64_t lanes) {
            keep_some(__builtin_convertvector(::load(bytes + i), Floats) * grid.step + grid.offset, y + i, lanes);
        });
    }
};

inline float load_scale(const void* scales, int64_t i, bool wide) {
    return wide ? static_cast<const float*>(scales)[i] : to_float(static_cast<const uint16_t*>(scales)[i]);
}

inline void store_scale(float scale, void* scales, int64_t i, bool wide) {
    if (wide) static_cast<float*>(scales)[i] = scale;
    else store(scale, static_cast<uint16_t*>(scales)[i]);
}

#define FOR_SIZE(FUNCTION, ...)                          \
    switch (size) {                                      \
        case 32: return FUNCTION<32>(__VA_ARGS__);       \
        case 64: return FUNCTION<64>(__VA_ARGS__);       \
        case 128: return FUNCTION<128>(__VA_ARGS__);     \
        default: return FUNCTION<0>(__VA_ARGS__);        \
    }
