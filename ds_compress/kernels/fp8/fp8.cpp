// Floats of fewer bits: bf16; and 8 bits with a scale for each group, the largest magnitude over the largest of the format.

#include <cmath>
#include <type_traits>

#include "../native/calls.h"
#include "../simd/reduce.h"
#include "../simd/nontemporal.h"
#include "../simd/vectors.h"

namespace {

constexpr int64_t STEP = 4 * LANES;  // values that are looked at together

// An 8-bit float with MANTISSA bits behind the point, whose exponents are biased by BIAS, and whose finite magnitudes
// end at code TOP.
template <int MANTISSA, int BIAS, int TOP>
struct Format {
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr int32_t REBIAS = (127 - BIAS) << 23;
    static constexpr int32_t NORMAL = (128 - BIAS) << 23;  // the smallest normal number

    // The code of finite magnitudes up to the largest. A float SHIFT powers of two above has no bits below those of the
    // code: the sum is rounded as the code is.
    static Ints rounded(Ints size) {
        const Ints exponent = larger(size & INFINITE, Ints{} + NORMAL), coarse = exponent + (SHIFT << 23);
        return (Ints)((Floats)size + (Floats)coarse) - coarse + ((exponent - NORMAL) >> SHIFT);
    }

    static Ints to_codes(Floats value, Ints largest) {
        const Ints all = (Ints)value & MAGNITUDE, code = rounded(smaller(all, largest));
        return (all > INFINITE ? Ints{} + 0x7F : code) | ((Ints)((Words)value >> 24) & 0x80);
    }

    static Floats to_values(Ints codes) {
        const Ints size = codes & 0x7F;
        const Ints subnormal = size < (1 << MANTISSA);  // digits behind a 1 that is taken off again
        const Ints bits = (size << SHIFT) + REBIAS + (subnormal & 1 << 23);
        const Floats finite = (Floats)bits - (Floats)(subnormal & NORMAL);
        return (Floats)((Ints)finite | ((size > TOP) & INFINITE) | (Ints)((Words)codes >> 7 << 31));
    }
};

using E4M3 = Format<3, 7, 0x7E>;
using E5M2 = Format<2, 15, 0x7B>;

// The bits of the largest magnitude of x [size]: of nan, if there is one.
template <class In>
uint32_t reach(const In* x, int64_t size) {
    Ints most[4] = {};
    int64_t i = 0;
    for (; i + STEP <= size; i += STEP)
        for (int j = 0; j < 4; ++j) most[j] = larger(most[j], (Ints)load(x + i + j * LANES) & MAGNITUDE);
    const Ints both = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    int32_t key = reduce(both, larger<Ints>)[0];
    for (; i < size; ++i) {
        const int32_t all = as_bits(to_float(x[i])) & MAGNITUDE;
        key = all > key ? all : key;
    }
    return key;
}

template <class Format, class In>
void encode_step(const In* x, Floats scale, Ints largest, uint8_t* codes) {
    Ints made[4];
    for (int i = 0; i < 4; ++i) made[i] = Format::to_codes(load(x + i * LANES) / scale, largest);
    store(made, codes);
}

// The same by a scale that is a normal number and far from the largest: no share goes further than the largest code.
template <class Format, class In>
void encode_normal_step(const In* x, Floats scale, uint8_t* codes) {
    Ints made[4], signs[4];
    for (int i = 0; i < 4; ++i) {
        signs[i] = (Ints)(load(x + i * LANES) / scale);
        made[i] = Format::rounded(signs[i] & MAGNITUDE);
    }
    store(in_order(narrowed(made) | (narrowed_signed(signs) & 0x80)), codes);
}

template <class Format, class In>
void encode(const In* x, int64_t groups, int64_t size, float largest, uint8_t* codes, float* scales) {
    const Ints most = Ints{} + static_cast<int32_t>(as_bits(largest));
    for (int64_t group = 0; group < groups; ++group, x += size, codes += size) {
        const Floats most_of_all = saturated(Floats{} + as_float(reach(x, size)), 0x1p127f);
        const float scale = most_of_all[0] / largest;
        const Floats divisor = Floats{} + (scale == 0 ? 1 : scale);
        scales[group] = scale;
        int64_t i = 0;
        if (scale >= 0x1p-126f && scale < 0x1p64f)
            for (; i + STEP <= size; i += STEP) encode_normal_step<Format>(x + i, divisor, codes + i);
        for (; i + STEP <= size; i += STEP) encode_step<Format>(x + i, divisor, most, codes + i);
        if (i < size) {
            In last[STEP] = {};
            uint8_t made[STEP];
            std::memcpy(last, x + i, (size - i) * sizeof(In));
            encode_step<Format>(last, divisor, most, made);
            std::memcpy(codes + i, made, size - i);
        }
    }
}

#if defined(__F16C__)

// Sixteen codes as halves, which have as many digits or more, and a larger range; of E4M3 they are 256 times too small.
template <class Format>
__m256i as_halves(const uint8_t* codes) {
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i high = _mm256_slli_epi16(bytes, 8);
    if (std::is_same_v<Format, E5M2>) return high;
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(-0x4080));
    const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_slli_epi16(bytes, 9), _mm256_set1_epi16(-0x200));  // all bits set
    return _mm256_or_si256(half, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7C00)));
}

