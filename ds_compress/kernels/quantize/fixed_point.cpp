// Fixed-point codes of a channel or of a tensor, as kernels/reference/fixed.py specifies them: equal to the bit.
//
// A byte holds codes of `width` bits (1, 2, 4 or 8) from as many planes as fit, see kernels/bits.py: the codes of each
// are read, and written, one `run` behind those of the one before.

#include "../native/calls.h"
#include "../simd/floats.h"
#include "../simd/reduce.h"
#include "../simd/transpose_bytes.h"
#include "../simd/vectors.h"

namespace {

constexpr int64_t STEP = 4 * LANES;
constexpr int64_t BLOCK = 1024;  // channels that are looked at together
constexpr int64_t TILE = 64;     // bytes of each channel that are written together: a line of the caches

static_assert(BLOCK % STEP == 0, "the arrays of a block hold whole steps");

// Four vectors, of which `count` values exist.
template <class In>
void load_step(const In* x, int64_t count, Floats (&values)[4]) {
    In last[STEP];
    if (count < STEP) {
        std::memset(last, 0, sizeof last);
        std::memcpy(last, x, count * sizeof(In));
        x = last;
    }
    for (int i = 0; i < 4; ++i) values[i] = load(x + i * LANES);
}

template <class Out>
void keep_step(const Floats (&values)[4], Out* y, int64_t count) {
    if (count >= STEP) {
        for (int i = 0; i < 4; ++i) keep(values[i], y + i * LANES);
    } else {
        Out last[STEP];
        for (int i = 0; i < 4; ++i) keep(values[i], last + i * LANES);
        std::memcpy(y, last, count * sizeof(Out));
    }
}

// How far the nearest integer, ties to even, up to `most`, lies above `least`, another one; nan is `least`.
Ints rounded(Floats x, float least, float most) {
    constexpr float coarse = 0x1.8p23f;  // floats of its size are integers
    const Floats low = Floats{} + least, high = Floats{} + most;
    x = x > low ? x : low;
    x = x < high ? x : high;
    return (Ints)(x + coarse) - static_cast<int32_t>(as_bits(coarse + least));
}

// The largest magnitude of each of `count` channels, or nan, and what their values are divided by.
template <class In>
void ranges(const In* x, int64_t rows, int64_t channels, int64_t count, float* scales, float* divisors) {
    std::memset(divisors, 0, BLOCK * sizeof(float));
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t c = 0; c < count; c += STEP) {
            Floats values[4];
            load_step(x + row * channels + c, count - c, values);
            for (int i = 0; i < 4; ++i) {
                float* place = divisors + c + i * LANES;
                keep((Floats)larger((Ints)load(place), (Ints)values[i] & MAGNITUDE), place);
            }
        }
    for (int64_t c = 0; c < count; ++c) {
        const float scale = divisors[c] < as_float(INFINITE) ? divisors[c] : as_float(0x7FC00000);
        scales[c] = scale;
        divisors[c] = scale > 0 ? scale * (1 + 1e-6f) : 1;
    }
}

template <class In>
void encode_channels(const In* x, int64_t rows, int64_t channels, int64_t bits, int64_t width, int64_t size,
                     uint8_t* packed, float* scales) {
    const int64_t planes = 8 / width, run = size / planes;
    const float half = 1 << (bits - 1);
    for (int64_t block = 0; block < channels; block += BLOCK) {
        const int64_t count = channels - block < BLOCK ? channels - block : BLOCK;
        alignas(64) float divisors[BLOCK];
        alignas(64) uint8_t tile[TILE * BLOCK];
        ranges(x + block, rows, channels, count, scales + block, divisors);
        for (int64_t start = 0; start < run; start += TILE) {
            const int64_t bytes = run - start < TILE ? run - start : TILE;
            for (int64_t j = 0; j < bytes; ++j)
                for (int64_t c = 0; c < count; c += STEP) {
                    Ints made[4] = {};
                    for (int64_t plane = 0; plane < planes; ++plane) {
                        const int64_t row = plane * run + start + j, last = rows - 1;  // which is repeated
                        Floats values[4];
                        load_step(x + (row < last ? row : last) * channels + block + c, count - c, values);
                        for (int i = 0; i < 4; ++i) {
                            const Floats share = values[i] / load(divisors + c + i * LANES) * half;
                            made[i] |= rounded(share, -half, half - 1) << static_cast<int>(plane * width);
                        }
                    }
                    keep(made, tile + j * BLOCK + c);
                }
            turn(tile, bytes, count, BLOCK, packed + block * run + start, run);
        }
    }
}

