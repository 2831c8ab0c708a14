// Rows of a common magnitude, bit-identical to rows.py, which says why.

#include <algorithm>

#include "../native/calls.h"
#include "entropy.h"

namespace {

constexpr int64_t LARGER = 2, MOST_SHIFT = 126;
constexpr int8_t ZEROS = -128;

inline int64_t limited(int64_t shift) { return shift < -MOST_SHIFT ? -MOST_SHIFT : shift < MOST_SHIFT ? shift : MOST_SHIFT; }

inline float power_of_two(int64_t exponent) { return as_float(static_cast<uint32_t>(127 + exponent) << 23); }

// y = x * 2^octaves, of an x cut off at `most`; inf and nan stay. Both may be the same memory.
template <class Value>
void scale_row(const Value* x, int64_t width, int64_t octaves, float most, Value* y) {
    const float scale = power_of_two(octaves);
    in_vectors(width, [&](int64_t i, int64_t count) {
        store_partial(saturated(load_partial(x + i, count), most) * scale, y + i, count);
    });
}

// What the shift of a row follows from.
struct Level {
    int32_t mean = -1;  // exponent of the values that are not 0; -1: there are none
    int32_t most = 0;   // exponent of the largest magnitude
};

template <class Value>
Level level_of(const Value* x, int64_t width) {
    constexpr int64_t SOME = 1 << 20;  // whose exponents add up within 32 bits
    int64_t sum = 0, count = 0;
    int32_t most = 0;
    for (int64_t begin = 0; begin < width; begin += SOME) {
        const int64_t end = begin + SOME < width ? begin + SOME : width;
        int32_t exponents = 0, others = 0;
        for (int64_t i = begin; i < end; ++i) {
            const uint32_t bits = as_bits(to_float(x[i])) & MAGNITUDE;
            const int32_t exponent = static_cast<int32_t>(bits >> 23);
            exponents += exponent, others += bits != 0;
            most = exponent > most ? exponent : most;
        }
        sum += exponents, count += others;
    }
    Level level;
    if (count) level.mean = static_cast<int32_t>(sum / count), level.most = most;
    return level;
}

// The level in the middle of those of all rows that are not zeros; `counts` of each.
int64_t median_level(const int64_t (&counts)[256], int64_t rows) {
    int64_t level = 0, left = rows / 2;
    while (level < 255 && left >= counts[level]) left -= counts[level++];
    return level;
}

}  // namespace

extern "C" {

// x [rows, width], levels [2, rows]. Returns whether a row is shifted: only then `shifted` is written.
int64_t shift_rows(const void* x, int64_t bf16, int64_t rows, int64_t width, int64_t tolerance, int8_t* shifts,
                   int32_t* levels, void* shifted) {
    return with_type(x, bf16, [&](auto* values) -> int64_t {
        typedef std::remove_const_t<std::remove_pointer_t<decltype(values)>> Value;
        int64_t means[256] = {}, mosts[256] = {}, others = 0, largest = 0;
        for (int64_t row = 0; row < rows; ++row) {
            const Level level = level_of(values + row * width, width);
            levels[row] = level.mean, levels[rows + row] = level.most;
            largest = level.most > largest ? level.most : largest;
            if (level.mean >= 0) ++means[level.mean], ++mosts[level.most], ++others;
        }
        const int64_t median = median_level(means, others), median_most = median_level(mosts, others);
        bool is_shifted = false;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t most = levels[rows + row], below = median - levels[row];
            const int64_t up = below > tolerance ? std::min(below, largest - most) : 0;
            const int64_t down = std::min(-below - LARGER, most - median_most);
            const int64_t shift = limited(up - std::max<int64_t>(down, 0));
            shifts[row] = levels[row] < 0 ? ZEROS : static_cast<int8_t>(shift);
            is_shifted |= levels[row] >= 0 && shift;
        }
        if (!is_shifted) return 0;
        Value* y = static_cast<Value*>(shifted);
        for (int64_t row = 0; row < rows; ++row)
            scale_row(values + row * width, width, shifts[row] == ZEROS ? 0 : shifts[row], as_float(INFINITE),
                      y + row * width);
        return 1;
    });
}

// y [rows, width], in place.
void unshift_rows(void* y, int64_t bf16, int64_t rows, int64_t width, const int8_t* shifts) {
    with_type(y, bf16, [&](auto* values) {
        for (int64_t row = 0; row < rows; ++row) {
            auto* own = values + row * width;
            if (shifts[row] == ZEROS)
                for (int64_t i = 0; i < width; ++i) store(to_float(own[i]) - to_float(own[i]), own[i]);  // nan stays
            else if (const int64_t octaves = limited(shifts[row]))
                scale_row(own, width, -octaves, to_float(largest(own)) * power_of_two(octaves), own);
        }
    });
}

EXPORT(shift_rows)
EXPORT(unshift_rows)

}  // extern "C"
