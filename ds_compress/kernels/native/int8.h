// Values as int8 codes with a scale for each group, as kernels/reference/feedback.py specifies them.

#pragma once

#include "limits.h"
#include "vectors.h"

constexpr int64_t CODED = 128;  // values that share a scale

// The codes of CODED values, as bytes, which are any where one is not finite; returns the scale.
inline float to_int8(const float* values, uint8_t* codes) {
    constexpr float coarse = 0x1.8p23f, smallest = 0x1p-126f;  // floats as large as `coarse` are integers
    Ints most = {};
    in_vectors<CODED>(CODED, [&](int64_t i, int64_t) { most = larger(most, (Ints)load(values + i) & MAGNITUDE); });
    float scale = as_float(folded(most, larger<Ints>)[0]) / 127;
    scale = scale > 0 && scale < smallest ? smallest : scale;
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int64_t i = 0; i < CODED; i += 4 * LANES) {
        Ints made[4];
        for (int j = 0; j < 4; ++j) {
            const Floats share = load(values + i + j * LANES) * inverse;  // less than half a code beyond -127 and 127
            made[j] = (Ints)(share + coarse) - static_cast<int32_t>(as_bits(coarse));
        }
        keep(in_order(narrowed_signed(made)), codes + i);
    }
    return scale;
}

inline void to_int8(const float* values, int64_t n, int8_t* codes, float* scales) {
    int64_t start = 0;
    for (; start + CODED <= n; start += CODED)
        *scales++ = to_int8(values + start, reinterpret_cast<uint8_t*>(codes + start));
    if (start < n) {
        float padded[CODED] = {};
        uint8_t made[CODED];
        std::memcpy(padded, values + start, (n - start) * sizeof(float));
        *scales = to_int8(padded, made);
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
