// What a feedback adds to a message, and what it keeps for the next one, vector by vector.

#pragma once

#include "../simd/reduce.h"
#include "../simd/vectors.h"

// The largest magnitude that is kept; see kernels/numerics.py.
constexpr float LARGEST_STATE = 0x1p104f;

inline Ints largest_of(Ints most, Floats x) { return larger(most, (Ints)x & MAGNITUDE); }

// Of bits of magnitudes, of which `most` are the largest.
inline bool finite(Ints most) { return reduce(most, larger<Ints>)[0] < INFINITE; }
inline bool can_keep(Ints most) { return as_float(reduce(most, larger<Ints>)[0]) <= LARGEST_STATE; }

// A loss scale of 1, as the forward direction has.
struct Unscaled {
    static constexpr float by = 1;

    Floats times(Floats x) const { return x; }

    Floats divide(Floats x) const { return x; }
};

// Another one. By a power of two, as loss scales are, dividing takes no longer than multiplying.
struct Scaled {
    float by, inverse;
    bool is_power;

    explicit Scaled(float by) : by(by), inverse(1 / by) {
        const uint32_t bits = as_bits(by), exponent = bits >> 23;
        is_power = !(bits & 0x7FFFFF) && exponent > 0 && exponent < 254;  // and its inverse, too, is a normal number
    }

    Floats times(Floats x) const { return x * by; }

    Floats divide(Floats x) const {
        if (is_power) return x * inverse;
        asm volatile("");  // or the compiler would do both, and choose
        return x / by;
    }
};

// work(the loss scale)
template <class F>
auto with_scale(float scale, const F& work) {
    if (scale == 1) return work(Unscaled());
    return work(Scaled(scale));
}

// What a message is with which the residual is not sent.
struct Uncompensated {
    Floats sum(Floats x, Floats before) const { return x + before * 0.0f; }
};

// Error feedback keeps what was lost.
struct ErrorFeedback {
    Unscaled scale;

    Floats sum(Floats x, Floats before) const { return x + before; }

    Floats next(Floats, Floats total, Floats sent) const { return total - sent; }

    Uncompensated not_finite() const { return {}; }  // what is sent of a group that is not
};

// Or a part of it beside a part of what it kept before.
template <class Scale>
struct WeightedErrorFeedback {
    Scale scale;
    float residual_decay, error_weight;
    int32_t none;  // makes -0, which no sum feels, of 0, where there is no share

    WeightedErrorFeedback(Scale scale, float residual_decay, float error_weight)
        : scale(scale), residual_decay(residual_decay), error_weight(error_weight),
          none(residual_decay == 0 ? INT32_MIN : 0) {}

    Floats sum(Floats x, Floats before) const { return x + scale.times(before); }

    Floats next(Floats before, Floats total, Floats sent) const {
        const Floats weighted_error = scale.divide(total - sent) * error_weight;
        return (Floats)((Ints)(before * residual_decay) | none) + weighted_error;
    }

    Uncompensated not_finite() const { return {}; }
};

// EF21 adds, and keeps, all that was sent.
template <class Scale>
struct Ef21 {
    Scale scale;

    Floats sum(Floats x, Floats before) const { return x - scale.times(before); }

    Floats next(Floats before, Floats, Floats sent) const { return before + scale.divide(sent); }

    Ef21 not_finite() const { return *this; }
};

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
    Floats scale = (Floats)reduce_each(largest, larger<Ints>) / 127.0f;
    scale = scale > 0.0f ? larger(scale, Floats{} + smallest) : scale;
    store_partial(scale, scales, groups);
    float inverses[LANES];
    store(scale > 0.0f ? 1.0f / scale : Floats{}, inverses);
    for (int64_t k = 0; k < groups; ++k)
        for (int64_t i = k * CODED; i < (k + 1) * CODED; i += 4 * LANES) {
            Ints raised[4];  // from 0 on; less than half a code beyond -127 and 127
            for (int j = 0; j < 4; ++j) raised[j] = nearest(load(values + i + j * LANES) * inverses[k]) + 128;
            store(in_order(narrowed(raised)) ^ 128, codes + i);
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
        uint8_t bytes[CODED];
        std::memcpy(padded, values + start, (n - start) * sizeof(float));
        to_int8(padded, 1, bytes, scales + whole);
        std::memcpy(codes + start, bytes, n - start);
    }
}

inline void from_int8(const int8_t* codes, const float* scales, int64_t n, float* values) {
    const auto decode = [](const int8_t* from, float scale, float* to) {
        store(__builtin_convertvector(load(from), Floats) * scale, to);
    };
    int64_t start = 0;
    for (; start + CODED <= n; start += CODED) {
        const float scale = *scales++;
        for (int64_t i = start; i < start + CODED; i += LANES) decode(codes + i, scale, values + i);
    }
    if (start < n) {
        int8_t last[CODED] = {};
        float decoded[CODED];
        std::memcpy(last, codes + start, n - start);
        for (int64_t i = 0; i < CODED; i += LANES) decode(last + i, *scales, decoded + i);
        std::memcpy(values + start, decoded, (n - start) * sizeof(float));
    }
}
