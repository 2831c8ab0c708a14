// Encoding as kernels/reference/entropy.py specifies it: equal to the bit.

#pragma once

#include "floats.h"
#include "lanes.h"
#include "rate.h"

namespace {

constexpr int COPIES = 4;  // of the histogram: equal keys in a row do not wait for each other

// Keys of x, those of negative values KEYS later, and how many there are of each.
template <class In>
void find_keys(const In* x, int64_t n, uint32_t exponent, uint16_t* keys, uint32_t* copies) {
    const float scale = as_float((255 - exponent) << 23);
    constexpr int64_t RUN = 1024;
    for (int64_t start = 0; start < n; start += RUN) {
        const int64_t end = start + RUN < n ? start + RUN : n;
        for (int64_t i = start; i < end; ++i) {
            const float value = to_float(x[i]);
            const int32_t scaled = static_cast<int32_t>(as_bits(value * scale) & MAGNITUDE);
            const int32_t key = (scaled >> KEY_SHIFT) - static_cast<int32_t>((LOWEST + 1) * PER_OCTAVE);
            const int32_t inside = key > 0 ? key : 0, side = as_bits(value) >> 31 ? KEYS : 0;
            keys[i] = static_cast<uint16_t>(inside + side);
        }
        int64_t i = start;
        for (; i + COPIES <= end; i += COPIES)
            for (int copy = 0; copy < COPIES; ++copy) ++copies[2 * KEYS * copy + keys[i + copy]];
        for (; i < end; ++i) ++copies[keys[i]];
    }
}

template <class In>
uint32_t exponent_of(const In* x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = as_bits(to_float(x[i])) & MAGNITUDE;
        most = bits > most ? bits : most;
    }
    return most >> 23 ? most >> 23 : 1;
}

void store_word(uint16_t* words, int64_t place, uint64_t number) {
    words[place] = static_cast<uint16_t>(number), words[place + 1] = static_cast<uint16_t>(number >> 16);
}

// What the encoder needs of each symbol.
struct Coder {
    uint32_t entry[SYMBOLS];  // (frequency - 1) << SCALE_BITS | start

    explicit Coder(const Plan& plan) {
        uint32_t start = 0;
        for (int64_t i = 0; i <= plan.beyond(); ++i) {
            const uint32_t frequency = plan.frequency[i];
            entry[i] = (frequency - 1) << SCALE_BITS | start;  // of a symbol that does not occur, never used
            start += frequency;
        }
    }
};

// One step of `lanes` lanes, of which the last may have no value: their words go in front of `out`, whose new place it
// returns.
template <int LANES>
uint16_t* encode_step(const uint32_t* table, const uint16_t* keys, int64_t lanes, uint32_t* state, uint16_t* out) {
    uint32_t low[MOST_LANES], full[MOST_LANES];
    const int64_t count = LANES ? LANES : lanes;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t entry = table[keys[i]], f = (entry >> SCALE_BITS) + 1, start = entry & (TOTAL - 1);
        uint32_t x = state[i];
        low[i] = x;
        full[i] = (x >> 20) >= f;  // the next state would not fit in 32 bits
        x = full[i] ? x >> 16 : x;
        // a quotient of integers is further from the next one than doubles are from each other
        const uint32_t quotient = static_cast<uint32_t>(static_cast<double>(x) / static_cast<double>(f));
        state[i] = x + quotient * (TOTAL - f) + start;
    }
    if (LANES) return push(low, full, out);
    for (int64_t i = count - 1; i >= 0; --i)
        if (full[i]) *--out = static_cast<uint16_t>(low[i]);
    return out;
}

template <int LANES>
uint16_t* encode_block(const uint32_t* table, const uint16_t* keys, int64_t count, int64_t lanes, uint32_t* state,
                       uint16_t* out) {
    for (int64_t i = 0; i < lanes; ++i) state[i] = START;
    const int64_t rest = count % lanes;
    int64_t place = count - rest;
    if (rest) out = encode_step<0>(table, keys + place, rest, state, out);
    while (place) {
        place -= lanes;
        out = encode_step<LANES>(table, keys + place, lanes, state, out);
    }
    return out;
}

