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
    void fill_rows(int64_t row, int64_t count, uint8_t* to) {
        for (int64_t i = 0; i < count; i += ROW, ++row) {
            const uint32_t row_seed = seed(row);
            for (int j = 0; j < WORDS; j += LANES) {
                const Words words = (Words)load(offsets + j) + (Words)load(factors + j) * row_seed;
                store((Ints)(words ^ words >> 16), reinterpret_cast<int32_t*>(to + i + 4 * j));  // the lowest byte first
            }
        }
    }

    // The upper 8 bits of the draws of a whole vector of bytes, from `value` on in a row with that seed, as `narrowed` leaves
    // them.
    Bytes joined(uint32_t row_seed, int64_t value) const {
        const Words words = (Words)load(joined_offsets + value / 4) + (Words)load(joined_factors + value / 4) * row_seed;
        return (Bytes)(words ^ words >> 16);
    }

    // What draws of a row are made from. The seeds of some rows are made together.
    uint32_t seed(int64_t row) {
        const uint32_t inside = static_cast<uint32_t>(row) % LANES;
        if (row - inside != known) {
            known = row - inside;
            store((Ints)hashes(static_cast<uint32_t>(ROW + known)), seeds);
        }
        return static_cast<uint32_t>(seeds[inside]);
    }

private:
    static constexpr int WORDS = ROW / 4;

    Words hashes(uint32_t number) const {
        Words bits;
        for (int j = 0; j < LANES; ++j) bits[j] = j;
        bits = (bits + number) ^ first;
        bits = ((bits ^ bits >> 17) * 0xED5AD4BB) ^ second;
        bits = (bits ^ bits >> 11) * 0xAC4C1B51;
        bits = (bits ^ bits >> 15) * 0x31848BAB;
        return bits ^ bits >> 14;
    }

    alignas(64) int32_t offsets[WORDS], factors[WORDS], joined_offsets[WORDS], joined_factors[WORDS], seeds[LANES];
    int64_t known = -1;  // the row that `seeds` begin with
    uint32_t first, second;
};
