// The grids of a batch of groups, made together: a step is one division, which no group then waits for alone.

#pragma once

#include "../simd/floats.h"
#include "../simd/reduce.h"
#include "../simd/vectors.h"

struct Grid {
    float step, offset, inverse, top;

    bool is_finite() const { return (step - step) + (offset - offset) == 0; }

    // Whether it is, and neither step nor offset is larger than `magnitude`.
    bool within(float magnitude) const {  // a damaged step may be negative
        return step <= magnitude && step >= -magnitude && offset <= magnitude && offset >= -magnitude;
    }
};

// The smallest floats of the scale's format that are not below x; nan stays nan.
inline Floats at_least(Floats x, bool wide) {
    if (wide) return x;
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

    // From `least` to `most` [COUNT].
    void between(const float* least, const float* most, bool wide) {
        for (int i = 0; i < COUNT; i += LANES) {
            const Floats offset = -at_least(-load(least + i), wide);
            make(at_least((load(most + i) - offset) / top, wide), i);
            keep(offset, offsets + i);
        }
    }

    // From -reach to reach.
    void around_zero(const float* reach, bool wide) {
        for (int i = 0; i < COUNT; i += LANES) {
            make(at_least(2 * load(reach + i) / top, wide), i);
            keep(load(steps + i) * (-top / 2), offsets + i);
        }
    }

    // The first `count`, from place `first` on; no offsets where those are null.
    void store_scales(int count, bool wide, int64_t first, void* to_steps, void* to_offsets) const {
        store(steps, count, wide, to_steps, first);
        if (to_offsets) store(offsets, count, wide, to_offsets, first);
    }

private:
    // A step's inverse is finite, and of no step 1: see `_step` in kernels/affine.py.
    void make(Floats step, int i) {
        constexpr float smallest = 0x1p-126f;
        step = step > 0.0f ? larger(step, Floats{} + smallest) : step;
        keep(step, steps + i);
        keep(step > 0.0f ? 1.0f / step : Floats{} + 1.0f, inverses + i);
    }

    static void store(const float* scales, int count, bool wide, void* to, int64_t first) {
        for (int i = 0; i < count; i += LANES) {
            const Floats some = load(scales + i);
            const int64_t lanes = count - i < LANES ? count - i : LANES;
            if (wide) keep_some(some, static_cast<float*>(to) + first + i, lanes);
            else keep_some(some, static_cast<uint16_t*>(to) + first + i, lanes);
        }
    }
};
