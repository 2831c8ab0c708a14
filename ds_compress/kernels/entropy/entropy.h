// The numbers of format.py, the frame of a code, and the histogram of keys: bins of the logarithm of magnitudes.

#pragma once

#include <cstdint>

#include "../simd/nontemporal.h"
#include "../simd/vectors.h"

constexpr int64_t PER_OCTAVE = 256, OCTAVES = 24, KEYS = OCTAVES * PER_OCTAVE, LOWEST = 127 - OCTAVES + 1;
constexpr int64_t FINER = 64, STEPS = OCTAVES * FINER + 1, REACH = 127, SYMBOLS = 2 * REACH + 2;
constexpr int SCALE_BITS = 12, COST_BITS = 16, SHIFT_BITS = 10, KEY_SHIFT = 15;
constexpr uint32_t LOW_BITS = (1 << SCALE_BITS) - 1;  // of a state
constexpr int64_t TOTAL = 1 << SCALE_BITS, ROUNDING_COST = 5732, SHIFT_LEAST = -576, SHIFT_MOST = 448;
constexpr uint32_t START = 1 << 16;
constexpr float HIGHEST = 255.0f / 128;
constexpr int64_t NOT_FINITE = 255, HEAD = 2, REACHES = 2, CLASSES = 4, CLASS_BITS = 2;

// What follows from the format alone, see `FormatTables` in format.py.
struct Tables {
    const int32_t* first;    // [FINER, REACH + 1]
    const int64_t* units;    // [STEPS]
    const int64_t* weight;   // [KEYS]
    const int32_t* cost;     // [TOTAL + 1]
    const int32_t* quarter;  // [FINER, QUARTERS + 1]
    const float* inverse;    // [STEPS]
};

// Where the parts of a code are; lanes is 1 to MOST_LANES.
struct Frame {
    int64_t numel, words, lanes, length, blocks, classes;  // classes: of the dither, each with a table; 1 without

    int64_t sizes() const { return 2 * blocks * lanes; }
    int64_t head() const { return 2 * blocks * (lanes + 1); }
    int64_t tables() const { return head() + HEAD + REACHES * classes; }
    int64_t room() const { return words - tables(); }
    int64_t count(int64_t block) const {
        const int64_t left = numel - block * length;
        return left < length ? left : length;
    }
};

// Of `encode_entropy`, as cpu.py declares them.
struct EncodeArguments {
    void* values;
    int64_t bf16;
    Frame frame;
    int64_t rows, is_sampled, spare;  // rows: that are shifted, or 0
    Tables tables;
    int64_t dithered, first, second, tolerance;
    uint16_t* keys;     // [numel]
    uint32_t* space;    // [2 * KEYS * COPIES + 4 * KEYS + 2]
    uint16_t* scratch;  // [AT_ONCE, length]
    int64_t *sums, *levels;  // [2, KEYS + 1], [rows]
    uint16_t* words;
    int8_t* shifts;  // [rows]
};

// How many values have a key, or a higher one; of positive and of negative values.
typedef uint32_t Counts[2][KEYS + 1];
typedef uint32_t Histogram[2][KEYS];

constexpr int COPIES = 4;  // of the histogram: equal keys in a row do not wait for each other

// Keys of x [n], those of negative values KEYS later. SIZE is n, or 0 where it is known at run time only.
template <int64_t SIZE = 0, class In>
inline void make_keys(const In* x, int64_t n, uint32_t exponent, uint16_t* keys) {
    const float scale = as_float((255 - exponent) << 23);
    const int64_t count = SIZE ? SIZE : n;
    for (int64_t i = 0; i < count; ++i) {
        const float value = to_float(x[i]);
        const int32_t scaled = static_cast<int32_t>(as_bits(value * scale) & MAGNITUDE);
        const int32_t key = (scaled >> KEY_SHIFT) - static_cast<int32_t>((LOWEST + 1) * PER_OCTAVE);
        const int32_t inside = key > 0 ? key : 0, side = as_bits(value) >> 31 ? KEYS : 0;
        keys[i] = static_cast<uint16_t>(inside + side);
    }
}

// Adds to `copies` [COPIES, 2 * KEYS]; or to [COPIES, STRIDE].
template <int64_t STRIDE = 2 * KEYS>
inline void count_keys(const uint16_t* keys, int64_t n, uint32_t* copies) {
    int64_t i = 0;
    for (; i + COPIES <= n; i += COPIES)
        for (int copy = 0; copy < COPIES; ++copy) ++copies[STRIDE * copy + keys[i + copy]];
    for (; i < n; ++i) ++copies[keys[i]];
}

// How many values have each key or a higher one.
inline void add_up(const Histogram& histogram, Counts& counts) {
    for (int64_t side = 0; side < 2; ++side) {
        counts[side][KEYS] = 0;
        for (int64_t key = KEYS - 1; key >= 0; --key) counts[side][key] = counts[side][key + 1] + histogram[side][key];
    }
}

// The bits of the largest magnitude; of nan, if there is one.
template <class In>
inline uint32_t largest_bits(const In* x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = as_bits(to_float(x[i])) & MAGNITUDE;
        most = bits > most ? bits : most;
    }
    return most;
}

inline uint32_t exponent_of(uint32_t largest) { return largest >> 23 ? largest >> 23 : 1; }
