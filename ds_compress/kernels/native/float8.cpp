// 8-bit floats with a scale for each group: the largest magnitude over the largest of the format.

#include "floats.h"

namespace {

// An 8-bit float with MANTISSA bits behind the point, whose exponents are biased by BIAS.
template <int MANTISSA, int BIAS>
uint8_t to_fp8(float value, uint32_t largest) {
    constexpr int shift = 23 - MANTISSA;
    constexpr uint32_t rebias = static_cast<uint32_t>(127 - BIAS) << 23;
    constexpr uint32_t normal = static_cast<uint32_t>(128 - BIAS) << 23;        // the smallest normal number
    constexpr uint32_t magic = static_cast<uint32_t>(127 + 24 - BIAS - MANTISSA) << 23;  // its ulp is that of subnormals
    const uint32_t bits = as_bits(value), all = bits & MAGNITUDE;
    const uint32_t size = all < largest ? all : largest;
    const uint32_t rounded = (size - rebias + ((1u << (shift - 1)) - 1) + (size >> shift & 1)) >> shift;
    const uint32_t subnormal = as_bits(as_float(size) + as_float(magic)) - magic;
    const uint32_t code = size < normal ? subnormal : rounded;
    return static_cast<uint8_t>((all > INFINITE ? 0x7F : code) | (bits >> 24 & 0x80));
}

template <int MANTISSA, int BIAS, class In>
void encode(const In* x, int64_t groups, int64_t size, float largest, uint8_t* codes, float* scales) {
    for (int64_t group = 0; group < groups; ++group, x += size, codes += size) {
        uint32_t key = 0;  // of the largest magnitude; above that of infinity if there is a nan
        for (int64_t i = 0; i < size; ++i) {
            const uint32_t all = as_bits(to_float(x[i])) & MAGNITUDE;
            key = all > key ? all : key;
        }
        const float scale = as_float(key) / largest, step = scale == 0 ? 1 : scale;
        scales[group] = scale;
        for (int64_t i = 0; i < size; ++i) {
            codes[i] = to_fp8<MANTISSA, BIAS>(to_float(x[i]) / step, as_bits(largest));
        }
    }
}

template <class Out>
void decode(const uint8_t* codes, const float* scales, const float* values, int64_t groups, int64_t size, Out* y) {
    for (int64_t group = 0; group < groups; ++group, codes += size, y += size)
        for (int64_t i = 0; i < size; ++i) store(values[codes[i]] * scales[group], y[i]);
}

}  // namespace

extern "C" {

#define FLOAT8(NAME, MANTISSA, BIAS)                                                                                  \
    void encode_##NAME##_fp32(const float* x, int64_t groups, int64_t size, float largest, uint8_t* codes,            \
                              float* scales) {                                                                        \
        encode<MANTISSA, BIAS>(x, groups, size, largest, codes, scales);                                          \
    }                                                                                                                 \
    void encode_##NAME##_bf16(const uint16_t* x, int64_t groups, int64_t size, float largest, uint8_t* codes,         \
                              float* scales) {                                                                        \
        encode<MANTISSA, BIAS>(x, groups, size, largest, codes, scales);                                          \
    }

FLOAT8(e4m3, 3, 7)
FLOAT8(e5m2, 2, 15)

void decode_fp32(const uint8_t* codes, const float* scales, const float* values, int64_t groups, int64_t size,
                     float* y) {
    decode(codes, scales, values, groups, size, y);
}

void decode_bf16(const uint8_t* codes, const float* scales, const float* values, int64_t groups, int64_t size,
                     uint16_t* y) {
    decode(codes, scales, values, groups, size, y);
}

}  // extern "C"