template <class Out>
void decode_channels(const uint8_t* packed, const float* scales, int64_t rows, int64_t channels, int64_t bits,
                     int64_t width, int64_t size, Out* y) {
    const int64_t planes = 8 / width, run = size / planes;
    const float half = 1 << (bits - 1);
    const int32_t mask = (1 << width) - 1;
    for (int64_t block = 0; block < channels; block += BLOCK) {
        const int64_t count = channels - block < BLOCK ? channels - block : BLOCK;
        alignas(64) float own[BLOCK] = {};
        alignas(64) uint8_t tile[TILE * BLOCK] = {};
        std::memcpy(own, scales + block, count * sizeof(float));
        for (int64_t start = 0; start < run; start += TILE) {
            const int64_t bytes = run - start < TILE ? run - start : TILE;
            turn(packed + block * run + start, count, bytes, run, tile, BLOCK);
            for (int64_t plane = 0; plane < planes; ++plane)
                for (int64_t j = 0, row = plane * run + start; j < bytes && row < rows; ++j, ++row)
                    for (int64_t c = 0; c < count; c += STEP) {
                        Floats values[4];
                        for (int i = 0; i < 4; ++i) {
                            const Ints bytes = load(tile + j * BLOCK + c + i * LANES);
                            const Ints code = bytes >> static_cast<int>(plane * width) & mask;
                            const Floats share = __builtin_convertvector(code, Floats) - half;
                            values[i] = share * (1 / half) * load(own + c + i * LANES);
                        }
                        keep_step(values, y + row * channels + block + c, count - c);
                    }
        }
    }
}

// The smallest and the largest of x [size]; nan, both, where one is. Of zeros, +0.
template <class In>
void bounds(const In* x, int64_t size, float* both) {
    Floats low = Floats{} + as_float(INFINITE), high = -low;
    Ints strange = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t from = i + LANES <= size || size < LANES ? i : size - LANES;  // some are looked at again
        Floats value;
        if (size >= LANES) value = load(x + from);
        else for (int j = 0; j < LANES; ++j) value[j] = to_float(x[j < size ? j : 0]);
        low = smaller(value, low);  // passes over nan
        high = larger(value, high);
        strange |= value != value;
    }
    const bool unordered = folded(strange, [](Ints x, Ints y) { return x | y; })[0];
    both[0] = unordered ? as_float(MAGNITUDE) : folded(low, smaller<Floats>)[0] + 0.0f;
    both[1] = unordered ? as_float(MAGNITUDE) : folded(high, larger<Floats>)[0] + 0.0f;
}

template <class In>
void encode_range(const In* x, int64_t size, int64_t bits, int64_t width, uint8_t* packed, float* both) {
    bounds(x, size, both);
    const int64_t planes = 8 / width, run = size / planes;
    const float low = both[0], reach = both[1] > low ? both[1] - low : 1, top = (1 << bits) - 1;
    for (int64_t j = 0; j < run; j += STEP) {
        Ints made[4] = {};
        for (int64_t plane = 0; plane < planes; ++plane) {
            Floats values[4];
            load_step(x + plane * run + j, run - j, values);
            for (int i = 0; i < 4; ++i) {
                const Floats place = (values[i] - low) * top / reach;
                made[i] |= rounded(place, 0, top) << static_cast<int>(plane * width);
            }
        }
        uint8_t bytes[STEP];
        keep(made, run - j < STEP ? bytes : packed + j);
        if (run - j < STEP) std::memcpy(packed + j, bytes, run - j);
    }
}

template <class Out>
void decode_range(const uint8_t* packed, const float* both, int64_t size, int64_t bits, int64_t width, Out* y) {
    const int64_t planes = 8 / width, run = size / planes;
    const float low = both[0], reach = both[1] - low, top = (1 << bits) - 1;
    const int32_t mask = (1 << width) - 1;
    for (int64_t j = 0; j < run; j += STEP) {
        uint8_t bytes[STEP] = {};
        std::memcpy(bytes, packed + j, run - j < STEP ? run - j : STEP);
        for (int64_t plane = 0; plane < planes; ++plane) {
            Floats values[4];
            for (int i = 0; i < 4; ++i) {
                const Ints code = load(bytes + i * LANES) >> static_cast<int>(plane * width) & mask;
                values[i] = __builtin_convertvector(code, Floats) * reach / top + low;
            }
            keep_step(values, y + plane * run + j, run - j);
        }
    }
}

}  // namespace

extern "C" {

// What the arguments may be is declared in fixed.py.

#define FIXED(WIDE, FLOAT)                                                                                            \
    void encode_channels_##WIDE(const FLOAT* x, int64_t rows, int64_t channels, int64_t bits, int64_t width,          \
                                int64_t size, uint8_t* packed, float* scales) {                                       \
        encode_channels(x, rows, channels, bits, width, size, packed, scales);                                        \
    }                                                                                                                 \
    void decode_channels_##WIDE(const uint8_t* packed, const float* scales, int64_t rows, int64_t channels,           \
                                int64_t bits, int64_t width, int64_t size, FLOAT* y) {                                \
        decode_channels(packed, scales, rows, channels, bits, width, size, y);                                        \
    }                                                                                                                 \
    void encode_range_##WIDE(const FLOAT* x, int64_t size, int64_t bits, int64_t width, uint8_t* packed,              \
                             float* both) {                                                                           \
        encode_range(x, size, bits, width, packed, both);                                                             \
    }                                                                                                                 \
    void decode_range_##WIDE(const uint8_t* packed, const float* both, int64_t size, int64_t bits, int64_t width,     \
                             FLOAT* y) {                                                                              \
        decode_range(packed, both, size, bits, width, y);                                                             \
    }                                                                                                                 \
    BY_WORDS(encode_channels_##WIDE)                                                                                  \
    BY_WORDS(decode_channels_##WIDE)                                                                                  \
    BY_WORDS(encode_range_##WIDE)                                                                                     \
    BY_WORDS(decode_range_##WIDE)

FIXED(fp32, float)
FIXED(bf16, uint16_t)

}  // extern "C"