template <class Format, bool STREAMS, class Out>
void decode_halves(const uint8_t* codes, Floats scale, Out* y) {
    const __m256i halves = as_halves<Format>(codes);
#if defined(__AVX512F__)
    store_streamed<STREAMS>((Floats)_mm512_maskz_cvtph_ps(ALL, halves) * scale, y);
#else
    store_streamed<STREAMS>((Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)) * scale, y);
    store_streamed<STREAMS>((Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)) * scale, y + LANES);
#endif
}

#endif

template <class Format, bool STREAMS, class Out>
void decode(const uint8_t* codes, const float* scales, int64_t groups, int64_t size, Out* y) {
    for (int64_t group = 0; group < groups; ++group, codes += size, y += size) {
        const Floats scale = Floats{} + scales[group];
        int64_t i = 0;
#if defined(__F16C__)
        constexpr float factor = std::is_same_v<Format, E5M2> ? 1 : 256;
        if (std::fabs(scales[group] * factor) < as_float(INFINITE))  // the product is exact
            for (; i + 16 <= size; i += 16) decode_halves<Format, STREAMS>(codes + i, scale * factor, y + i);
#endif
        for (; i + LANES <= size; i += LANES) store_streamed<STREAMS>(Format::to_values(load(codes + i)) * scale, y + i);
        if (i < size) {
            uint8_t last[LANES] = {};
            Out made[LANES];
            std::memcpy(last, codes + i, size - i);
            store(Format::to_values(load(last)) * scale, made);
            std::memcpy(y + i, made, (size - i) * sizeof(Out));
        }
    }
}

template <class Format, class Out>
void decode(const uint8_t* codes, const float* scales, int64_t groups, int64_t size, Out* y) {
    if ((groups > 1 && size % LANES != 0) || !to_be_streamed(y, groups * size))
        return decode<Format, false>(codes, scales, groups, size, y);
    decode<Format, true>(codes, scales, groups, size, y);
    store_fence();
}

}  // namespace

extern "C" {

void to_bf16(const float* values, int64_t n, uint16_t* rounded) {
    const float most = to_float(largest(rounded));
    in_vectors(n, [=](int64_t i, int64_t count) {
        store_partial(saturated(load_partial(values + i, count), most), rounded + i, count);
    });
}

EXPORT_PARALLEL(to_bf16)

#define FLOAT8(NAME, FORMAT, WIDE, FLOAT)                                                                            \
    void encode_##NAME##_##WIDE(const FLOAT* x, int64_t groups, int64_t size, float largest, uint8_t* codes,         \
                                float* scales) {                                                                     \
        encode<FORMAT>(x, groups, size, largest, codes, scales);                                                     \
    }                                                                                                                \
    void decode_##NAME##_##WIDE(const uint8_t* codes, const float* scales, int64_t groups, int64_t size, FLOAT* y) { \
        decode<FORMAT>(codes, scales, groups, size, y);                                                              \
    }                                                                                                                \
    EXPORT_PARALLEL(encode_##NAME##_##WIDE)                                                                                 \
    EXPORT_PARALLEL(decode_##NAME##_##WIDE)

FLOAT8(e4m3, E4M3, fp32, float)
FLOAT8(e4m3, E4M3, bf16, uint16_t)
FLOAT8(e5m2, E5M2, fp32, float)
FLOAT8(e5m2, E5M2, bf16, uint16_t)

}  // extern "C"
