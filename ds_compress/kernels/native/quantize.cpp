// Group-wise quantization, as kernels/reference/groups.py specifies it: equal to the bit.
//
// A group is read once, and everything else happens in the first-level cache.

#include "bits.h"
#include "dither.h"
#include "floats.h"
#include "gaussian.h"
#include "hadamard.h"
#include "limits.h"

namespace {

constexpr int MAX_GROUP = 4096;

struct Format {
    int64_t bits, symmetric, wide_scale;  // wide_scale: fp32 rather than bf16
    const float* diagonal;                // of the rotation, or null
    const Levels* levels;                 // of the grid for normal values, or null where it is uniform

    int top() const { return (1 << bits) - (symmetric && bits > 1 ? 2 : 1); }
};

Format format(int64_t bits, int64_t symmetric, int64_t wide_scale, int64_t unrotated, const float* diagonal,
              int64_t uniform, const float* levels) {
    return {bits, symmetric, wide_scale, unrotated ? nullptr : diagonal,
            uniform ? nullptr : reinterpret_cast<const Levels*>(levels)};
}

struct Grid {
    float step, offset, inverse;
};

// The smallest float of the scale's format that is not below x; nan stays nan.
float at_least(float x, bool wide) {
    if (wide || x != x) return x;
    const uint32_t bits = as_bits(x);
    return as_float((bits >> 31 ? bits : bits + 0xFFFF) & 0xFFFF0000);
}

// SIZE is that of the group, or 0 where it is known at run time only.
template <int SIZE>
struct Group {
    int64_t size;
    alignas(64) float values[SIZE ? SIZE : MAX_GROUP + LANES];
    alignas(64) float products[SIZE ? SIZE : MAX_GROUP + LANES];
    alignas(64) float total[SIZE ? SIZE : MAX_GROUP];  // what the values are rounded from, where the error is wanted
    alignas(64) int32_t codes[SIZE ? SIZE : MAX_GROUP + LANES];  // to be packed
    alignas(64) uint8_t bytes[SIZE ? SIZE : MAX_GROUP + LANES];  // unpacked codes

    int64_t count() const { return SIZE ? SIZE : size; }

    template <class In>
    void load(const In* x) {
        for (int64_t i = 0; i < count(); ++i) values[i] = to_float(x[i]);
    }

    // The sum with factor * residual, within the range of x's type; see `narrow` in kernels/numerics.py.
    template <class In>
    void load_sum(const In* x, const float* residual, float factor) {
        const float most = to_float(largest(x));
        for (int64_t i = 0; i < count(); ++i) {
            const float value = to_float(x[i]), sum = value + residual[i] * factor;
            float within = sum < most ? sum : most;
            within = within > -most ? within : -most;
            total[i] = sum;
            In rounded;
            store(within + (value - value), rounded);  // nan, where the value is not finite
            values[i] = to_float(rounded);
        }
    }

    // What the receiver lacks of the sum.
    template <class In>
    void store_error(const Format& format, Grid grid, const In*, float* error) {
        from_codes(format, grid);
        if (format.diagonal) rotate_back<SIZE>(values, size, format.diagonal);
        for (int64_t i = 0; i < count(); ++i) {
            In sent;
            store(values[i], sent);
            error[i] = total[i] - to_float(sent);
        }
    }

    template <class Out>
    void store_to(Out* y) const {
        for (int64_t i = 0; i < count(); ++i) store(values[i], y[i]);
    }

    // The values are not wanted in the caches, which cannot hold them all; whole vectors.
    template <class Out>
    void stream_to(Out* y) const {
        alignas(64) Out rounded[SIZE ? SIZE : MAX_GROUP];
        store_to(rounded);
        constexpr int each = sizeof(float) / sizeof(Out) * LANES;
        for (int64_t i = 0; i < count(); i += each)
            stream(::load(reinterpret_cast<const float*>(rounded + i)), reinterpret_cast<float*>(y + i));
    }

    // For normal values: their codes, too.
    Grid gaussian(const Format& format) {
        const Levels& levels = *format.levels;
        float scale;
        switch (format.bits) {
            case 1: scale = gaussian_codes<SIZE, 1>(values, size, levels, codes, products); break;
            case 2: scale = gaussian_codes<SIZE, 2>(values, size, levels, codes, products); break;
            case 3: scale = gaussian_codes<SIZE, 4>(values, size, levels, codes, products); break;
            default: scale = gaussian_codes<SIZE, 8>(values, size, levels, codes, products);
        }
        if (!format.wide_scale) {
            uint16_t rounded;
            store(scale, rounded);
            scale = to_float(rounded);
        }
        return {scale, 0, 0};
    }