// Writes the values that are beyond, the first one last, in front of `place`.
void write_escapes(const uint16_t* keys, const Plan& plan, int64_t n, uint16_t* place) {
    const uint16_t above = static_cast<uint16_t>(plan.first[plan.above]);
    const uint16_t below = static_cast<uint16_t>(plan.first[plan.below] + KEYS);
    constexpr int64_t RUN = 32;  // most of them have none
    for (int64_t start = 0; start < n; start += RUN) {
        const int64_t end = start + RUN < n ? start + RUN : n;
        uint16_t found = 0;
        for (int64_t i = start; i < end; ++i) found |= ((keys[i] >= above) & (keys[i] < KEYS)) | (keys[i] >= below);
        for (int64_t i = start; found && i < end; ++i) {
            const int64_t side = keys[i] >= KEYS;
            if (keys[i] < (side ? below : above)) continue;
            *--place = static_cast<uint16_t>(keys[i] - side * KEYS + (side << 15));
        }
    }
}

// Whether the code of `plan` has found room. `scratch`: uint16 [length]; a value writes one word at most.
bool encode(const uint16_t* keys, uint32_t exponent, int64_t shift, const Plan& plan, Frame frame, uint32_t* table,
            uint16_t* scratch, uint16_t* words) {
    const Coder coder(plan);
    const uint32_t beyond = coder.entry[plan.beyond()];
    for (int64_t side = 0; side < 2; ++side) {
        const int64_t reach = side ? plan.below : plan.above;
        int64_t key = 0;
        for (int64_t q = 0; q <= reach; ++q)
            for (; key < plan.first[q]; ++key) table[side * KEYS + key] = coder.entry[plan.below + (side ? -q : q)];
        for (; key < KEYS; ++key) table[side * KEYS + key] = beyond;
    }
    uint16_t* head = words + frame.head();
    head[0] = static_cast<uint16_t>(exponent), head[1] = static_cast<uint16_t>(plan.step);
    head[2] = static_cast<uint16_t>(plan.above << 8 | plan.below), head[3] = static_cast<uint16_t>(shift);
    uint16_t* out = head + HEAD;
    for (int64_t i = 0; i <= plan.beyond(); ++i)
        if (i != plan.below) *out++ = static_cast<uint16_t>(plan.frequency[i]);
    uint16_t* last = words + frame.words - plan.escapes;
    if (last < out) return false;
    if (plan.escapes) write_escapes(keys, plan, frame.numel, words + frame.words);
    for (int64_t block = 0; block < frame.blocks; ++block) {
        uint32_t state[MOST_LANES];
        const int64_t count = frame.count(block);
        const uint16_t* its = keys + block * frame.length;
        uint16_t *end = scratch + count, *begin;
        if (frame.lanes == MOST_LANES) begin = encode_block<MOST_LANES>(table, its, count, frame.lanes, state, end);
        else begin = encode_block<0>(table, its, count, frame.lanes, state, end);
        if (end - begin > last - out) return false;
        store_word(words, frame.sizes() + 2 * block, end - begin);
        for (; begin < end; ++begin, ++out) *out = *begin;
        for (int64_t i = 0; i < frame.lanes; ++i) store_word(words, 2 * (block * frame.lanes + i), state[i]);
    }
    return true;
}

void clear(uint16_t* words, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) words[i] = 0;
}

template <class In>
void encode_tensor(const In* x, Frame frame, Tables tables, uint16_t* keys, uint32_t* space, uint16_t* scratch,
                   uint16_t* words) {
    const uint32_t exponent = exponent_of(x, frame.numel);
    clear(words, 0, frame.words);
    if (exponent == NOT_FINITE) {
        words[frame.head()] = NOT_FINITE;
        return;
    }
    for (int64_t i = 0; i < 2 * KEYS * COPIES; ++i) space[i] = 0;
    find_keys(x, frame.numel, exponent, keys, space);
    static thread_local uint32_t histogram[2][KEYS];
    static thread_local Counts counts;
    for (int64_t side = 0; side < 2; ++side) {
        counts[side][KEYS] = 0;
        for (int64_t key = KEYS - 1; key >= 0; --key) {
            uint32_t total = 0;
            for (int64_t copy = 0; copy < COPIES; ++copy) total += space[2 * KEYS * copy + side * KEYS + key];
            histogram[side][key] = total;
            counts[side][key] = counts[side][key + 1] + total;
        }
    }
    for (int sure = 0; sure < 2; ++sure) {  // where the first code comes out too long, the second one cannot
        Plan plan;
        search(counts, frame.numel, frame.room(), tables, sure, plan);
        const int64_t shift = shift_of(histogram, counts, plan, tables);
        if (encode(keys, exponent, shift, plan, frame, space, scratch, words)) return;
        clear(words, 0, frame.words);
    }
}

}  // namespace
