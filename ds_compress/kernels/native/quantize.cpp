// Group-wise quantization, as kernels/reference.py specifies it: equal to the bit.
//
// A group is read once, and everything else happens in the first-level cache.

#include "floats.h"

namespace {

constexpr int LANES = 16;
constexpr int MAX_GROUP = 4096;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

// Every lane has the value of the one DISTANCE away, to either side.
template <int DISTANCE>
Floats exchanged(Floats x) {
#ifdef __clang__
    return __builtin_shufflevector(
        x, x, 0 ^ DISTANCE, 1 ^ DISTANCE, 2 ^ DISTANCE, 3 ^ DISTANCE, 4 ^ DISTANCE, 5 ^ DISTANCE, 6 ^ DISTANCE,
        7 ^ DISTANCE, 8 ^ DISTANCE, 9 ^ DISTANCE, 10 ^ DISTANCE, 11 ^ DISTANCE, 12 ^ DISTANCE, 13 ^ DISTANCE,
        14 ^ DISTANCE, 15 ^ DISTANCE);
#else
    Ints lanes;
    for (int j = 0; j < LANES; ++j) lanes[j] = j ^ DISTANCE;
    return __builtin_shuffle(x, lanes);
#endif
}

struct Format {
    int64_t bits, symmetric, hadamard, wide_scale;  // wide_scale: fp32 rather than bf16
    float scale;                                    // of the rotation: the square root of 1 / group size

    int top() const { return (1 << bits) - (symmetric && bits > 1 ? 2 : 1); }
};

struct Grid {
    float step, offset;
};

// The smallest float of the scale's format that is not below x; nan stays nan.
float at_least(float x, bool wide) {
    if (wide || x != x) return x;
    const uint32_t bits = as_bits(x);
    return as_float((bits >> 31 ? bits : bits + 0xFFFF) & 0xFFFF0000);
}

// Its own inverse.
int32_t ordered(uint32_t bits) {
    const int32_t all = static_cast<int32_t>(bits);
    return all ^ (all >> 31 & static_cast<int32_t>(MAGNITUDE));
}

// SIZE is that of the group, or 0 where it is known at run time only.
template <int SIZE>
struct Group {
    int64_t size;
    alignas(64) float values[SIZE ? SIZE : MAX_GROUP + LANES];
    alignas(64) float total[SIZE ? SIZE : MAX_GROUP];  // what the values are rounded from, where the error is wanted
    alignas(64) uint8_t codes[SIZE ? SIZE : MAX_GROUP];

    int64_t count() const { return SIZE ? SIZE : size; }

    template <class In>
    void load(const In* x) {
        for (int64_t i = 0; i < count(); ++i) values[i] = to_float(x[i]);
    }

    // The sum with factor * residual, within the range of x's type; see `narrow` in codec.py.
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
        from_codes(grid);
        if (format.hadamard) rotate(format.scale);
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

    // Butterflies, nearest values first: those within a vector, then those between vectors.
    void rotate(float scale) {
        const int64_t near = count() < LANES ? count() : LANES;
        for (int64_t start = 0; start < count(); start += near) {
            if (near > 1) within<1>(values + start);
            if (near > 2) within<2>(values + start);
            if (near > 4) within<4>(values + start);
            if (near > 8) within<8>(values + start);
        }
        for (int64_t distance = near; distance < count(); distance *= 2)
            for (int64_t start = 0; start < count(); start += 2 * distance)
                for (int64_t i = start; i < start + distance; ++i) {
                    const float first = values[i], second = values[i + distance];
                    values[i] = first + second;
                    values[i + distance] = first - second;
                }
        for (int64_t i = 0; i < count(); ++i) values[i] *= scale;
    }