    Grid grid(const Format& format) {
        if (format.levels) return gaussian(format);
        if (format.symmetric) {
            const float reach = as_float(largest_magnitude<SIZE>(values, size));
            return inverted(at_least(2 * reach / format.top(), format.wide_scale), -format.top() / 2.0f);
        }
        float least, most;
        limits<SIZE>(values, size, least, most);
        const float offset = -at_least(-least, format.wide_scale);
        Grid grid = inverted(at_least((most - offset) / format.top(), format.wide_scale), 0);
        grid.offset = offset;
        return grid;
    }

    // A step's inverse is finite, and of no step 1: see `_step` in kernels/affine.py.
    static Grid inverted(float step, float offsets) {
        step = step > 0 && step < 0x1p-126f ? 0x1p-126f : step;
        return {step, step * offsets, step > 0 ? 1 / step : 1};
    }

    // Of the values from place i on, within the grid; nan is 0. Behind the last value there is room.
    Floats positions(int64_t i, Grid grid, int top, float more = 0) const {
        const Floats position = (::load(values + i) - grid.offset) * grid.inverse + more;
        const Floats most = Floats{} + static_cast<float>(top);
        const Floats positive = position > 0.0f ? position : Floats{};
        return positive < most ? positive : most;
    }

    void to_codes(Grid grid, int top) {
        for (int64_t i = 0; i < count(); i += LANES)
            keep(__builtin_convertvector(positions(i, grid, top, 0.5f), Ints), codes + i);
    }

    // Rounds up or down as a fraction of 16 bits and its draw have a carry, or not.
    void dither_codes(Grid grid, int top, Dither dither, uint32_t number) {
        const auto round = [&](int64_t i, Words draws) {
            const Ints fixed = __builtin_convertvector(positions(i, grid, top) * 65536.0f + 0.5f, Ints);
            keep((fixed + (Ints)draws) >> 16, codes + i);
        };
        for (int64_t i = 0; i < count(); i += 64)
            for (int64_t j = i; j < i + 32 && j < count(); j += LANES) {
                const Words words = dither.words(number + i / 2 + j % 32);
                round(j, words & 0xFFFF);
                if (j + 32 < count()) round(j + 32, words >> 16);
            }
    }

    void from_bytes(const Format& format, Grid grid) {
        for (int64_t i = 0; i < count(); ++i) codes[i] = bytes[i];
        from_codes(format, grid);
    }

