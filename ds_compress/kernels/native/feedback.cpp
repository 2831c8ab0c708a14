// What feedbacks do to a state and a message, in one pass each, as kernels/reference/feedback.py specifies it.

#include "floats.h"
#include "limits.h"
#include "vectors.h"

namespace {

constexpr int64_t GROUP = 128;  // values that share a scale in an int8 store

// Whether none of some bits of floats is that of inf or nan, of which `most` are the largest magnitudes.
bool finite(Ints most) { return folded(most, larger<Ints>)[0] < INFINITE; }

// Vectors of [n] values, the last one filled up with zeros: work(place, how many of its lanes exist).
template <class F>
void in_vectors(int64_t n, F work) {
    for (int64_t i = 0; i < n; i += LANES) work(i, n - i < LANES ? n - i : LANES);
}

template <class In>
Floats some(const In* x, int64_t count) {
    if (count == LANES) return load(x);
    In last[LANES] = {};
    std::memcpy(last, x, count * sizeof(In));
    return load(last);
}

template <class Out>
void keep_some(Floats x, Out* y, int64_t count) {
    if (count == LANES) return keep(x, y);
    Out last[LANES];
    keep(x, last);
    std::memcpy(y, last, count * sizeof(Out));
}

template <class Float>
void changed(const Float* x, const float* state, float factor, int64_t n, Float* y) {
    const Floats most = Floats{} + to_float(largest(x));
    in_vectors(n, [&](int64_t i, int64_t count) {
        const Floats value = some(x + i, count), change = value - some(state + i, count) * factor;
        const Floats within = larger(smaller(change, most), -most);
        keep_some(within + (value - value), y + i, count);  // nan, where the value is not finite
    });
}

template <class In>
int64_t advanced(const float* state, const In* change, float divisor, int64_t n, float* made) {
    Ints most = {};
    in_vectors(n, [&](int64_t i, int64_t count) {
        const Floats sum = some(state + i, count) + some(change + i, count) / divisor;
        most = larger(most, (Ints)sum & MAGNITUDE);
        keep_some(sum, made + i, count);
    });
    return finite(most);
}

template <class In>
int64_t all_finite(const In* x, int64_t n) {
    Ints most[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; ++j) most[j] = larger(most[j], (Ints)load(x + i + j * LANES) & MAGNITUDE);
    in_vectors(n - i, [&](int64_t j, int64_t count) {
        most[0] = larger(most[0], (Ints)some(x + i + j, count) & MAGNITUDE);
    });
    return finite(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

// The codes of one group, as bytes; returns the scale.
float encode_group(const float* values, uint8_t* codes) {
    constexpr float coarse = 0x1.8p23f;  // floats of its size are integers
    const float scale = as_float(largest_magnitude<GROUP>(values, GROUP)) / 127;
    const float step = scale > 0 ? scale : as_float(INFINITE);
    for (int64_t i = 0; i < GROUP; i += 4 * LANES) {
        Ints made[4];
        for (int j = 0; j < 4; ++j) {
            const Floats place = load(values + i + j * LANES) / step;
            const Floats within = larger(smaller(place, Floats{} + 127.0f), Floats{} - 127.0f);
            made[j] = ((Ints)(within + coarse) - static_cast<int32_t>(as_bits(coarse))) & 255;
        }
        keep(made, codes + i);
    }
    return scale;
}

}  // namespace

extern "C" {

void changed_fp32(const float* x, const float* state, float factor, int64_t n, float* y) {
    changed(x, state, factor, n, y);
}

void changed_bf16(const uint16_t* x, const float* state, float factor, int64_t n, uint16_t* y) {
    changed(x, state, factor, n, y);
}

int64_t advanced_fp32(const float* state, const float* change, float divisor, int64_t n, float* made) {
    return advanced(state, change, divisor, n, made);
}

int64_t advanced_bf16(const float* state, const uint16_t* change, float divisor, int64_t n, float* made) {
    return advanced(state, change, divisor, n, made);
}

int64_t finite_fp32(const float* x, int64_t n) { return all_finite(x, n); }

int64_t finite_bf16(const uint16_t* x, int64_t n) { return all_finite(x, n); }

void blended(const float* first, const float* second, float share, float rest, int64_t n, float* made) {
    in_vectors(n, [&](int64_t i, int64_t count) {
        keep_some(some(first + i, count) * share + some(second + i, count) * rest, made + i, count);
    });
}

void encode_int8(const float* values, int64_t n, int8_t* codes, float* scales) {
    for (int64_t start = 0; start < n; start += GROUP) {
        float padded[GROUP] = {};
        uint8_t made[GROUP];
        const int64_t size = n - start < GROUP ? n - start : GROUP;
        if (size < GROUP) std::memcpy(padded, values + start, size * sizeof(float));
        *scales++ = encode_group(size < GROUP ? padded : values + start, made);
        std::memcpy(codes + start, made, size);
    }
}

void decode_int8(const int8_t* __restrict codes, const float* __restrict scales, int64_t n, float* __restrict values) {
    for (int64_t start = 0; start < n; start += GROUP) {
        const int64_t end = n - start < GROUP ? n : start + GROUP;
        const float scale = *scales++;
        for (int64_t i = start; i < end; ++i) values[i] = codes[i] * scale;
    }
}

}  // extern "C"
