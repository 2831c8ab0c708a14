// What a feedback adds to a message, and what it keeps for the next one, vector by vector.

#pragma once

#include "floats.h"
#include "vectors.h"

// A loss scale of 1, as the forward direction has.
struct Unscaled {
    Floats times(Floats x) const { return x; }

    Floats divide(Floats x) const { return x; }
};

// Another one. By a power of two, as loss scales are, dividing takes no longer than multiplying.
struct Scaled {
    float factor, by, inverse;
    bool is_power;

    // `factor`: what a state is multiplied by, `by` or 0.
    Scaled(float factor, float by) : factor(factor), by(by), inverse(1 / by) {
        const uint32_t bits = as_bits(by), exponent = bits >> 23;
        is_power = !(bits & 0x7FFFFF) && exponent > 0 && exponent < 254;  // and its inverse, too, is a normal number
    }

    Floats times(Floats x) const { return x * factor; }

    Floats divide(Floats x) const {
        if (is_power) return x * inverse;
        asm volatile("");  // or the compiler would do both, and choose
        return x / by;
    }
};

// Error feedback keeps what was lost.
struct Lost {
    static constexpr bool BELOW_SUMS = true;  // what is kept is never much larger than the sums of a group

    Floats sum(Floats x, Floats before) const { return x + before; }

    Floats next(Floats, Floats total, Floats sent) const { return total - sent; }
};

// Or a part of it beside a part of what it kept before.
template <class Scale>
struct Residual {
    static constexpr bool BELOW_SUMS = false;

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
};

// EF21 adds, and keeps, all that was sent.
template <class Scale>
struct Mirror {
    static constexpr bool BELOW_SUMS = false;

    Scale scale;

    Floats sum(Floats x, Floats before) const { return x - scale.times(before); }

    Floats next(Floats before, Floats, Floats sent) const { return before + scale.divide(sent); }
};