    void from_codes(const Format& format, Grid grid) {
        if (format.levels) {
            switch (format.bits) {
                case 1: return gaussian_values<SIZE, 1>(codes, size, *format.levels, grid.step, values);
                case 2: return gaussian_values<SIZE, 2>(codes, size, *format.levels, grid.step, values);
                case 3: return gaussian_values<SIZE, 4>(codes, size, *format.levels, grid.step, values);
                default: return gaussian_values<SIZE, 8>(codes, size, *format.levels, grid.step, values);
            }
        }
        for (int64_t i = 0; i < count(); ++i) values[i] = static_cast<float>(codes[i]) * grid.step + grid.offset;
    }
};

float load_scale(const void* scales, int64_t i, bool wide) {
    return wide ? static_cast<const float*>(scales)[i] : to_float(static_cast<const uint16_t*>(scales)[i]);
}

void store_scale(float scale, void* scales, int64_t i, bool wide) {
    if (wide) static_cast<float*>(scales)[i] = scale;
    else store(scale, static_cast<uint16_t*>(scales)[i]);
}

// Error feedback: what is added to a message and what it then loses; without it both are null.
struct Feedback {
    const float* residual;
    float factor;
    float* error;
};

template <int SIZE, class In>
void quantize(const In* x, Feedback feedback, Dither dither, int64_t n, int64_t size, Format format, uint8_t* packed,
              void* steps, void* offsets) {
    constexpr int BATCH = SIZE ? 8 : 1;  // so that the ranges of some groups are found while others wait for theirs
    Group<SIZE> groups[BATCH];
    Grid grids[BATCH];
    for (int64_t start = 0; start < n; start += BATCH) {
        const int count = n - start < BATCH ? n - start : BATCH;
        for (int i = 0; i < count; ++i) {
            Group<SIZE>& group = groups[i];
            const int64_t place = (start + i) * size;
            group.size = size;
            if (feedback.residual) group.load_sum(x + place, feedback.residual + place, feedback.factor);
            else group.load(x + place);
            if (format.diagonal) rotate<SIZE>(group.values, size, format.diagonal);
            grids[i] = group.grid(format);
        }
        for (int i = 0; i < count; ++i, packed += size * format.bits / 8) {
            if (dither.on) groups[i].dither_codes(grids[i], format.top(), dither, (start + i) * Dither::words_of(size));
            else if (!format.levels) groups[i].to_codes(grids[i], format.top());
            pack<SIZE>(groups[i].codes, size, format.bits, packed);
            store_scale(grids[i].step, steps, start + i, format.wide_scale);
            if (!format.symmetric) store_scale(grids[i].offset, offsets, start + i, format.wide_scale);
            if (feedback.error) groups[i].store_error(format, grids[i], x, feedback.error + (start + i) * size);
        }
    }
}

template <int SIZE, class Out>
void dequantize(const uint8_t* packed, const void* steps, const void* offsets, int64_t n, int64_t size, Format format,
                Out* y) {
    Group<SIZE> group;
    group.size = size;
    const bool whole = reinterpret_cast<uintptr_t>(y) % 64 == 0 && size * sizeof(Out) % (4 * LANES) == 0;
    const bool streams = whole && n * size * static_cast<int64_t>(sizeof(Out)) > STREAMED;
    for (int64_t i = 0; i < n; ++i, packed += size * format.bits / 8) {
        const float step = load_scale(steps, i, format.wide_scale);
        const float offset = format.symmetric ? step * (-format.top() / 2.0f) : load_scale(offsets, i, format.wide_scale);
        unpack<SIZE>(packed, size, format.bits, group.bytes);
        group.from_bytes(format, {step, offset, 0});
        if (format.diagonal) rotate_back<SIZE>(group.values, size, format.diagonal);
        if (streams) group.stream_to(y + i * size);
        else group.store_to(y + i * size);
    }
    if (streams) streamed();
}

#define FOR_SIZE(FUNCTION, ...)                          \
    switch (size) {                                      \
        case 32: return FUNCTION<32>(__VA_ARGS__);       \
        case 64: return FUNCTION<64>(__VA_ARGS__);       \
        case 128: return FUNCTION<128>(__VA_ARGS__);     \
        default: return FUNCTION<0>(__VA_ARGS__);        \
    }

void quantize_any(const void* x, int64_t bf16, Feedback feedback, Dither dither, int64_t n, int64_t size, Format format,
                  uint8_t* packed, void* steps, void* offsets) {
    const uint16_t* halves = static_cast<const uint16_t*>(x);
    const float* floats = static_cast<const float*>(x);
    if (bf16) FOR_SIZE(quantize, halves, feedback, dither, n, size, format, packed, steps, offsets)
    else FOR_SIZE(quantize, floats, feedback, dither, n, size, format, packed, steps, offsets)
}

}  // namespace

extern "C" {

// What the arguments may be is declared in quantize.py. `offsets` is not touched where the grid is symmetric, `diagonal`
// where groups are not rotated, `levels` where the grid is uniform.

void quantize_groups(const void* x, int64_t bf16, int64_t dithered, int64_t first, int64_t second, int64_t n, int64_t size, int64_t bits, int64_t symmetric,
                     int64_t wide_scale, int64_t unrotated, const float* diagonal, int64_t uniform, const float* levels,
                     uint8_t* packed, void* steps, void* offsets) {
    const Dither dither = {dithered != 0, static_cast<uint32_t>(first), static_cast<uint32_t>(second)};
    quantize_any(x, bf16, {}, dither, n, size, format(bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels), packed,
                 steps, offsets);
}

void quantize_groups_with_error(const void* x, int64_t bf16, const float* residual, float factor, float* error,
                                int64_t n, int64_t size, int64_t bits, int64_t symmetric, int64_t wide_scale,
                                int64_t unrotated, const float* diagonal, int64_t uniform, const float* levels,
                                uint8_t* packed, void* steps, void* offsets) {
    quantize_any(x, bf16, {residual, factor, error}, {}, n, size,
                 format(bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels), packed, steps, offsets);
}

void dequantize_groups(void* y, int64_t bf16, int64_t n, int64_t size, int64_t bits, int64_t symmetric,
                       int64_t wide_scale, int64_t unrotated, const float* diagonal, int64_t uniform,
                       const float* levels, const uint8_t* packed, const void* steps, const void* offsets) {
    const Format form = format(bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    if (bf16) FOR_SIZE(dequantize, packed, steps, offsets, n, size, form, static_cast<uint16_t*>(y))
    else FOR_SIZE(dequantize, packed, steps, offsets, n, size, form, static_cast<float*>(y))
}

}  // extern "C"