    // On LANES values, whatever the group: what is beyond its end is not used.
    template <int DISTANCE>
    static void within(float* v) {
        Floats x;
        std::memcpy(&x, v, sizeof x);
        Ints sign;
        for (int j = 0; j < LANES; ++j) sign[j] = j & DISTANCE ? INT32_MIN : 0;
        x = exchanged<DISTANCE>(x) + (Floats)((Ints)x ^ sign);
        std::memcpy(v, &x, sizeof x);
    }

    Grid grid(const Format& format) const {
        if (format.symmetric) {
            uint32_t reach = 0;  // of nan: above that of infinity
            for (int64_t i = 0; i < count(); ++i) {
                const uint32_t bits = as_bits(values[i]) & MAGNITUDE;
                reach = bits > reach ? bits : reach;
            }
            const float step = at_least(2 * as_float(reach) / format.top(), format.wide_scale);
            return {step, step * (-format.top() / 2.0f)};
        }
        // Integers that order as the floats do, nan beyond the infinities: the compiler reduces those in vectors.
        int32_t low = INT32_MAX, high = INT32_MIN;
        for (int64_t i = 0; i < count(); ++i) {
            const int32_t key = ordered(as_bits(values[i]));
            low = key < low ? key : low;
            high = key > high ? key : high;
        }
        if (low < ordered(INFINITE | ~MAGNITUDE) || high > ordered(INFINITE)) {
            const float nan = as_float(MAGNITUDE);
            return {nan, nan};
        }
        const float offset = -at_least(-as_float(ordered(low)), format.wide_scale);
        return {at_least((as_float(ordered(high)) - offset) / format.top(), format.wide_scale), offset};
    }

    void to_codes(Grid grid, int top) {
        const float divisor = grid.step > 0 ? grid.step : 1, most = top;
        for (int64_t i = 0; i < count(); ++i) {
            float position = (values[i] - grid.offset) / divisor + 0.5f;
            position = position > 0 ? position : 0;  // nan too
            codes[i] = static_cast<uint8_t>(static_cast<int32_t>(position < most ? position : most));
        }
    }

    void from_codes(Grid grid) {
        for (int64_t i = 0; i < count(); ++i) values[i] = static_cast<float>(codes[i]) * grid.step + grid.offset;
    }

    // One piece of kernels/bits.py: WIDTH bits of every code, from bit SHIFT on.
    template <int WIDTH, int SHIFT>
    uint8_t* pack(uint8_t* packed) const {
        constexpr int planes = 8 / WIDTH;
        const int64_t run = count() / planes;
        for (int64_t j = 0; j < run; ++j) {
            uint8_t byte = 0;
            for (int i = 0; i < planes; ++i) byte |= (codes[i * run + j] >> SHIFT & ((1 << WIDTH) - 1)) << (WIDTH * i);
            packed[j] = byte;
        }
        return packed + run;
    }

    template <int WIDTH, int SHIFT>
    const uint8_t* unpack(const uint8_t* packed) {
        constexpr int planes = 8 / WIDTH;
        const int64_t run = count() / planes;
        for (int i = 0; i < planes; ++i)
            for (int64_t j = 0; j < run; ++j) {
                const uint8_t part = (packed[j] >> (WIDTH * i) & ((1 << WIDTH) - 1)) << SHIFT;
                codes[i * run + j] = SHIFT ? codes[i * run + j] | part : part;
            }
        return packed + run;
    }

    void pack(int64_t bits, uint8_t* packed) const {
        switch (bits) {
            case 1: pack<1, 0>(packed); break;
            case 2: pack<2, 0>(packed); break;
            case 3: pack<1, 2>(pack<2, 0>(packed)); break;
            case 4: pack<4, 0>(packed); break;
            case 5: pack<1, 4>(pack<4, 0>(packed)); break;
            case 6: pack<2, 4>(pack<4, 0>(packed)); break;
            case 7: pack<1, 6>(pack<2, 4>(pack<4, 0>(packed))); break;
            case 8: pack<8, 0>(packed); break;
        }
    }

