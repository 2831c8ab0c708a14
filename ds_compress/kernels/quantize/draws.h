// Random draws of stochastic rounding and of dither, as grid.py specifies them.

#pragma once

#include "../simd/vectors.h"

class Draws {
public:
    static constexpr int64_t ROW = 64;  // values

    Draws(int64_t first, int64_t second) : first(static_cast<uint32_t>(first)), second(static_cast<uint32_t>(second)) {
        constexpr int FACTORS = 16;
        for (int i = 0; i < WORDS; i += LANES) {
            const Words offset = hashes(i), factor = hashes(FACTORS + i) | 1;
            store((Ints)offset, offsets + i), store((Ints)joined_order((Bytes)offset), joined_offsets + i);
            store((Ints)factor, factors + i), store((Ints)joined_order((Bytes)factor), joined_factors + i);
        }
    }

    // The lower 8 bits of the draws of a group that begins with that row.
    uint32_t lower(int64_t row) { return seed(row) >> 24; }

    // The upper 8 bits of the draws of `count` values from the begin of a row on. All of the last row are written.
    void of_rows(int64_t row, int64_t count, uint8_t* to) {
        for (int64_t i = 0; i < count; i += ROW, ++row) {
            const uint32_t its = seed(row);
            for (int j = 0; j < WORDS; j += LANES) {
                const Words words = (Words)load(offsets + j) + (Words)load(factors + j) * its;
                store((Ints)(words ^ words >> 16), reinterpret_cast<int32_t*>(to + i + 4 * j));  // the lowest byte first
            }
        }
    }

    // The upper 8 bits of the draws of a whole vector of bytes, from `value` in that row on, as `narrowed` leaves them.
    Bytes joined(int64_t row, int64_t value) {
        const Words words = (Words)load(joined_offsets + value / 4) + (Words)load(joined_factors + value / 4) * seed(row);
        return (Bytes)(words ^ words >> 16);
    }

    // The upper 8 bits of the draw of one value, by its number in a group that begins with row 0.
    uint8_t upper(int64_t value) {
        alignas(64) uint8_t its[ROW];
        of_rows(value / ROW, 1, its);
        return its[value % ROW];
    }

private:
    static constexpr int WORDS = ROW / 4;

    // Of a number, or a vector of them.
    template <class Each>
    Each hashed(Each bits) const {
        bits ^= first;
        bits = ((bits ^ bits >> 17) * 0xED5AD4BB) ^ second;
        bits = (bits ^ bits >> 11) * 0xAC4C1B51;
        bits = (bits ^ bits >> 15) * 0x31848BAB;
        return bits ^ bits >> 14;
    }

    Words hashes(uint32_t number) const {
        Words numbers;
        for (int j = 0; j < LANES; ++j) numbers[j] = j;
        return hashed(numbers + number);
    }

    // Those of rows in a row are made for a vector of them.
    uint32_t seed(int64_t row) {
        if (static_cast<uint64_t>(row - known) >= LANES) {
            const bool is_next = row == next;
            next = row + (is_next ? LANES : 1);
            if (!is_next) return hashed(static_cast<uint32_t>(ROW + row));
            store((Ints)hashes(static_cast<uint32_t>(ROW + row)), seeds);
            known = row;
        }
        return static_cast<uint32_t>(seeds[row - known]);
    }

    alignas(64) int32_t offsets[WORDS], factors[WORDS], joined_offsets[WORDS], joined_factors[WORDS], seeds[LANES];
    int64_t known = -LANES, next = 0;  // the row that `seeds` begin with, and that which would follow the last ones
    uint32_t first, second;
};
