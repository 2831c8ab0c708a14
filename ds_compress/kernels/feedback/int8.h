// Values as int8 codes with a scale for each group, as kernels/reference/feedback.py specifies them.

#pragma once

#include "../simd/reduce.h"
#include "../simd/minmax.h"
#include "../simd/vectors.h"

constexpr int64_t CODED = 128;  // values that share a scale

// The codes of groups of CODED values, as bytes, which are any where one is not finite, and their scales: of no more groups
// than there are lanes, so that none waits alone for its divisions.
inline void to_int8(const float* values, int64_t groups, uint8_t* codes, float* scales) {
    constexpr float smallest = 0x1p-126f;
    Ints largest[LANES] = {};
    for (int64_t k = 0; k < groups; ++k) {
        Ints most = {};
        for (int64_t i = k * CODED; i < (k + 1) * CODED; i += LANES)
            most = larger(most, (Ints)load(values + i) & MAGNITUDE);
        largest[k] = most;
    }
    Floats scale = (Floats)folded_each(largest, larger<Ints>) / 127.0f;
    scale = scale > 0.0f ? larger(scale, Floats{} + smallest) : scale;
    keep_some(scale, scales, groups);
    float inverses[LANES];
    keep(scale > 0.0f ? 1.0f / scale : Floats{}, inverses);
    for (int64_t k = 0; k < groups; ++k)
        for (int64_t i = k * CODED; i < (k + 1) * CODED; i += 4 * LANES) {
            Ints made[4];  // less than half a code beyond -127 and 127
            for (int j = 0; j < 4; ++j) made[j] = nearest(load(values + i + j * LANES) * inverses[k]);
            keep(in_order(narrowed_signed(made)), codes + i);
        }
}

inline void to_int8(const float* values, int64_t n, int8_t* codes, float* scales) {
    const int64_t whole = n / CODED;
    for (int64_t group = 0; group < whole; group += LANES) {
        const int64_t groups = whole - group < LANES ? whole - group : LANES, start = group * CODED;
        to_int8(values + start, groups, reinterpret_cast<uint8_t*>(codes + start), scales + group);
    }
    const int64_t start = whole * CODED;
    if (start < n) {
        float padded[CODED] = {};
        uint8_t made[CODED];
        std::memcpy(padded, values + start, (n - start) * sizeof(float));
        to_int8(padded, 1, made, scales + whole);
        std::memcpy(codes + start, made, n - start);
    }
}

inline void from_int8(const int8_t* codes, const float* scales, int64_t n, float* values) {
    const auto decode = [](const int8_t* from, float scale, float* to) {
        keep(__builtin_convertvector(load(from), Floats) * scale, to);
    };
    int64_t start = 0;
    for (; start + CODED <= n; start += CODED) {
        const float scale = *scales++;
        for (int64_t i = start; i < start + CODED; i += LANES) decode(codes + i, scale, values + i);
    }
    if (start < n) {
        int8_t last[CODED] = {};
        float made[CODED];
        std::memcpy(last, codes + start, n - start);
        for (int64_t i = 0; i < CODED; i += LANES) decode(last + i, *scales, made + i);
        std::memcpy(values + start, made, (n - start) * sizeof(float));
    }
}