    void unpack(int64_t bits, const uint8_t* packed) {
        switch (bits) {
            case 1: unpack<1, 0>(packed); break;
            case 2: unpack<2, 0>(packed); break;
            case 3: unpack<1, 2>(unpack<2, 0>(packed)); break;
            case 4: unpack<4, 0>(packed); break;
            case 5: unpack<1, 4>(unpack<4, 0>(packed)); break;
            case 6: unpack<2, 4>(unpack<4, 0>(packed)); break;
            case 7: unpack<1, 6>(unpack<2, 4>(unpack<4, 0>(packed))); break;
            case 8: unpack<8, 0>(packed); break;
        }
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
void quantize(const In* x, Feedback feedback, int64_t n, int64_t size, Format format, uint8_t* packed, void* steps,
              void* offsets) {
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
            if (format.hadamard) group.rotate(format.scale);
            grids[i] = group.grid(format);
        }
        for (int i = 0; i < count; ++i, packed += size * format.bits / 8) {
            groups[i].to_codes(grids[i], format.top());
            groups[i].pack(format.bits, packed);
            store_scale(grids[i].step, steps, start + i, format.wide_scale);
            if (!format.symmetric) store_scale(grids[i].offset, offsets, start + i, format.wide_scale);
            if (feedback.error) groups[i].store_error(format, grids[i], x, feedback.error + (start + i) * size);
        }
    }
}

template <int SIZE>
void dequantize(const uint8_t* packed, const void* steps, const void* offsets, int64_t n, int64_t size, Format format,
                void* y, bool bf16) {
    Group<SIZE> group;
    group.size = size;
    for (int64_t i = 0; i < n; ++i, packed += size * format.bits / 8) {
        const float step = load_scale(steps, i, format.wide_scale);
        const float offset = format.symmetric ? step * (-format.top() / 2.0f) : load_scale(offsets, i, format.wide_scale);
        group.unpack(format.bits, packed);
        group.from_codes({step, offset});
        if (format.hadamard) group.rotate(format.scale);
        if (bf16) group.store_to(static_cast<uint16_t*>(y) + i * size);
        else group.store_to(static_cast<float*>(y) + i * size);
    }
}

}  // namespace

#define FOR_SIZE(FUNCTION, ...)                          \
    switch (size) {                                      \
        case 32: return FUNCTION<32>(__VA_ARGS__);       \
        case 64: return FUNCTION<64>(__VA_ARGS__);       \
        case 128: return FUNCTION<128>(__VA_ARGS__);     \
        default: return FUNCTION<0>(__VA_ARGS__);        \
    }

extern "C" {

// `size` is a multiple of 8 and at most 4096; `offsets` is not touched where the grid is symmetric. `residual` and
// `error` are null without error feedback.
void quantize_groups(const void* x, int64_t bf16, const float* residual, float factor, float* error, int64_t n,
                     int64_t size, int64_t bits, int64_t symmetric, int64_t hadamard, int64_t wide_scale, float scale,
                     uint8_t* packed, void* steps, void* offsets) {
    const Format format{bits, symmetric, hadamard, wide_scale, scale};
    const Feedback feedback{residual, factor, error};
    if (bf16) FOR_SIZE(quantize, static_cast<const uint16_t*>(x), feedback, n, size, format, packed, steps, offsets)
    else FOR_SIZE(quantize, static_cast<const float*>(x), feedback, n, size, format, packed, steps, offsets)
}

void dequantize_groups(const uint8_t* packed, const void* steps, const void* offsets, int64_t n, int64_t size,
                       int64_t bits, int64_t symmetric, int64_t hadamard, int64_t wide_scale, float scale, void* y,
                       int64_t bf16) {
    const Format format{bits, symmetric, hadamard, wide_scale, scale};
    FOR_SIZE(dequantize, packed, steps, offsets, n, size, format, y, bf16 != 0)
}

}  // extern "C"
