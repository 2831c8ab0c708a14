// 8-bit floats with a scale for each group: the largest magnitude over the largest of the format.

#include "floats.h"
#include "vectors.h"

namespace {

constexpr int64_t STEP = 4 * LANES;  // values that are looked at together

// An 8-bit float with MANTISSA bits behind the point, whose exponents are biased by BIAS, and whose finite magnitudes
// end at code TOP.
template <int MANTISSA, int BIAS, int TOP>
struct Format {
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr int32_t REBIAS = (127 - BIAS) << 23;
    static constexpr int32_t NORMAL = (128 - BIAS) << 23;  // the smallest normal number

    static Ints to_codes(Floats value, Ints largest) {
        const Ints all = (Ints)value & MAGNITUDE, size = all < largest ? all : largest;
        // A float SHIFT powers of two above has no bits below those of the code: the sum is rounded as the code is
        const Ints exponent = larger(size & INFINITE, Ints{} + NORMAL), coarse = exponent + (SHIFT << 23);
        const Ints digits = (Ints)((Floats)size + (Floats)coarse) - coarse;
        const Ints code = digits + ((exponent - NORMAL) >> SHIFT);
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
    int32_t key = folded(both, larger<Ints>)[0];
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
    keep(made, codes);
}

template <class Format, class In>
void encode(const In* x, int64_t groups, int64_t size, float largest, uint8_t* codes, float* scales) {
    const Ints most = Ints{} + static_cast<int32_t>(as_bits(largest));
    for (int64_t group = 0; group < groups; ++group, x += size, codes += size) {
        const float scale = as_float(reach(x, size)) / largest;
        const Floats divisor = Floats{} + (scale == 0 ? 1 : scale);
        scales[group] = scale;
        int64_t i = 0;
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

void place(Floats x, float* y, bool streams) {
    if (streams) stream(x, y);
    else keep(x, y);
}

void place(Floats x, uint16_t* y, bool) { keep(x, y); }  // half a vector

template <class Format, class Out>
void decode(const uint8_t* codes, const float* scales, int64_t groups, int64_t size, Out* y) {
    const bool whole = reinterpret_cast<uintptr_t>(y) % 64 == 0 && (groups == 1 || size % LANES == 0);
    const bool streams = whole && groups * size * static_cast<int64_t>(sizeof(Out)) > STREAMED;
    for (int64_t group = 0; group < groups; ++group, codes += size, y += size) {
        const Floats scale = Floats{} + scales[group];
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) place(Format::to_values(load(codes + i)) * scale, y + i, streams);
        if (i < size) {
            uint8_t last[LANES] = {};
            Out made[LANES];
            std::memcpy(last, codes + i, size - i);
            keep(Format::to_values(load(last)) * scale, made);
            std::memcpy(y + i, made, (size - i) * sizeof(Out));
        }
    }
    if (streams) streamed();
}

}  // namespace

extern "C" {

#define FLOAT8(NAME, FORMAT, WIDE, FLOAT)                                                                            \
    void encode_##NAME##_##WIDE(const FLOAT* x, int64_t groups, int64_t size, float largest, uint8_t* codes,         \
                                float* scales) {                                                                     \
        encode<FORMAT>(x, groups, size, largest, codes, scales);                                                     \
    }                                                                                                                \
    void decode_##NAME##_##WIDE(const uint8_t* codes, const float* scales, int64_t groups, int64_t size, FLOAT* y) { \
        decode<FORMAT>(codes, scales, groups, size, y);                                                              \
    }

FLOAT8(e4m3, E4M3, fp32, float)
FLOAT8(e4m3, E4M3, bf16, uint16_t)
FLOAT8(e5m2, E5M2, fp32, float)
FLOAT8(e5m2, E5M2, bf16, uint16_t)

}  // extern "C"
