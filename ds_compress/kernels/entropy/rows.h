// Rows of a common magnitude, bit-identical to rows.py, which says why.

#pragma once

#include <algorithm>

#include "entropy.h"

constexpr int64_t LARGER = 2, MOST_SHIFT = 126;
constexpr int8_t ZEROS = -128;

inline int64_t limited(int64_t shift) { return std::clamp(shift, -MOST_SHIFT, MOST_SHIFT); }

inline float power_of_two(int64_t exponent) { return as_float(static_cast<uint32_t>(127 + exponent) << 23); }

// y = x * 2^octaves, of an x cut off at `most`; inf and nan stay. Both may be the same memory.
template <class Value>
void scale(const Value* x, int64_t n, int64_t octaves, float most, Value* y) {
    const float factor = power_of_two(octaves);
    in_vectors(n, [&](int64_t i, int64_t count) {
        store_partial(saturated(load_partial(x + i, count), most) * factor, y + i, count);
    });
}

// f(row, i, how many) of the parts of rows that values [begin, begin + n) are, of which each begins with value begin + i.
template <class F>
inline void each_part(int64_t begin, int64_t n, int64_t width, const F& f) {
    for (int64_t i = 0; i < n;) {
        const int64_t row = (begin + i) / width, count = std::min(n - i, (row + 1) * width - begin - i);
        f(row, i, count);
        i += count;
    }
}

// What the shift of a row follows from.
struct Level {
    int32_t mean = -1;  // exponent of the values that are not 0; -1: there are none
    int32_t most = 0;   // bits of the largest magnitude
};

template <class Value>
Level level_of(const Value* x, int64_t width) {
    constexpr int64_t SOME = 1 << 20;  // whose exponents add up within 32 bits
    int64_t sum = 0, count = 0;
    Level level;
    for (int64_t begin = 0; begin < width; begin += SOME) {
        const int64_t end = std::min(begin + SOME, width);
        int32_t exponents = 0, others = 0, most = 0;
        for (int64_t i = begin; i < end; ++i) {
            const int32_t bits = static_cast<int32_t>(as_bits(to_float(x[i])) & MAGNITUDE);
            exponents += bits >> 23, others += bits != 0;
            most = bits > most ? bits : most;
        }
        sum += exponents, count += others, level.most = std::max(level.most, most);
    }
    if (count) level.mean = static_cast<int32_t>(sum / count);
    return level;
}

// The level in the middle of those of all rows that are not zeros; `counts` of each.
inline int64_t median_level(const int64_t (&counts)[256], int64_t rows) {
    int64_t level = 0, left = rows / 2;
    while (level < 255 && left >= counts[level]) left -= counts[level++];
    return level;
}

// A message that is encoded, in rows that are shifted as they are read.
template <class In>
class ShiftedRows {
public:
    uint32_t largest = 0;  // bits of the largest magnitude

    // x [numel] in `rows`; of none, nothing is shifted. levels [rows].
    ShiftedRows(const In* x, int64_t numel, int64_t rows, int64_t tolerance, Level* levels, int8_t* shifts)
        : x(x), width(rows ? numel / rows : numel) {
        if (!rows) {
            largest = largest_bits(x, numel);
            return;
        }
        int64_t means[256] = {}, mosts[256] = {}, others = 0, highest = 0;
        for (int64_t row = 0; row < rows; ++row) {
            const Level level = levels[row] = level_of(x + row * width, width);
            highest = std::max<int64_t>(highest, level.most >> 23);
            if (level.mean >= 0) ++means[level.mean], ++mosts[level.most >> 23], ++others;
        }
        const int64_t median = median_level(means, others), median_most = median_level(mosts, others);
        for (int64_t row = 0; row < rows; ++row) {
            const Level level = levels[row];
            const int64_t most = level.most >> 23, below = median - level.mean;
            const int64_t up = below > tolerance ? std::min(below, highest - most) : 0;
            const int64_t down = std::min(-below - LARGER, most - median_most);
            const int64_t shift = level.mean < 0 ? 0 : limited(up - std::max<int64_t>(down, 0));
            shifts[row] = level.mean < 0 ? ZEROS : static_cast<int8_t>(shift);
            if (shift) this->shifts = shifts;
            In most_of_row;
            store(as_float(static_cast<uint32_t>(level.most)) * power_of_two(shift), most_of_row);
            largest = std::max(largest, as_bits(to_float(most_of_row)) & MAGNITUDE);
        }
    }

    // Values [begin, begin + n); in `space`, unless all are of one row that stays.
    const In* read(int64_t begin, int64_t n, In* space) const {
        if (!shifts) return x + begin;
        const int64_t row = begin / width;
        if (shifts[row] == 0 && begin + n <= (row + 1) * width) return x + begin;
        each_part(begin, n, width, [&](int64_t row, int64_t i, int64_t count) {
            scale(x + begin + i, count, shifts[row] == ZEROS ? 0 : shifts[row], as_float(INFINITE), space + i);
        });
        return space;
    }

private:
    const In* x;
    const int64_t width;
    const int8_t* shifts = nullptr;
};

// A message that is decoded, whose rows are shifted back.
template <class Out>
struct UnshiftedRows {
    Out* y;
    int64_t width;
    const int8_t* shifts;  // or null

    // Values [begin, begin + n), in place.
    void unshift(int64_t begin, int64_t n) const {
        if (!shifts) return;
        each_part(begin, n, width, [&](int64_t row, int64_t i, int64_t count) {
            Out* own = y + begin + i;
            if (shifts[row] == ZEROS)
                for (int64_t j = 0; j < count; ++j) store(to_float(own[j]) - to_float(own[j]), own[j]);  // nan stays
            else if (const int64_t octaves = limited(shifts[row]))
                scale(own, count, -octaves, to_float(::largest(own)) * power_of_two(octaves), own);
        });
    }
};
