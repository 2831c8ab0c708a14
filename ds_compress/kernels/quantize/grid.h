// The grids of groups, as grid.py specifies them.

#pragma once

#include "../simd/reduce.h"
#include "../simd/vectors.h"

// Where a grid ends; see grid.py.
constexpr float LARGEST_LIMIT = 0x1p125f;

// Steps and offsets up to this need no care: no value was cut off for them, and sums of their values are finite.
constexpr float ORDINARY = 0x1p64f;

struct Grid {
    float step, offset, inverse, top;

    // Whether no value is beyond the grid. That of encoding: its step is not negative.
    bool is_ordinary() const { return step + (offset < 0 ? -offset : offset) <= ORDINARY; }

    // Whether it is, and neither step nor offset is larger than `magnitude`.
    bool within(float magnitude) const {  // a damaged step may be negative
        return step <= magnitude && step >= -magnitude && offset <= magnitude && offset >= -magnitude;
    }
};

// The smallest bf16 that are not below x; nan stays nan.
inline Floats at_least(Floats x) {
    const Words bits = (Words)x, up = (Ints)x < 0 ? bits : bits + 0xFFFF;
    return x != x ? x : (Floats)(up & 0xFFFF0000);
}

// As many as there are lanes, or COUNT, which is a multiple of that.
template <int COUNT>
struct Grids {
    alignas(64) float steps[COUNT], offsets[COUNT], inverses[COUNT];
    float top;  // the largest code

    Grid operator[](int i) const { return {steps[i], offsets[i], inverses[i], top}; }

    // Whether they are finite, and neither steps nor offsets larger than `magnitude`.
    bool within(float magnitude) const {
        Ints beyond = {};
        for (int i = 0; i < COUNT; i += LANES) {
            const Floats step = load(steps + i), offset = load(offsets + i);
            beyond |= ~((step <= magnitude) & (offset <= magnitude) & (offset >= -magnitude));
        }
        return !any(beyond);
    }

    // From `least` to `most` [COUNT]. A step's inverse is finite, and of no step 1: see `minmax_scales` in grid.py.
    void between(const float* least, const float* most) {
        constexpr float smallest = 0x1p-126f;
        for (int i = 0; i < COUNT; i += LANES) {
            const Floats offset = -at_least(-saturated(load(least + i), LARGEST_LIMIT));
            Floats step = at_least((saturated(load(most + i), LARGEST_LIMIT) - offset) / top);
            step = step > 0.0f ? larger(step, Floats{} + smallest) : step;
            store(step, steps + i), store(offset, offsets + i);
            store(step > 0.0f ? 1.0f / step : Floats{} + 1.0f, inverses + i);
        }
    }

    // The first `count`.
    void store_scales(int count, uint16_t* to_steps, uint16_t* to_offsets) const {
        for (int i = 0; i < count; i += LANES) {
            const int64_t lanes = count - i < LANES ? count - i : LANES;
            store_partial(load(steps + i), to_steps + i, lanes), store_partial(load(offsets + i), to_offsets + i, lanes);
        }
    }
};
