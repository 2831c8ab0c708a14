// The numbers of kernels/entropy.py.

#pragma once

#include <cstdint>

constexpr int64_t PER_OCTAVE = 256, OCTAVES = 24, KEYS = OCTAVES * PER_OCTAVE, LOWEST = 127 - OCTAVES + 1;
constexpr int64_t FINER = 64, STEPS = OCTAVES * FINER + 1, REACH = 127, SYMBOLS = 2 * REACH + 2;
constexpr int SCALE_BITS = 12, COST_BITS = 16, SHIFT_BITS = 10, KEY_SHIFT = 15;
constexpr uint32_t LOW_BITS = (1 << SCALE_BITS) - 1;  // of a state
constexpr int64_t TOTAL = 1 << SCALE_BITS, SURE = 5732, SHIFT_LEAST = -576, SHIFT_MOST = 448;
constexpr uint32_t START = 1 << 16;
constexpr float HIGHEST = 255.0f / 128;
constexpr int64_t NOT_FINITE = 255, HEAD = 2, REACHES = 2, MOST_CONTEXTS = 16;

struct Tables {
    const int32_t* first;  // [FINER, REACH + 1]
    const int64_t* units;  // [STEPS]
    const int32_t* cost;   // [TOTAL + 1]
};

// Where the parts of a code are; lanes is 1 to MOST_LANES, contexts 1 to MOST_CONTEXTS.
struct Frame {
    int64_t numel, words, lanes, length, blocks, contexts;
    const int64_t* ends;  // [contexts]

    int64_t sizes() const { return 2 * blocks * lanes; }
    int64_t head() const { return 2 * blocks * (lanes + 1); }
    int64_t tables() const { return head() + HEAD + REACHES * contexts; }
    int64_t room() const { return words - tables(); }
    int64_t begin(int64_t context) const { return context ? ends[context - 1] : 0; }
    int64_t context_of(int64_t value) const {
        int64_t context = 0;
        while (ends[context] <= value) ++context;
        return context;
    }
    int64_t count(int64_t block) const {
        const int64_t left = numel - block * length;
        return left < length ? left : length;
    }
};

// How many values have a key, or a higher one; of positive and of negative values.
typedef uint32_t Counts[2][KEYS + 1];
typedef uint32_t Histogram[2][KEYS];
