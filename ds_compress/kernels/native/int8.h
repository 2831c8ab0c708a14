// Values as int8 codes with a scale for each group, as kernels/reference/feedback.py specifies them.

#pragma once

#include "limits.h"
#include "vectors.h"

constexpr int64_t CODED = 128;  // values that share a scale

// The codes of CODED values, as bytes; returns the scale.
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
            const Floats place = load(values + i + j * LANES) * inverse;
            const Floats within = larger(smaller(place, Floats{} + 127.0f), Floats{} - 127.0f);
            made[j] = ((Ints)(within + coarse) - static_cast<int32_t>(as_bits(coarse))) & 255;
        }
        keep(made, codes + i);
    }
    return scale;
}

inline void to_int8(const float* values, int64_t n, int8_t* codes, float* scales) {
    for (int64_t start = 0; start < n; start += CODED) {
        float padded[CODED] = {};
        uint8_t made[CODED];
        const int64_t size = n - start < CODED ? n - start : CODED;
        if (size < CODED) std::memcpy(padded, values + start, size * sizeof(float));
        *scales++ = to_int8(size < CODED ? padded : values + start, made);
        std::memcpy(codes + start, made, size);
    }
}

inline void from_int8(const int8_t* codes, const float* scales, int64_t n, float* values) {
    for (int64_t start = 0; start < n; start += CODED) {
        const float scale = *scales++;
        in_vectors(n - start < CODED ? n - start : CODED, [&](int64_t i, int64_t count) {
            const uint8_t* bytes = reinterpret_cast<const uint8_t*>(codes + start + i);
            uint8_t last[LANES];
            if (count < LANES) bytes = static_cast<uint8_t*>(std::memcpy(last, bytes, count));
            const Ints code = (load(bytes) ^ 128) - 128;  // with their signs
            keep_some(__builtin_convertvector(code, Floats) * scale, values + start + i, count);
        });
    }
}
