// What a feedback adds to a message, and what it keeps for the next one, vector by vector.

#pragma once

#include "../simd/floats.h"
#include "../simd/vectors.h"

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

// What a message is with which the residual is not sent.
struct Alone {
    Floats sum(Floats x, Floats before) const { return x + before * 0.0f; }
};

// Error feedback keeps what was lost.
struct Lost {
    Unscaled scale;

    Floats sum(Floats x, Floats before) const { return x + before; }

    Floats next(Floats, Floats total, Floats sent) const { return total - sent; }

    Alone not_finite() const { return {}; }  // what is sent of a group that is not
};

// Or a part of it beside a part of what it kept before.
template <class Scale>
struct Residual {
    Scale scale;
    float share, rest;
    int32_t none;  // makes -0, which no sum feels, of 0, where there is no share

    Residual(Scale scale, float share, float rest)
        : scale(scale), share(share), rest(rest), none(share == 0 ? INT32_MIN : 0) {}

    Floats sum(Floats x, Floats before) const { return x + scale.times(before); }

    Floats next(Floats before, Floats total, Floats sent) const {
        const Floats share_of_lost = scale.divide(total - sent) * rest;
        return (Floats)((Ints)(before * share) | none) + share_of_lost;
    }

    Alone not_finite() const { return {}; }
};

// EF21 adds, and keeps, all that was sent.
template <class Scale>
struct Mirror {
    Scale scale;

    Floats sum(Floats x, Floats before) const { return x - scale.times(before); }

    Floats next(Floats before, Floats, Floats sent) const { return before + scale.divide(sent); }

    Mirror not_finite() const { return *this; }
};
